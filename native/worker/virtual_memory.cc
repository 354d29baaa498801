#define GPUPOOL_CUDA_ABI_EXACT 1
#include "worker/virtual_memory.h"

#include <algorithm>

namespace gpupool::worker {
namespace {
constexpr uint64_t kMaxBytes = 1ull << 46;
constexpr size_t kMaxEntries = 1u << 20;  // of each kind
}  // namespace

CUresult VirtualMemory::reserve(uint64_t bytes, uint64_t alignment, uint64_t wanted,
                                uint64_t* address) {
  if (alignment == 0) alignment = memory_.granularity();
  if (bytes == 0 || bytes > kMaxBytes || !whole_units(bytes) ||
      (alignment & (alignment - 1)) != 0 || alignment > kMaxBytes) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (reservations_.size() >= kMaxEntries) return CUDA_ERROR_OUT_OF_MEMORY;
  alignment = std::max(alignment, memory_.granularity());
  // A wanted address is a wish.
  const bool usable = wanted != 0 && wanted % alignment == 0;
  if (!(usable && memory_.reserve_range(bytes, alignment, wanted, address)) &&
      !memory_.reserve_range(bytes, alignment, 0, address)) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  reservations_[*address] = bytes;
  return CUDA_SUCCESS;
}

CUresult VirtualMemory::free(uint64_t address, uint64_t bytes) {
  const auto found = reservations_.find(address);
  if (found == reservations_.end() || found->second != bytes) return CUDA_ERROR_INVALID_VALUE;
  const auto mapped = mappings_.lower_bound(address);
  if (mapped != mappings_.end() && mapped->first < address + bytes) return CUDA_ERROR_INVALID_VALUE;
  reservations_.erase(found);
  memory_.free_range(address, bytes);
  return CUDA_SUCCESS;
}

CUresult VirtualMemory::create(wire::Handle handle, uint64_t bytes) {
  if (bytes == 0 || bytes > kMaxBytes || !whole_units(bytes)) return CUDA_ERROR_INVALID_VALUE;
  if (physical_.size() >= kMaxEntries) return CUDA_ERROR_OUT_OF_MEMORY;
  uint32_t* key = handles_.create(handle);
  if (key == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!account_.charge(bytes)) {
    memory_.trim();
    if (!account_.charge(bytes)) {
      handles_.erase(handle);
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
  }
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = memory_.device();
  Physical physical;
  physical.bytes = bytes;
  const CUresult result = driver_.cuMemCreate(&physical.driver, bytes, &properties, 0);
  if (result != CUDA_SUCCESS) {
    account_.refund(bytes);
    handles_.erase(handle);
    return result;
  }
  *key = next_key_++;
  physical_[*key] = physical;
  return CUDA_SUCCESS;
}

void VirtualMemory::drop_if_unused(uint32_t key) {
  const auto found = physical_.find(key);
  if (found == physical_.end() || !found->second.released || found->second.mappings != 0) return;
  driver_.cuMemRelease(found->second.driver);
  account_.refund(found->second.bytes);
  physical_.erase(found);
}

CUresult VirtualMemory::release(wire::Handle handle) {
  uint32_t* key = handles_.find(handle);
  if (key == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const uint32_t it = *key;
  handles_.erase(handle);
  physical_.at(it).released = true;
  drop_if_unused(it);
  return CUDA_SUCCESS;
}

CUresult VirtualMemory::map(uint64_t address, uint64_t bytes, uint64_t offset,
                            wire::Handle handle) {
  const uint32_t* key = handles_.find(handle);
  if (key == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Physical& physical = physical_.at(*key);
  if (bytes == 0 || !whole_units(address) || !whole_units(bytes) || !whole_units(offset) ||
      offset > physical.bytes || bytes > physical.bytes - offset) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  auto reservation = reservations_.upper_bound(address);
  if (reservation == reservations_.begin()) return CUDA_ERROR_INVALID_VALUE;
  --reservation;
  const uint64_t inside = address - reservation->first;
  if (inside >= reservation->second || bytes > reservation->second - inside) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const auto next = mappings_.upper_bound(address);
  if (next != mappings_.end() && next->first < address + bytes) return CUDA_ERROR_INVALID_VALUE;
  if (next != mappings_.begin()) {
    const auto before = std::prev(next);
    if (address - before->first < before->second.bytes) return CUDA_ERROR_INVALID_VALUE;
  }
  const CUresult result = driver_.cuMemMap(address, bytes, offset, physical.driver, 0);
  if (result != CUDA_SUCCESS) return result;
  physical.mappings++;
  mappings_[address] = {bytes, *key, false};
  return CUDA_SUCCESS;
}

bool VirtualMemory::covered(uint64_t address, uint64_t bytes) const {
  if (bytes == 0 || bytes > kMaxBytes) return false;
  const uint64_t end = address + bytes;
  while (address < end) {
    const auto found = mappings_.find(address);
    if (found == mappings_.end() || found->second.bytes > end - address) return false;
    address += found->second.bytes;
  }
  return true;
}

CUresult VirtualMemory::unmap(uint64_t address, uint64_t bytes) {
  if (!covered(address, bytes)) return CUDA_ERROR_INVALID_VALUE;
  for (uint64_t at = address; at < address + bytes;) {
    const auto found = mappings_.find(at);
    const Mapping mapping = found->second;
    const CUresult result = driver_.cuMemUnmap(at, mapping.bytes);
    if (result != CUDA_SUCCESS) return result;
    mappings_.erase(found);
    physical_.at(mapping.physical).mappings--;
    drop_if_unused(mapping.physical);
    at += mapping.bytes;
  }
  return CUDA_SUCCESS;
}

CUresult VirtualMemory::set_access(uint64_t address, uint64_t bytes, unsigned flags) {
  if (!covered(address, bytes)) return CUDA_ERROR_INVALID_VALUE;
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = memory_.device();
  access.flags = static_cast<CUmemAccess_flags>(flags);
  const CUresult result = driver_.cuMemSetAccess(address, bytes, &access, 1);
  if (result != CUDA_SUCCESS) return result;
  for (uint64_t at = address; at < address + bytes;) {
    Mapping& mapping = mappings_.at(at);
    mapping.accessible = flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    at += mapping.bytes;
  }
  return CUDA_SUCCESS;
}

bool VirtualMemory::contains(uint64_t address, uint64_t bytes) const {
  if (mappings_.empty() || bytes > kMaxBytes) return false;
  auto at = mappings_.upper_bound(address);
  if (at == mappings_.begin()) return false;
  --at;
  const uint64_t end = address + bytes;
  uint64_t reached = address;
  for (; at != mappings_.end() && at->second.accessible && at->first <= reached; ++at) {
    const uint64_t its_end = at->first + at->second.bytes;
    if (its_end <= reached) return false;
    reached = its_end;
    if (reached >= end) return true;
  }
  return false;
}

void VirtualMemory::close() {
  for (const auto& [address, mapping] : mappings_) driver_.cuMemUnmap(address, mapping.bytes);
  mappings_.clear();
  for (const auto& [key, physical] : physical_) {
    driver_.cuMemRelease(physical.driver);
    account_.refund(physical.bytes);
  }
  physical_.clear();
  for (const auto& [address, bytes] : reservations_) memory_.free_range(address, bytes);
  reservations_.clear();
}

}  // namespace gpupool::worker
