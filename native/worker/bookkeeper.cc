#include "worker/bookkeeper.h"

#include <chrono>

namespace gpupool::worker {

void Bookkeeper::wake() {
  {
    std::lock_guard guard(lock_);
    if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });
    awake_.store(true, std::memory_order_relaxed);
  }
  changed_.notify_all();
}

void Bookkeeper::stop() {
  {
    std::lock_guard guard(lock_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Bookkeeper::loop() {
  constexpr std::chrono::seconds kInterval{1};
  std::unique_lock guard(lock_);
  for (;;) {
    changed_.wait(guard, [this] { return stopping_ || awake_.load(std::memory_order_relaxed); });
    // Whole seconds, so that there is one look after the last thing that happened.
    if (changed_.wait_for(guard, kInterval, [this] { return stopping_; })) return;
    awake_.store(false, std::memory_order_relaxed);  // a stir() while it looks is not lost
    guard.unlock();
    const bool more = look_();
    guard.lock();
    if (more) awake_.store(true, std::memory_order_relaxed);
  }
}

}  // namespace gpupool::worker
