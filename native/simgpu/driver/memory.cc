#include "simgpu/driver/memory.h"

#include <sys/mman.h>

#include <algorithm>

#include "simgpu/exec/written.h"

namespace gpupool::simgpu {
namespace {

constexpr uint64_t kSmall = kGranule / 4;  // larger allocations have granules of their own
constexpr uint64_t kRedZone = 512;         // between neighbours, so that running over shows
constexpr size_t kQuarantine = 128;        // freed spans whose addresses are kept back

uint64_t round_up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

}  // namespace

// Never destroyed: stream threads may still run while the process exits.
AddressTable& addresses() {
  static auto& table = *new AddressTable;
  return table;
}

void AddressTable::insert(Allocation allocation) {
  std::unique_lock lock(mutex_);
  if (!allocation.id) allocation.id = next_id_++;
  ranges_[allocation.begin] = allocation;
}

std::optional<Allocation> AddressTable::erase(uint64_t begin) {
  std::unique_lock lock(mutex_);
  auto at = ranges_.find(begin);
  if (at == ranges_.end()) return std::nullopt;
  Allocation allocation = at->second;
  ranges_.erase(at);
  generation_.fetch_add(1, std::memory_order_release);
  return allocation;
}

std::optional<Allocation> AddressTable::find(uint64_t address) const {
  std::shared_lock lock(mutex_);
  auto at = ranges_.upper_bound(address);
  if (at == ranges_.begin()) return std::nullopt;
  --at;
  if (address >= at->second.end) return std::nullopt;
  return at->second;
}

std::optional<Allocation> AddressTable::find_joined(uint64_t address) const {
  constexpr int kReach = 128;  // neighbours looked at on either side
  std::shared_lock lock(mutex_);
  auto at = ranges_.upper_bound(address);
  if (at == ranges_.begin()) return std::nullopt;
  --at;
  if (address >= at->second.end) return std::nullopt;
  Allocation joined = at->second;
  if (joined.kind != RangeKind::kMapped) return joined;
  auto fits = [&](const Allocation& other) {
    return other.kind == RangeKind::kMapped && other.readers == joined.readers &&
           other.writers == joined.writers;
  };
  auto after = std::next(at);
  for (int i = 0; i < kReach && after != ranges_.end(); ++i, ++after) {
    if (after->first != joined.end || !fits(after->second)) break;
    joined.end = after->second.end;
  }
  for (int i = 0; i < kReach && at != ranges_.begin(); ++i) {
    --at;
    if (at->second.end != joined.begin || !fits(at->second)) break;
    joined.begin = at->first;
  }
  return joined;
}

bool AddressTable::covers(uint64_t address, uint64_t bytes) const {
  if (address + bytes < address) return false;
  std::shared_lock lock(mutex_);
  auto at = ranges_.upper_bound(address);
  if (at == ranges_.begin()) return false;
  --at;
  const uint64_t end = address + bytes;
  uint64_t reached = address;
  for (; at != ranges_.end() && at->second.begin <= reached; ++at) {
    if (reached < at->second.end) reached = at->second.end;
    if (reached > address && reached >= end) return true;
    // Only mappings join: two neighbours in a heap are still two allocations.
    if (at->second.kind != RangeKind::kMapped) break;
  }
  return false;
}

std::vector<Allocation> AddressTable::of_context(const Context* context) const {
  std::shared_lock lock(mutex_);
  std::vector<Allocation> list;
  for (const auto& [begin, allocation] : ranges_) {
    if (allocation.context == context) list.push_back(allocation);
  }
  return list;
}

void AddressTable::add_span(uint64_t begin, uint64_t bytes) {
  std::unique_lock lock(mutex_);
  spans_[begin] = begin + bytes;
}

void AddressTable::remove_span(uint64_t begin) {
  std::unique_lock lock(mutex_);
  spans_.erase(begin);
}

bool AddressTable::in_span(uint64_t address) const {
  std::shared_lock lock(mutex_);
  auto at = spans_.upper_bound(address);
  return at != spans_.begin() && address < std::prev(at)->second;
}

uint64_t DeviceHeap::new_span(uint64_t bytes) {
  if (!card_->charge(bytes)) return 0;
  // One granule more than needed on either side: for alignment in front, as a red zone behind.
  const uint64_t span = bytes + 2 * kGranule;
  void* at = mmap(nullptr, span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) {
    card_->uncharge(bytes);
    return 0;
  }
  const uint64_t start = reinterpret_cast<uint64_t>(at);
  const uint64_t base = round_up(start, kGranule);
  if (base > start) munmap(at, base - start);
  const uint64_t keep = bytes + kGranule;
  if (start + span > base + keep) {
    munmap(reinterpret_cast<void*>(base + keep), start + span - base - keep);
  }
  if (mprotect(reinterpret_cast<void*>(base), bytes, PROT_READ | PROT_WRITE) != 0) {
    munmap(reinterpret_cast<void*>(base), keep);
    card_->uncharge(bytes);
    return 0;
  }
  addresses().add_span(base, keep);
  return base;
}

void DeviceHeap::drop_span(uint64_t base, uint64_t bytes) {
  // The addresses stay taken for a while, so that a stale pointer meets nothing new.
  mmap(reinterpret_cast<void*>(base), bytes, PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  card_->uncharge(bytes);
  quarantine_.emplace_back(base, bytes + kGranule);
  if (quarantine_.size() > kQuarantine) {
    auto [old, length] = quarantine_.front();
    quarantine_.pop_front();
    addresses().remove_span(old);
    munmap(reinterpret_cast<void*>(old), length);
  }
}

uint64_t DeviceHeap::from_blocks(uint64_t bytes, uint64_t alignment) {
  const uint64_t need = round_up(bytes + kRedZone, 512);
  for (auto& [base, block] : blocks_) {
    uint64_t offset = round_up(block.bump, alignment);
    if (offset + need <= kGranule) {
      block.bump = offset + need;
      ++block.live;
      small_[base + offset] = need;
      return base + offset;
    }
  }
  for (auto& [base, block] : blocks_) {
    for (auto at = block.freed.begin(); at != block.freed.end(); ++at) {
      auto [offset, length] = *at;
      if (offset % alignment != 0 || length < need) continue;
      block.freed.erase(at);
      if (length > need) block.freed.emplace_back(offset + need, length - need);
      ++block.live;
      small_[base + offset] = need;
      return base + offset;
    }
  }
  uint64_t base = new_span(kGranule);
  if (!base) return 0;
  Block& block = blocks_[base];
  block.base = base;
  block.bump = need;
  block.live = 1;
  small_[base] = need;
  return base;
}

uint64_t DeviceHeap::allocate(uint64_t bytes, uint64_t alignment, RangeKind kind, Context* context,
                              uint64_t pool) {
  alignment = std::max<uint64_t>(alignment, 512);
  if (!bytes || bytes > (uint64_t{1} << 46) || alignment > kGranule) return 0;
  std::lock_guard lock(mutex_);
  uint64_t address;
  if (bytes <= kSmall) {
    address = from_blocks(bytes, alignment);
  } else {
    address = new_span(round_up(bytes, kGranule));
    if (address) large_[address] = round_up(bytes, kGranule);
  }
  if (!address) return 0;
  Allocation allocation;
  allocation.begin = address;
  allocation.end = address + bytes;
  allocation.kind = kind;
  allocation.context = context;
  allocation.device = device_;
  allocation.pool = pool;
  allocation.readers = allocation.writers =
      kind == RangeKind::kManaged ? kEveryDevice : 1u << device_;
  addresses().insert(allocation);
  if (kind == RangeKind::kDevice && strict_mode()) written_memory().watch(address, bytes);
  return address;
}

bool DeviceHeap::release_small(uint64_t address) {
  auto entry = small_.find(address);
  if (entry == small_.end()) return false;
  addresses().erase(address);
  const uint64_t bytes = entry->second;
  small_.erase(entry);
  auto at = std::prev(blocks_.upper_bound(address));
  Block& block = at->second;
  if (--block.live == 0) {
    const uint64_t base = block.base;
    blocks_.erase(at);
    drop_span(base, kGranule);
  } else {
    block.freed.emplace_back(address - block.base, bytes);
  }
  return true;
}

bool DeviceHeap::release(uint64_t address) {
  std::lock_guard lock(mutex_);
  written_memory().forget(address);
  if (release_small(address)) return true;
  auto entry = large_.find(address);
  if (entry == large_.end()) return false;
  addresses().erase(address);
  const uint64_t bytes = entry->second;
  large_.erase(entry);
  drop_span(address, bytes);
  return true;
}

uint64_t allocate_host(uint64_t bytes, unsigned flags, Context* context) {
  void* at = mmap(nullptr, round_up(bytes, 4096), PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return 0;
  Allocation allocation;
  allocation.begin = reinterpret_cast<uint64_t>(at);
  allocation.end = allocation.begin + bytes;
  allocation.kind = RangeKind::kHost;
  allocation.context = context;
  allocation.flags = flags;
  allocation.readers = allocation.writers = kEveryDevice;
  addresses().insert(allocation);
  return allocation.begin;
}

void free_host(const Allocation& allocation) {
  if (!addresses().erase(allocation.begin)) return;
  munmap(reinterpret_cast<void*>(allocation.begin),
         round_up(allocation.end - allocation.begin, 4096));
}

}  // namespace gpupool::simgpu
