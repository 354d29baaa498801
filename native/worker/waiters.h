// Threads for calls that wait for the device, so that the session's reader goes on.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace gpupool::worker {

class Waiters {
 public:
  Waiters() = default;
  ~Waiters() { stop(); }

  // Runs the task on a thread of its own, as far as the limit allows; false: it does not, the
  // caller has to wait itself.
  bool run(std::function<void()> task) {
    std::lock_guard guard(lock_);
    if (idle_ <= tasks_.size()) {
      if (threads_.size() >= kMaxThreads) return false;
      threads_.emplace_back([this] { loop(); });
    }
    tasks_.push_back(std::move(task));
    wake_.notify_one();
    return true;
  }

  // After the last task.
  void stop() {
    {
      std::lock_guard guard(lock_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

 private:
  static constexpr size_t kMaxThreads = 128;

  void loop() {
    std::unique_lock guard(lock_);
    for (;;) {
      idle_++;
      wake_.wait(guard, [this] { return stopping_ || !tasks_.empty(); });
      idle_--;
      if (tasks_.empty()) return;
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      guard.unlock();
      task();
      task = nullptr;
      guard.lock();
    }
  }

  std::mutex lock_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  std::vector<std::thread> threads_;
  size_t idle_ = 0;
  bool stopping_ = false;
};

}  // namespace gpupool::worker
