// How many sessions of a host may spin at once: a page of tokens that all workers share. A token is
// the time at which it lapses, so that nothing has to be cleaned up after a worker that dies.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace gpupool::carriers {

class SpinGate {
 public:
  static constexpr size_t kBytes = 4096;
  static constexpr uint32_t kMaxTokens = kBytes / 64;
  static constexpr int64_t kLongestNs = 1'000'000;  // that a token can be held

  // `page`: kBytes of shared memory, all zero at first, which stay mapped. `tokens`: of all of it.
  SpinGate(void* page, uint32_t tokens)
      : tokens_(static_cast<Token*>(page)), count_(tokens < kMaxTokens ? tokens : kMaxTokens) {}

  // Takes a token for at most that long; false: all are taken.
  bool enter(int64_t now_ns, int64_t for_ns);
  void leave();  // after enter() was true

 private:
  struct alignas(64) Token {
    std::atomic<int64_t> until;
  };
  Token* const tokens_;
  const uint32_t count_;
  uint32_t own_ = 0;
  int64_t until_ = 0;
};

}  // namespace gpupool::carriers
