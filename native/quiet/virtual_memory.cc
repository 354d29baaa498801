// Virtual memory: reserved ranges of addresses, physical memory in one sparse file, mappings of it.
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "quiet/quiet.h"

namespace gpupool::quiet {
namespace {

constexpr uint64_t kGranularity = 2 << 20;
constexpr uint64_t kFileBytes = uint64_t{1} << 46;  // address space of the file, not memory

struct Physical {
  uint64_t offset = 0, bytes = 0;
  int references = 1;    // open handles and mappings
  int open_handles = 1;  // cuMemRetainAllocationHandle gives another one of the same value
  CUmemAllocationProp properties{};
};

struct Mapping {
  uint64_t bytes = 0;
  CUmemGenericAllocationHandle handle = 0;
};

struct VirtualMemory {
  std::mutex mutex;
  int file = -1;
  uint64_t next_offset = 0;
  std::multimap<uint64_t, uint64_t> free_offsets;  // by size
  std::map<uint64_t, uint64_t> reserved;           // begin, bytes
  std::map<CUmemGenericAllocationHandle, Physical> physical;
  std::map<uint64_t, Mapping> mappings;
  CUmemGenericAllocationHandle next_handle = 1;
};

VirtualMemory& memory() {
  static VirtualMemory* const instance = new VirtualMemory;
  return *instance;
}

bool open_file(VirtualMemory& m) {
  if (m.file >= 0) return true;
  m.file = memfd_create("gpupool-quiet", MFD_CLOEXEC);
  if (m.file >= 0 && ftruncate(m.file, kFileBytes) != 0) {
    close(m.file);
    m.file = -1;
  }
  return m.file >= 0;
}

void drop(VirtualMemory& m, CUmemGenericAllocationHandle handle) {
  auto found = m.physical.find(handle);
  if (--found->second.references != 0) return;
  // The pages go back, and whoever gets the offset next finds zeros.
  fallocate(m.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, found->second.offset,
            found->second.bytes);
  m.free_offsets.emplace(found->second.bytes, found->second.offset);
  charge_physical(-static_cast<int64_t>(found->second.bytes));
  m.physical.erase(found);
}

bool is_reserved(VirtualMemory& m, uint64_t begin, uint64_t bytes) {
  auto after = m.reserved.upper_bound(begin);
  if (after == m.reserved.begin()) return false;
  auto range = std::prev(after);
  return begin - range->first <= range->second && bytes <= range->second - (begin - range->first);
}

}  // namespace
}  // namespace gpupool::quiet

using namespace gpupool::quiet;

GPUPOOL_API cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp* prop,
                                          CUmemAllocationGranularity_flags) {
  if (granularity == nullptr || prop == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *granularity = kGranularity;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuMemAddressReserve(CUdeviceptr* ptr, size_t size, size_t alignment, CUdeviceptr addr,
                                unsigned long long flags) {
  if (ptr == nullptr || size == 0 || size % kGranularity != 0 || flags != 0 ||
      (alignment & (alignment - 1)) != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  alignment = std::max<size_t>(alignment, kGranularity);
  VirtualMemory& m = memory();
  std::lock_guard lock(m.mutex);
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* got = MAP_FAILED;
  if (addr != 0 && addr % alignment == 0) {
    got = mmap(reinterpret_cast<void*>(addr), size, PROT_NONE, kFlags | MAP_FIXED_NOREPLACE, -1, 0);
    if (got != MAP_FAILED && reinterpret_cast<uint64_t>(got) != addr) {
      munmap(got, size);
      got = MAP_FAILED;
    }
  }
  if (got == MAP_FAILED) {  // the address is a wish
    if (size > SIZE_MAX - alignment) return CUDA_ERROR_OUT_OF_MEMORY;
    got = mmap(nullptr, size + alignment, PROT_NONE, kFlags, -1, 0);
    if (got == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    const auto begin = reinterpret_cast<uint64_t>(got);
    const uint64_t aligned = (begin + alignment - 1) / alignment * alignment;
    if (aligned != begin) munmap(got, aligned - begin);
    munmap(reinterpret_cast<void*>(aligned + size), begin + alignment - aligned);
    got = reinterpret_cast<void*>(aligned);
  }
  *ptr = reinterpret_cast<CUdeviceptr>(got);
  m.reserved[*ptr] = size;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuMemAddressFree(CUdeviceptr ptr, size_t size) {
  VirtualMemory& m = memory();
  std::lock_guard lock(m.mutex);
  auto found = m.reserved.find(ptr);
  if (found == m.reserved.end() || found->second != size) return CUDA_ERROR_INVALID_VALUE;
  auto mapped = m.mappings.lower_bound(ptr);
  if (mapped != m.mappings.end() && mapped->first < ptr + size) return CUDA_ERROR_INVALID_VALUE;
  munmap(reinterpret_cast<void*>(ptr), size);
  m.reserved.erase(found);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size,
                        const CUmemAllocationProp* prop, unsigned long long flags) {
  if (!machine().initialised) return CUDA_ERROR_NOT_INITIALIZED;
  if (handle == nullptr || prop == nullptr || size == 0 || size % kGranularity != 0 || flags != 0)
    return CUDA_ERROR_INVALID_VALUE;
  if (prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
  const int device = prop->location.id;
  if (device < 0 || static_cast<size_t>(device) >= machine().devices.size())
    return CUDA_ERROR_INVALID_DEVICE;
  const uint64_t total = machine().devices[device].memory_bytes;
  VirtualMemory& m = memory();
  std::lock_guard lock(m.mutex);
  const uint64_t used = memory_in_use();
  if (size > total || used > total - size) return CUDA_ERROR_OUT_OF_MEMORY;
  if (!open_file(m)) return CUDA_ERROR_OPERATING_SYSTEM;
  Physical physical;
  physical.bytes = size;
  physical.properties = *prop;
  if (auto reuse = m.free_offsets.find(size); reuse != m.free_offsets.end()) {
    physical.offset = reuse->second;
    m.free_offsets.erase(reuse);
  } else {
    if (m.next_offset > kFileBytes - size) return CUDA_ERROR_OUT_OF_MEMORY;
    physical.offset = m.next_offset;
    m.next_offset += size;
  }
  charge_physical(static_cast<int64_t>(size));
  *handle = m.next_handle++;
  m.physical[*handle] = physical;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuMemRelease(CUmemGenericAllocationHandle handle) {
  VirtualMemory& m = memory();
  std::lock_guard lock(m.mutex);
  auto found = m.physical.find(handle);
  if (found == m.physical.end() || found->second.open_handles == 0) return CUDA_ERROR_INVALID_VALUE;
  --found->second.open_handles;
  drop(m, handle);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuMemMap(CUdeviceptr ptr, size_t size, size_t offset,
                     CUmemGenericAllocationHandle handle, unsigned long long flags) {
  VirtualMemory& m = memory();
  std::lock_guard lock(m.mutex);
  auto found = m.physical.find(handle);
  if (found == m.physical.end() || size == 0 || size % kGranularity != 0 || offset != 0 ||
      flags != 0 || size > found->second.bytes || !is_reserved(m, ptr, size)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  auto next = m.mappings.lower_bound(ptr);
  if (next != m.mappings.end() && next->first < ptr + size) return CUDA_ERROR_INVALID_VALUE;
  if (next != m.mappings.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second.bytes > ptr) return CUDA_ERROR_INVALID_VALUE;
  }
  if (mmap(reinterpret_cast<void*>(ptr), size, PROT_NONE, MAP_SHARED | MAP_FIXED, m.file,
           found->second.offset) == MAP_FAILED) {
    return CUDA_ERROR_MAP_FAILED;
  }
  ++found->second.references;
  m.mappings[ptr] = {size, handle};
  note_mapping(ptr, size, machine().devices[found->second.properties.location.id].primary);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuMemUnmap(CUdeviceptr ptr, size_t size) {
  VirtualMemory& m = memory();
  std::lock_guard lock(m.mutex);
  // Whole mappings only, and all of the range.
  uint64_t at = ptr;
  for (auto it = m.mappings.find(ptr); at < ptr + size; ++it) {
    if (it == m.mappings.end() || it->first != at) return CUDA_ERROR_INVALID_VALUE;
    at += it->second.bytes;
  }
  if (at != ptr + size) return CUDA_ERROR_INVALID_VALUE;
  mmap(reinterpret_cast<void*>(ptr), size, PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  for (auto it = m.mappings.find(ptr); it != m.mappings.end() && it->first < ptr + size;) {
    forget_mapping(it->first);
    drop(m, it->second.handle);
    it = m.mappings.erase(it);
  }
  return CUDA_SUCCESS;
}

GPUPOOL_API cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc* desc,
                           size_t count) {
  if (desc == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
  VirtualMemory& m = memory();
  std::lock_guard lock(m.mutex);
  uint64_t at = ptr;
  for (auto it = m.mappings.find(ptr); at < ptr + size; ++it) {
    if (it == m.mappings.end() || it->first != at) return CUDA_ERROR_INVALID_VALUE;
    at += it->second.bytes;
  }
  const int rights = desc->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? PROT_READ | PROT_WRITE
                     : desc->flags == CU_MEM_ACCESS_FLAGS_PROT_READ    ? PROT_READ
                                                                       : PROT_NONE;
  return mprotect(reinterpret_cast<void*>(ptr), size, rights) == 0 ? CUDA_SUCCESS
                                                                   : CUDA_ERROR_INVALID_VALUE;
}

GPUPOOL_API cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location,
                           CUdeviceptr ptr) {
  VirtualMemory& m = memory();
  std::lock_guard lock(m.mutex);
  if (flags == nullptr || location == nullptr || m.mappings.upper_bound(ptr) == m.mappings.begin())
    return CUDA_ERROR_INVALID_VALUE;
  *flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* prop,
                                                   CUmemGenericAllocationHandle handle) {
  VirtualMemory& m = memory();
  std::lock_guard lock(m.mutex);
  auto found = m.physical.find(handle);
  if (prop == nullptr || found == m.physical.end()) return CUDA_ERROR_INVALID_VALUE;
  *prop = found->second.properties;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* addr) {
  VirtualMemory& m = memory();
  std::lock_guard lock(m.mutex);
  auto after = m.mappings.upper_bound(reinterpret_cast<uint64_t>(addr));
  if (handle == nullptr || after == m.mappings.begin()) return CUDA_ERROR_INVALID_VALUE;
  auto found = std::prev(after);
  if (reinterpret_cast<uint64_t>(addr) - found->first >= found->second.bytes)
    return CUDA_ERROR_INVALID_VALUE;
  Physical& physical = m.physical[found->second.handle];
  ++physical.open_handles;
  ++physical.references;
  *handle = found->second.handle;
  return CUDA_SUCCESS;
}
