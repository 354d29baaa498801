#include "carriers/spin_gate.h"

#include <algorithm>

namespace gpupool::carriers {

bool SpinGate::enter(int64_t now_ns, int64_t for_ns) {
  const int64_t until = now_ns + std::min(for_ns, kLongestNs);
  for (uint32_t i = 0; i < count_; i++) {
    const uint32_t at = (own_ + i) % count_;  // the last one first: it is in this core's cache
    int64_t seen = tokens_[at].until.load(std::memory_order_relaxed);
    // One that lapses too late is not a token that anybody has taken rightly.
    if (seen > now_ns && seen <= now_ns + kLongestNs) continue;
    if (tokens_[at].until.compare_exchange_strong(seen, until, std::memory_order_relaxed)) {
      own_ = at;
      until_ = until;
      return true;
    }
  }
  return false;
}

void SpinGate::leave() {
  int64_t seen = until_;
  tokens_[own_].until.compare_exchange_strong(seen, 0, std::memory_order_relaxed);
}

}  // namespace gpupool::carriers
