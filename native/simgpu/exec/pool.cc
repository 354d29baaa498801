// Host threads that help with launches. They are made with the first launch that is large enough,
// one fewer than the machine has processors or than GPUPOOL_SIMGPU_THREADS says, and live as long
// as the process.
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <thread>

#include "simgpu/exec/block.h"

namespace gpupool::simgpu::exec {
namespace {

class Pool {
 public:
  Pool() {
    const unsigned n = host_threads();
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals belong to the application's threads
    for (unsigned k = 1; k < n && k < 64; ++k) {
      std::thread([this] { run(); }).detach();
      ++threads_;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void offer(const std::shared_ptr<LaunchState>& state) {
    std::lock_guard lock(mutex_);
    for (unsigned k = 0; k < threads_; ++k) queue_.push_back(state);
    wake_.notify_all();
  }

 private:
  void run() {
    for (;;) {
      std::shared_ptr<LaunchState> state;
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [&] { return !queue_.empty(); });
        state = std::move(queue_.front());
        queue_.pop_front();
      }
      {
        std::lock_guard lock(state->mutex);
        if (state->closed || state->stop || state->finished == state->total_blocks) continue;
        ++state->workers;
      }
      work_on(*state, false, state);
      std::lock_guard lock(state->mutex);
      --state->workers;
      state->changed.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<LaunchState>> queue_;
  unsigned threads_ = 0;
};

}  // namespace

unsigned host_threads() {
  static const unsigned n = [] {
    if (const char* text = std::getenv("GPUPOOL_SIMGPU_THREADS")) {
      const int k = std::atoi(text);
      if (k > 0) return static_cast<unsigned>(k);
    }
    return std::max(1u, std::thread::hardware_concurrency());
  }();
  return n;
}

void pool_offer(const std::shared_ptr<LaunchState>& state) {
  static Pool* pool = new Pool;  // never destroyed: its threads outlive static objects
  pool->offer(state);
}

}  // namespace gpupool::simgpu::exec
