#define GPUPOOL_CUDA_ABI_EXACT 1
#include "worker/memory.h"

#include <algorithm>

namespace gpupool::worker {
namespace {

constexpr uint64_t kAlignment = 512;        // of small allocations
constexpr uint64_t kSmall = 1024 * 1024;    // up to this size memory is shared with others
constexpr uint64_t kMaxBytes = 1ull << 46;  // beyond it no sum can overflow

uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

bool Memory::reserve(int device, uint64_t base, uint64_t bytes) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  size_t granularity = 0;
  if (driver_.cuMemGetAllocationGranularity != nullptr &&
      driver_.cuMemGetAllocationGranularity(&granularity, &properties,
                                            CU_MEM_ALLOC_GRANULARITY_RECOMMENDED) == CUDA_SUCCESS) {
    granularity_ = std::max<uint64_t>(granularity_, granularity);
  }
  if (base == 0 || bytes == 0 || bytes > kMaxBytes || base > kMaxBytes * 2 ||
      base % granularity_ != 0 || bytes % granularity_ != 0) {
    return false;
  }
  CUdeviceptr got = 0;
  if (driver_.cuMemAddressReserve(&got, bytes, 0, base, 0) != CUDA_SUCCESS) return false;
  if (got != base) {
    if (driver_.cuMemAddressFree != nullptr) driver_.cuMemAddressFree(got, bytes);
    return false;
  }
  device_ = device;
  arena_base_ = base;
  arena_bytes_ = bytes;
  free_[base] = bytes;
  return true;
}

void Memory::close() {
  if (arena_bytes_ == 0 || !allocations_.empty()) return;
  drop_spare();
  if (driver_.cuMemAddressFree != nullptr) driver_.cuMemAddressFree(arena_base_, arena_bytes_);
  arena_bytes_ = 0;
  free_.clear();
}

bool Memory::take_addresses(uint64_t bytes, uint64_t* base) {
  for (auto at = free_.begin(); at != free_.end(); ++at) {
    if (at->second < bytes) continue;
    *base = at->first;
    const uint64_t left = at->second - bytes;
    free_.erase(at);
    if (left != 0) free_[*base + bytes] = left;
    return true;
  }
  return false;
}

bool Memory::reserve_range(uint64_t bytes, uint64_t alignment, uint64_t wanted, uint64_t* base) {
  for (auto at = free_.begin(); at != free_.end(); ++at) {
    const uint64_t begin = at->first, end = begin + at->second;
    uint64_t chosen = round_up(begin, alignment);
    if (wanted != 0) {
      if (wanted < begin || wanted >= end) continue;
      chosen = wanted;
    }
    if (chosen < begin || chosen > end || end - chosen < bytes) continue;
    free_.erase(at);
    if (chosen != begin) free_[begin] = chosen - begin;
    if (chosen + bytes != end) free_[chosen + bytes] = end - chosen - bytes;
    *base = chosen;
    return true;
  }
  return false;
}

void Memory::give_addresses(uint64_t base, uint64_t bytes) {
  auto at = free_.emplace(base, bytes).first;
  if (const auto next = std::next(at); next != free_.end() && base + bytes == next->first) {
    at->second += next->second;
    free_.erase(next);
  }
  if (at != free_.begin()) {
    const auto before = std::prev(at);
    if (before->first + before->second == base) {
      before->second += at->second;
      free_.erase(at);
    }
  }
}

CUresult Memory::map(uint64_t bytes, Mapping* mapping) {
  if (!account_.charge(bytes)) {
    if (spare_ == 0) return CUDA_ERROR_OUT_OF_MEMORY;
    drop_spare();
    if (!account_.charge(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  }
  uint64_t base;
  if (!take_addresses(bytes, &base)) {
    account_.refund(bytes);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device_;
  CUmemGenericAllocationHandle handle;
  CUresult result = driver_.cuMemCreate(&handle, bytes, &properties, 0);
  if (result == CUDA_SUCCESS) {
    result = driver_.cuMemMap(base, bytes, 0, handle, 0);
    if (result == CUDA_SUCCESS) {
      CUmemAccessDesc access{};
      access.location = properties.location;
      access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
      result = driver_.cuMemSetAccess(base, bytes, &access, 1);
      if (result != CUDA_SUCCESS) driver_.cuMemUnmap(base, bytes);
    }
    if (result != CUDA_SUCCESS) driver_.cuMemRelease(handle);
  }
  if (result != CUDA_SUCCESS) {
    give_addresses(base, bytes);
    account_.refund(bytes);
    return result;
  }
  *mapping = {base, bytes, handle};
  return CUDA_SUCCESS;
}

void Memory::unmap(const Mapping& mapping) {
  driver_.cuMemUnmap(mapping.base, mapping.bytes);
  driver_.cuMemRelease(mapping.handle);
  give_addresses(mapping.base, mapping.bytes);
  account_.refund(mapping.bytes);
}

CUresult Memory::allocate_small(uint64_t bytes, Allocation* allocation, uint64_t* address) {
  const uint64_t need = round_up(bytes, kAlignment);
  for (auto& [base, block] : blocks_) {
    for (auto at = block->free.begin(); at != block->free.end(); ++at) {
      if (at->second < need) continue;
      const uint64_t offset = at->first, left = at->second - need;
      block->free.erase(at);
      if (left != 0) block->free[offset + need] = left;
      block->used += need;
      if (spare_ == base) spare_ = 0;
      allocation->block = base;
      allocation->taken = need;
      *address = base + offset;
      return CUDA_SUCCESS;
    }
  }
  auto block = std::make_unique<Block>();
  const CUresult result = map(granularity_, &block->mapping);
  if (result != CUDA_SUCCESS) return result;
  const uint64_t base = block->mapping.base;
  block->free[need] = granularity_ - need;
  block->used = need;
  blocks_[base] = std::move(block);
  allocation->block = base;
  allocation->taken = need;
  *address = base;
  return CUDA_SUCCESS;
}

CUresult Memory::allocate(uint64_t bytes, uint32_t context, uint64_t* address) {
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  if (bytes > kMaxBytes || arena_bytes_ == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  Allocation allocation;
  allocation.bytes = bytes;
  allocation.context = context;
  CUresult result;
  if (bytes <= kSmall) {
    result = allocate_small(bytes, &allocation, address);
  } else {
    result = map(round_up(bytes, granularity_), &allocation.mapping);
    *address = allocation.mapping.base;
  }
  if (result == CUDA_SUCCESS) allocations_[*address] = allocation;
  return result;
}

bool Memory::forget(uint64_t address) {
  const auto found = allocations_.find(address);
  if (found == allocations_.end() || !found->second.live) return false;
  found->second.live = false;
  return true;
}

void Memory::release(uint64_t address) {
  const auto found = allocations_.find(address);
  if (found == allocations_.end()) return;
  const Allocation allocation = found->second;
  allocations_.erase(found);
  if (allocation.block == 0) {
    unmap(allocation.mapping);
    return;
  }
  Block& block = *blocks_.at(allocation.block);
  const uint64_t offset = address - allocation.block;
  auto at = block.free.emplace(offset, allocation.taken).first;
  if (const auto next = std::next(at);
      next != block.free.end() && offset + allocation.taken == next->first) {
    at->second += next->second;
    block.free.erase(next);
  }
  if (at != block.free.begin()) {
    const auto before = std::prev(at);
    if (before->first + before->second == at->first) {
      before->second += at->second;
      block.free.erase(at);
    }
  }
  block.used -= allocation.taken;
  if (block.used != 0) return;
  // One empty block is kept: programs that allocate and free in a loop are common.
  drop_spare();
  spare_ = allocation.block;
}

void Memory::drop_spare() {
  if (spare_ == 0) return;
  const auto found = blocks_.find(spare_);
  spare_ = 0;
  const Mapping mapping = found->second->mapping;
  blocks_.erase(found);
  unmap(mapping);
}

std::vector<uint64_t> Memory::of_context(uint32_t context) const {
  std::vector<uint64_t> found;
  for (const auto& [address, allocation] : allocations_) {
    if (allocation.live && allocation.context == context) found.push_back(address);
  }
  return found;
}

bool Memory::contains(uint64_t address, uint64_t bytes) const {
  if (bytes == 0) return true;
  auto next = allocations_.upper_bound(address);
  if (next != allocations_.begin()) {
    const auto& [base, allocation] = *std::prev(next);
    const uint64_t offset = address - base;
    if (allocation.live && offset < allocation.bytes && bytes <= allocation.bytes - offset)
      return true;
  }
  auto global = globals_.upper_bound(address);
  if (global == globals_.begin()) return false;
  const auto& [base, entry] = *std::prev(global);
  const uint64_t offset = address - base;
  return offset < entry.bytes && bytes <= entry.bytes - offset;
}

void Memory::add_global(uint64_t address, uint64_t bytes, uint32_t module) {
  globals_[address] = {bytes, module};
}

void Memory::drop_globals(uint32_t module) {
  std::erase_if(globals_, [module](const auto& entry) { return entry.second.module == module; });
}

}  // namespace gpupool::worker
