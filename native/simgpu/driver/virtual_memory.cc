// The virtual-memory functions: physical pieces of a sparse memory file, mapped at reserved
// addresses.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "simgpu/driver/memory.h"

namespace gpupool::simgpu {
namespace {

void* pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

bool cover_with_nothing(uint64_t begin, uint64_t bytes) {
  return mmap(pointer(begin), bytes, PROT_NONE,
              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != MAP_FAILED;
}

}  // namespace

VirtualMemory& virtual_memory() {
  static auto& memory = *new VirtualMemory;
  return memory;
}

bool PhysicalStore::allocate(uint64_t bytes, uint64_t* offset) {
  std::lock_guard lock(mutex_);
  if (fd_ < 0) fd_ = memfd_create("gpupool-simgpu", MFD_CLOEXEC);
  if (fd_ < 0) return false;
  if (card_ && !card_->charge(bytes)) return false;
  for (auto at = free_.begin(); at != free_.end(); ++at) {
    if (at->second < bytes) continue;
    *offset = at->first;
    uint64_t rest = at->second - bytes;
    free_.erase(at);
    if (rest) free_[*offset + bytes] = rest;
    return true;
  }
  if (ftruncate(fd_, off_t(end_ + bytes)) != 0) {
    if (card_) card_->uncharge(bytes);
    return false;
  }
  *offset = end_;
  end_ += bytes;
  return true;
}

void PhysicalStore::release(uint64_t offset, uint64_t bytes) {
  std::lock_guard lock(mutex_);
  // The hole gives the pages back and makes the piece read as zero when it is used again.
  if (fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(offset), off_t(bytes)) !=
      0) {
    return;  // keep it charged: better less memory than somebody's old data
  }
  if (card_) card_->uncharge(bytes);
  auto next = free_.lower_bound(offset);
  if (next != free_.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == offset) {
      offset = before->first;
      bytes += before->second;
      free_.erase(before);
    }
  }
  if (next != free_.end() && offset + bytes == next->first) {
    bytes += next->second;
    free_.erase(next);
  }
  free_[offset] = bytes;
}

PhysicalMemory::~PhysicalMemory() { store->release(offset, bytes); }

uint64_t VirtualMemory::reserve(uint64_t bytes, uint64_t alignment, uint64_t hint) {
  alignment = std::max(alignment, kGranule);
  std::lock_guard lock(mutex_);
  uint64_t begin = 0;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  if (hint && hint % alignment == 0) {
    void* at = mmap(pointer(hint), bytes, PROT_NONE, flags | MAP_FIXED_NOREPLACE, -1, 0);
    if (at == pointer(hint)) {
      begin = hint;
    } else if (at != MAP_FAILED) {
      munmap(at, bytes);  // an old kernel took it for a hint
    }
  }
  if (!begin) {
    if (bytes + alignment < bytes) return 0;
    void* at = mmap(nullptr, bytes + alignment, PROT_NONE, flags, -1, 0);
    if (at == MAP_FAILED) return 0;
    const uint64_t start = reinterpret_cast<uint64_t>(at);
    begin = (start + alignment - 1) / alignment * alignment;
    if (begin > start) munmap(at, begin - start);
    if (start + alignment > begin) munmap(pointer(begin + bytes), start + alignment - begin);
  }
  reserved_[begin] = bytes;
  addresses().add_span(begin, bytes);
  return begin;
}

bool VirtualMemory::unreserve(uint64_t begin, uint64_t bytes) {
  std::lock_guard lock(mutex_);
  auto at = reserved_.find(begin);
  if (at == reserved_.end() || at->second != bytes) return false;
  auto mapped = mappings_.lower_bound(begin);
  if (mapped != mappings_.end() && mapped->first < begin + bytes) return false;
  addresses().remove_span(begin);
  munmap(pointer(begin), bytes);
  reserved_.erase(at);
  return true;
}

VirtualMemory::Result VirtualMemory::map(uint64_t begin, uint64_t bytes, uint64_t offset,
                                         std::shared_ptr<PhysicalMemory> what) {
  std::lock_guard lock(mutex_);
  if (!bytes || begin % kGranule || bytes % kGranule || offset % kGranule || offset > what->bytes ||
      bytes > what->bytes - offset) {
    return Result::kInvalid;
  }
  auto at = reserved_.upper_bound(begin);
  if (at == reserved_.begin()) return Result::kInvalid;
  --at;
  if (begin + bytes < begin || begin + bytes > at->first + at->second) return Result::kInvalid;
  auto next = mappings_.lower_bound(begin);
  if (next != mappings_.end() && next->first < begin + bytes) return Result::kAlreadyMapped;
  if (next != mappings_.begin() && std::prev(next)->first + std::prev(next)->second.bytes > begin) {
    return Result::kAlreadyMapped;
  }
  void* mapped = mmap(pointer(begin), bytes, PROT_NONE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED,
                      what->store->fd(), off_t(what->offset + offset));
  if (mapped == MAP_FAILED) {
    cover_with_nothing(begin, bytes);
    return Result::kFailed;
  }
  mappings_[begin] = {begin, bytes, offset, std::move(what), {}};
  return Result::kOk;
}

std::vector<VirtualMemory::Mapping*> VirtualMemory::within(uint64_t begin, uint64_t bytes) {
  std::vector<Mapping*> list;
  uint64_t reached = begin;
  for (auto at = mappings_.find(begin); at != mappings_.end() && at->first == reached; ++at) {
    list.push_back(&at->second);
    reached += at->second.bytes;
    if (reached >= begin + bytes) break;
  }
  if (reached != begin + bytes) list.clear();
  return list;
}

VirtualMemory::Result VirtualMemory::unmap(uint64_t begin, uint64_t bytes) {
  std::vector<std::shared_ptr<PhysicalMemory>> ended;  // given back after the lock
  std::lock_guard lock(mutex_);
  auto list = within(begin, bytes);
  if (list.empty()) return Result::kInvalid;
  for (Mapping* mapping : list) {
    addresses().erase(mapping->begin);
    cover_with_nothing(mapping->begin, mapping->bytes);
    ended.push_back(std::move(mapping->physical));
    mappings_.erase(mapping->begin);
  }
  return Result::kOk;
}

void VirtualMemory::apply(Mapping& mapping) {
  uint32_t readers = 0, writers = 0;
  for (auto [device, flags] : mapping.access) {
    if (flags & 1) readers |= device < 0 ? kEveryDevice : 1u << device;
    if (flags == 3) writers |= device < 0 ? kEveryDevice : 1u << device;
  }
  auto known = addresses().find(mapping.begin);
  if (known && (known->readers & ~readers || known->writers & ~writers)) {
    addresses().erase(mapping.begin);  // a right ends: cached ranges are void
  }
  mprotect(pointer(mapping.begin), mapping.bytes,
           readers | writers ? PROT_READ | PROT_WRITE : PROT_NONE);
  if (!readers) return;
  Allocation allocation;
  allocation.begin = mapping.begin;
  allocation.end = mapping.begin + mapping.bytes;
  allocation.kind = RangeKind::kMapped;
  allocation.device = mapping.physical->device;
  allocation.readers = readers;
  allocation.writers = writers;
  if (known) allocation.id = known->id;
  addresses().insert(allocation);
}

VirtualMemory::Result VirtualMemory::set_access(uint64_t begin, uint64_t bytes, int device,
                                                unsigned flags) {
  std::lock_guard lock(mutex_);
  auto list = within(begin, bytes);
  if (list.empty()) return Result::kInvalid;
  for (Mapping* mapping : list) {
    mapping->access[device] = flags;
    apply(*mapping);
  }
  return Result::kOk;
}

std::optional<unsigned> VirtualMemory::access(uint64_t address, int device) const {
  std::lock_guard lock(mutex_);
  auto at = mappings_.upper_bound(address);
  if (at == mappings_.begin()) return std::nullopt;
  --at;
  if (address >= at->first + at->second.bytes) return std::nullopt;
  auto known = at->second.access.find(device);
  return known == at->second.access.end() ? 0 : known->second;
}

std::shared_ptr<PhysicalMemory> VirtualMemory::physical(uint64_t address) const {
  std::lock_guard lock(mutex_);
  auto at = mappings_.upper_bound(address);
  if (at == mappings_.begin()) return nullptr;
  --at;
  return address < at->first + at->second.bytes ? at->second.physical : nullptr;
}

std::optional<std::pair<uint64_t, uint64_t>> VirtualMemory::reservation(uint64_t address) const {
  std::lock_guard lock(mutex_);
  auto at = reserved_.upper_bound(address);
  if (at == reserved_.begin()) return std::nullopt;
  --at;
  if (address >= at->first + at->second) return std::nullopt;
  return *at;
}

}  // namespace gpupool::simgpu
