// Keeps a session's books while its client is silent: about once a second while there is work that
// may make the driver take memory; otherwise it sleeps.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace gpupool::worker {

class Bookkeeper {
 public:
  // `look()` compares; false: there is nothing left to look at until the next stir(). Called by a
  // thread of its own.
  explicit Bookkeeper(std::function<bool()> look) : look_(std::move(look)) {}
  ~Bookkeeper() { stop(); }
  Bookkeeper(const Bookkeeper&) = delete;
  Bookkeeper& operator=(const Bookkeeper&) = delete;

  // There may be something to look at. Throws std::system_error if the thread cannot be started.
  void stir() {
    if (!awake_.load(std::memory_order_relaxed)) [[unlikely]]
      wake();
  }
  // After the last look.
  void stop();

 private:
  void wake();
  void loop();

  const std::function<bool()> look_;
  std::mutex lock_;
  std::condition_variable changed_;
  std::atomic<bool> awake_{false};
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace gpupool::worker
