// Whether whoever waits should look again and again for some microseconds before it sleeps: waking
// a thread costs about as much as a short call of the worker.
#pragma once

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace gpupool::carriers {

// Learns from how long the last waits took. Used by one thread at a time, the one that reads;
// forbid() may come from any.
class Patience {
 public:
  static constexpr int64_t kSpinNs = 25'000;
  // A worker's, which needs a token of SpinGate: longer than it takes to wake a client.
  static constexpr int64_t kWorkerSpinNs = 50'000;
  static constexpr int64_t kWorkerWorthwhileNs = 100'000;

  // Spins at most `spin_ns`, where waits have taken at most `worthwhile_ns` lately.
  explicit Patience(int64_t spin_ns = kSpinNs, int64_t worthwhile_ns = kSpinNs)
      : spin_ns_(spin_ns), worthwhile_ns_(worthwhile_ns) {}

  // As CU_CTX_SCHED_BLOCKING_SYNC asks for.
  void forbid(bool forbidden) { forbidden_.store(forbidden, std::memory_order_relaxed); }

  // Said once, before the first use: the other side needs none of the processors here.
  void peer_is_elsewhere() { alone_ = false; }

  // True on a single processor too, where spinning only keeps the other side from answering.
  bool forbidden() const { return alone_ || forbidden_.load(std::memory_order_relaxed); }
  bool worthwhile() const { return expected_ns_ <= worthwhile_ns_ && !forbidden(); }
  int64_t spin_ns() const { return spin_ns_; }

  // Long waits count as at most eight times the limit, so that a few short ones outweigh them.
  void waited(int64_t ns) { expected_ns_ += (std::min(ns, 8 * worthwhile_ns_) - expected_ns_) / 4; }

  static int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
  }

 private:
  static bool may_use_several_processors() {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) != 0 || CPU_COUNT(&set) > 1;
  }

  const int64_t spin_ns_, worthwhile_ns_;
  int64_t expected_ns_ = 0;
  std::atomic<bool> forbidden_{false};
  bool alone_ = !may_use_several_processors();
};

}  // namespace gpupool::carriers
