// The broker's event loop: descriptors (epoll, level-triggered) and timers, on one thread. A
// callback may forget any descriptor and cancel any timer, its own too.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <unordered_map>

#include "broker/fd.h"

namespace gpupool::broker {

class EventLoop {
 public:
  using Callback = std::function<void(uint32_t events)>;
  using TimerId = uint64_t;  // 0: no timer

  EventLoop();  // throws std::system_error

  bool watch(int fd, uint32_t events, Callback callback);  // false: errno
  void change(int fd, uint32_t events);
  void forget(int fd);  // before the descriptor is closed; nothing happens when it isn't watched

  TimerId after(int64_t ms, std::function<void()> callback);
  void cancel(TimerId& timer);  // and sets it to 0

  void run();  // until stop()
  void stop() { stopped_ = true; }

 private:
  struct Watch {
    int fd;
    Callback callback;
  };
  using TimerKey = std::pair<int64_t, TimerId>;  // due, id

  void run_timers();
  int timeout_ms() const;

  Fd epoll_;
  bool stopped_ = false;
  uint64_t next_id_ = 1;
  // Events carry the number of a watch and not the descriptor, which may have been closed and
  // opened again by an earlier event of the same round.
  std::unordered_map<uint64_t, std::shared_ptr<Watch>> watches_;
  std::unordered_map<int, uint64_t> by_fd_;
  std::map<TimerKey, std::function<void()>> timers_;
  std::unordered_map<TimerId, int64_t> due_;
};

int64_t steady_ms();
int64_t unix_ns();

}  // namespace gpupool::broker
