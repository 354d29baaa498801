// Copies from the device that are on their way to the client. What the device has done is sent
// before anything that tells the client so: an answer, or the call of one of its functions.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "worker/driver_table.h"
#include "worker/staging.h"

namespace gpupool::worker {

// One copy: its pieces that were submitted, in order, until they have been sent.
struct Outgoing {
  struct Entry {
    StagingBuffer* buffer;
    uint64_t bytes;
    bool sent = false;
    bool held = false;  // somebody waits for its event
  };
  std::mutex lock;  // whoever sends holds it
  uint64_t call = 0;
  uint32_t context = 0;   // wire id
  bool printing = false;  // kernels of the context may have printed
  std::deque<Entry> entries;
  uint64_t left = 0;  // bytes of the whole copy that were not sent
  bool over = false;  // an error was told, or the client has gone: what is left is dropped
  bool gone = false;  // the client has
  std::atomic<bool> done{false};  // nothing is left
};

class OutgoingCopies {
 public:
  void add(std::shared_ptr<Outgoing> copy) {
    std::lock_guard guard(lock_);
    copies_.push_back(std::move(copy));
    count_.store(copies_.size(), std::memory_order_release);
  }
  void remove(const Outgoing* copy) {
    std::lock_guard guard(lock_);
    copies_.remove_if([copy](const auto& it) { return it.get() == copy; });
    count_.store(copies_.size(), std::memory_order_release);
  }
  // `f(Outgoing&)`, with its lock held, for each that was submitted before `end` (null: for all),
  // in that order. Whoever calls may hold the lock of `end`.
  template <typename F>
  void for_each_before(const Outgoing* end, F&& f) {
    if (count_.load(std::memory_order_acquire) <= (end == nullptr ? 0u : 1u)) return;
    std::vector<std::shared_ptr<Outgoing>> found;
    {
      std::lock_guard guard(lock_);
      for (const auto& copy : copies_) {
        if (copy.get() == end) break;
        if (!copy->done.load(std::memory_order_acquire)) found.push_back(copy);
      }
    }
    for (const auto& copy : found) {
      std::lock_guard guard(copy->lock);
      f(*copy);
    }
  }

 private:
  std::mutex lock_;
  std::list<std::shared_ptr<Outgoing>> copies_;
  std::atomic<size_t> count_{0};
};

}  // namespace gpupool::worker
