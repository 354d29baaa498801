#include "simgpu/driver/stream.h"

#include <signal.h>
#include <time.h>

#include <chrono>
#include <thread>

namespace gpupool::simgpu {

uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return uint64_t(t.tv_sec) * 1'000'000'000 + uint64_t(t.tv_nsec);
}

void RecordPoint::complete() {
  time_ = now_ns();
  done_.store(true, std::memory_order_release);
  done_.notify_all();
}

// With the lock. Who sees an event done finds nothing left of what was before it.
void Stream::finish(const Point& point) {
  executing_ = false;
  completed_.fetch_add(1, std::memory_order_release);
  if (point) point->complete();
  progress_.notify_all();
}

void Stream::execute_one(std::unique_lock<std::mutex>& lock) {
  executing_ = true;
  Item item = std::move(queue_.front());
  queue_.pop_front();
  lock.unlock();
  for (auto& dependency : item.dependencies) dependency.stream->wait(dependency.number);
  item.work();
  item.work = {};  // what the work held ends before others are told that it is done
  item.dependencies.clear();
  lock.lock();
  finish(item.point);
}

uint64_t Stream::submit(std::vector<Dependency> dependencies, Work work, Point point,
                        bool calls_program) {
  std::unique_lock lock(mutex_);
  queue_.push_back({std::move(dependencies), std::move(work), std::move(point), calls_program});
  uint64_t number = submitted_.fetch_add(1, std::memory_order_release) + 1;
  if (!thread_) {
    // Signals are the application's: its handlers must not run on our threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread([self = shared_from_this()] { self->serve(); }).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    thread_ = true;
  } else if (thread_idle_ && !executing_) {
    has_work_.notify_one();
  }
  return number;
}

bool Stream::run_now(const std::function<void()>& unlock, const Work& work, const Point& point) {
  std::unique_lock lock(mutex_);
  if (executing_ || !queue_.empty()) return false;
  executing_ = true;
  submitted_.fetch_add(1, std::memory_order_release);
  lock.unlock();
  unlock();
  work();
  lock.lock();
  finish(point);
  if (thread_idle_ && !queue_.empty()) has_work_.notify_one();
  return true;
}

void Stream::wait(uint64_t number) {
  if (finished(number)) return;
  std::unique_lock lock(mutex_);
  while (!finished(number)) {
    const bool free = !executing_ && !queue_.empty();
    if (free && !queue_.front().calls_program) {
      execute_one(lock);  // the waiting thread does the work itself
    } else {
      if (free) has_work_.notify_one();
      progress_.wait(lock);
    }
  }
  if (thread_idle_ && !executing_ && !queue_.empty()) has_work_.notify_one();
}

void Stream::close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
  has_work_.notify_one();
}

void Stream::serve() {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (executing_) {
      progress_.wait(lock);
    } else if (!queue_.empty()) {
      execute_one(lock);
    } else if (closed_) {
      break;
    } else {
      thread_idle_ = true;
      bool more = has_work_.wait_for(lock, std::chrono::seconds(5),
                                     [this] { return !queue_.empty() || closed_; });
      thread_idle_ = false;
      if (!more) break;
    }
  }
  thread_ = false;
}

}  // namespace gpupool::simgpu
