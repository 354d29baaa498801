// For strict mode: which bytes of device memory something has written, of the allocations that are
// watched. A byte of notes for each byte, in memory that the system gives when it is touched.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>

namespace gpupool::simgpu {

inline bool strict_mode() {
  const char* value = std::getenv("GPUPOOL_SIMGPU_STRICT");
  return value && *value && std::strcmp(value, "0") != 0;
}

class WrittenMemory {
 public:
  // A fresh allocation. Where there is no memory for the notes it is not watched.
  void watch(uint64_t begin, uint64_t bytes) {
    void* notes = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (notes == MAP_FAILED) return;
    std::unique_lock lock(mutex_);
    ranges_[begin] = std::make_shared<Range>(begin, bytes, static_cast<uint8_t*>(notes));
    any_ = true;
  }
  void forget(uint64_t begin) {
    if (!any_.load(std::memory_order_relaxed)) return;
    std::unique_lock lock(mutex_);
    ranges_.erase(begin);
    any_ = !ranges_.empty();
  }

  void mark(uint64_t address, uint64_t bytes) {
    const auto range = find(address);
    if (range) std::memset(range->at(address), 1, std::min(bytes, range->left(address)));
  }
  // What is copied is as written as where it comes from.
  void mark_copy(uint64_t to, uint64_t from, uint64_t bytes) {
    const auto source = find(from);
    if (!source) return mark(to, bytes);
    const auto target = find(to);
    if (!target) return;
    bytes = std::min({bytes, source->left(from), target->left(to)});
    std::memmove(target->at(to), source->at(from), bytes);
  }
  // True, too, of memory that is not watched.
  bool written(uint64_t address, uint64_t bytes) const {
    const auto range = find(address);
    return !range || !std::memchr(range->at(address), 0, std::min(bytes, range->left(address)));
  }

 private:
  struct Range {
    Range(uint64_t begin, uint64_t bytes, uint8_t* notes)
        : begin(begin), bytes(bytes), notes(notes) {}
    ~Range() { munmap(notes, bytes); }
    Range(const Range&) = delete;
    Range& operator=(const Range&) = delete;
    uint8_t* at(uint64_t address) const { return notes + (address - begin); }
    uint64_t left(uint64_t address) const { return bytes - (address - begin); }
    const uint64_t begin, bytes;
    uint8_t* const notes;
  };

  std::shared_ptr<Range> find(uint64_t address) const {
    if (!any_.load(std::memory_order_relaxed)) return nullptr;
    std::shared_lock lock(mutex_);
    auto after = ranges_.upper_bound(address);
    if (after == ranges_.begin()) return nullptr;
    const auto& range = std::prev(after)->second;
    return address - range->begin < range->bytes ? range : nullptr;
  }

  mutable std::shared_mutex mutex_;
  std::map<uint64_t, std::shared_ptr<Range>> ranges_;
  std::atomic<bool> any_{false};
};

// Of this process.
inline WrittenMemory& written_memory() {
  static auto& instance = *new WrittenMemory;
  return instance;
}

}  // namespace gpupool::simgpu
