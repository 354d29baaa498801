// A MemorySpace for tests: every allocation is a range of exactly its size.
#pragma once

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>

#include "simgpu/exec/engine.h"

namespace gpupool::simgpu {

class HostMemory : public MemorySpace {
 public:
  ~HostMemory() override {
    for (const auto& [begin, range] : ranges_) std::free(reinterpret_cast<void*>(begin));
  }
  std::optional<MemoryRange> find(uint64_t address) const override {
    std::lock_guard lock(mutex_);
    auto it = ranges_.upper_bound(address);
    if (it == ranges_.begin()) return std::nullopt;
    --it;
    if (address >= it->second.end) return std::nullopt;
    return it->second;
  }
  uint64_t generation() const override {
    std::lock_guard lock(mutex_);
    return generation_;
  }
  uint64_t allocate(uint64_t bytes, uint64_t alignment) override {
    const uint64_t a = alignment < 256 ? 256 : alignment;
    void* p = std::aligned_alloc(a, (bytes + a - 1) / a * a + a);
    if (!p) return 0;
    std::memset(p, 0, bytes);
    const uint64_t begin = reinterpret_cast<uint64_t>(p);
    std::lock_guard lock(mutex_);
    ranges_[begin] = {begin, begin + (bytes ? bytes : 1), true};
    return begin;
  }
  void release(uint64_t address) override {
    std::lock_guard lock(mutex_);
    ++generation_;
    ranges_.erase(address);
    std::free(reinterpret_cast<void*>(address));
  }

 private:
  mutable std::mutex mutex_;
  std::map<uint64_t, MemoryRange> ranges_;
  uint64_t generation_ = 0;
};

}  // namespace gpupool::simgpu
