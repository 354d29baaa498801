// The device's heap: best fit over one arena, with the bookkeeping outside of it, so that a program
// that writes past its blocks can't damage the simulator.
#include "simgpu/ptx/builtins.h"

namespace gpupool::simgpu::ptx {

DeviceHeap::DeviceHeap(std::shared_ptr<MemorySpace> memory, uint64_t capacity_bytes)
    : memory_(std::move(memory)), capacity_(capacity_bytes & ~uint64_t{15}) {}

DeviceHeap::~DeviceHeap() {
  if (arena_ != 0) memory_->release(arena_);
}

bool DeviceHeap::reserve() {
  std::lock_guard lock(mutex_);
  return reserve_locked();
}

bool DeviceHeap::reserve_locked() {
  if (arena_ != 0 || capacity_ == 0) return true;
  arena_ = memory_->allocate(capacity_, 256);
  if (arena_ == 0) return false;
  add_hole(arena_, capacity_);
  return true;
}

uint64_t DeviceHeap::allocate(uint64_t bytes) {
  if (bytes == 0 || bytes > capacity_) return 0;
  const uint64_t size = (bytes + 15) & ~uint64_t{15};
  std::lock_guard lock(mutex_);
  if (!reserve_locked()) return 0;
  auto best = holes_by_size_.lower_bound(size);
  if (best == holes_by_size_.end()) return 0;
  auto hole = holes_.find(best->second);
  const uint64_t begin = hole->first, whole = hole->second;
  remove_hole(hole);
  if (whole > size) add_hole(begin + size, whole - size);
  blocks_[begin] = size;
  used_ += size;
  return begin;
}

bool DeviceHeap::free(uint64_t address) {
  if (address == 0) return true;
  std::lock_guard lock(mutex_);
  auto block = blocks_.find(address);
  if (block == blocks_.end()) return false;
  uint64_t begin = address, bytes = block->second;
  used_ -= bytes;
  blocks_.erase(block);
  auto next = holes_.lower_bound(begin);
  if (next != holes_.end() && next->first == begin + bytes) {
    bytes += next->second;
    auto gone = next++;
    remove_hole(gone);
  }
  if (next != holes_.begin()) {
    auto previous = std::prev(next);
    if (previous->first + previous->second == begin) {
      begin = previous->first;
      bytes += previous->second;
      remove_hole(previous);
    }
  }
  add_hole(begin, bytes);
  return true;
}

uint64_t DeviceHeap::used_bytes() const {
  std::lock_guard lock(mutex_);
  return used_;
}

void DeviceHeap::add_hole(uint64_t begin, uint64_t bytes) {
  holes_[begin] = bytes;
  holes_by_size_.emplace(bytes, begin);
}

void DeviceHeap::remove_hole(std::map<uint64_t, uint64_t>::iterator hole) {
  auto [first, last] = holes_by_size_.equal_range(hole->second);
  for (auto i = first; i != last; ++i) {
    if (i->second == hole->first) {
      holes_by_size_.erase(i);
      break;
    }
  }
  holes_.erase(hole);
}

}  // namespace gpupool::simgpu::ptx
