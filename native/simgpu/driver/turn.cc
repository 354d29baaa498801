// Taking turns on a card: see Turn in context.h.
#include "simgpu/driver/context.h"

namespace gpupool::simgpu {

bool Turn::take(std::unique_lock<std::mutex>& lock, const std::function<bool()>& cancelled) {
  moving_ = true;
  lock.unlock();
  bool taken = card_->acquire(id_, cancelled);
  lock.lock();
  moving_ = false;
  held_ = taken;
  noted_ = now_ns();
  changed_.notify_all();
  return taken;
}

bool Turn::enter(const std::function<bool()>& cancelled) {
  std::unique_lock lock(mutex_);
  ++running_;
  while (!held_) {
    if (moving_) {
      changed_.wait(lock);
    } else if (!take(lock, cancelled)) {
      --running_;
      return false;
    }
  }
  return true;
}

void Turn::leave() {
  std::unique_lock lock(mutex_);
  while (moving_) changed_.wait(lock);
  if (--running_ == 0 && held_) {
    held_ = false;
    card_->release();
  }
}

void Turn::pass_on(const std::function<bool()>& cancelled) {
  if (held_.load(std::memory_order_acquire) && !card_->turn_is_over()) {
    if (now_ns() - noted_ > 50'000'000) {  // long kernels show in the utilization while they run
      std::lock_guard lock(mutex_);
      if (held_ && !moving_) card_->note_busy();
      noted_ = now_ns();
    }
    return;
  }
  std::unique_lock lock(mutex_);
  if (held_ && !moving_ && card_->turn_is_over()) {
    held_ = false;
    card_->release();
    take(lock, cancelled);
    return;
  }
  while (!held_ && !cancelled()) {
    if (moving_) {
      changed_.wait(lock);
    } else if (!take(lock, cancelled)) {
      return;
    }
  }
}

}  // namespace gpupool::simgpu
