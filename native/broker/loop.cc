#include "broker/loop.h"

#include <errno.h>
#include <sys/epoll.h>
#include <time.h>

#include <algorithm>
#include <system_error>

namespace gpupool::broker {

int64_t steady_ms() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1000 + now.tv_nsec / 1000000;
}

int64_t unix_ns() {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return int64_t{now.tv_sec} * 1000000000 + now.tv_nsec;
}

EventLoop::EventLoop() : epoll_(epoll_create1(EPOLL_CLOEXEC)) {
  if (!epoll_) throw std::system_error(errno, std::generic_category(), "epoll_create1");
}

bool EventLoop::watch(int fd, uint32_t events, Callback callback) {
  const uint64_t id = next_id_++;
  epoll_event event{};
  event.events = events;
  event.data.u64 = id;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) return false;
  watches_[id] = std::make_shared<Watch>(Watch{fd, std::move(callback)});
  by_fd_[fd] = id;
  return true;
}

void EventLoop::change(int fd, uint32_t events) {
  auto found = by_fd_.find(fd);
  if (found == by_fd_.end()) return;
  epoll_event event{};
  event.events = events;
  event.data.u64 = found->second;
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void EventLoop::forget(int fd) {
  auto found = by_fd_.find(fd);
  if (found == by_fd_.end()) return;
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  watches_.erase(found->second);
  by_fd_.erase(found);
}

EventLoop::TimerId EventLoop::after(int64_t ms, std::function<void()> callback) {
  const TimerId id = next_id_++;
  const int64_t due = steady_ms() + std::max<int64_t>(ms, 0);
  timers_[{due, id}] = std::move(callback);
  due_[id] = due;
  return id;
}

void EventLoop::cancel(TimerId& timer) {
  auto found = due_.find(timer);
  if (found != due_.end()) {
    timers_.erase({found->second, timer});
    due_.erase(found);
  }
  timer = 0;
}

int EventLoop::timeout_ms() const {
  if (timers_.empty()) return -1;
  return static_cast<int>(
      std::clamp<int64_t>(timers_.begin()->first.first - steady_ms(), 0, 60000));
}

void EventLoop::run_timers() {
  const int64_t now = steady_ms();
  while (!stopped_ && !timers_.empty() && timers_.begin()->first.first <= now) {
    auto first = timers_.extract(timers_.begin());
    due_.erase(first.key().second);
    first.mapped()();
  }
}

void EventLoop::run() {
  epoll_event events[64];
  while (!stopped_) {
    const int count = epoll_wait(epoll_.get(), events, 64, timeout_ms());
    if (count < 0 && errno != EINTR) {
      throw std::system_error(errno, std::generic_category(), "epoll_wait");
    }
    for (int i = 0; i < count && !stopped_; i++) {
      auto found = watches_.find(events[i].data.u64);
      if (found == watches_.end()) continue;  // forgotten by an earlier event of this round
      const std::shared_ptr<Watch> watch = found->second;
      watch->callback(events[i].events);
    }
    run_timers();
  }
}

}  // namespace gpupool::broker
