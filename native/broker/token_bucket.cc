#include "broker/token_bucket.h"

#include <algorithm>

namespace gpupool::broker {
namespace {

constexpr int64_t kToken = 1000;

}  // namespace

TokenBucket::TokenBucket(uint32_t burst, uint32_t per_second)
    : full_(burst * kToken), per_second_(per_second), held_(full_) {}

bool TokenBucket::take(int64_t now_ms) {
  // No longer than it takes to fill it, so that nothing overflows.
  const int64_t passed = std::clamp<int64_t>(now_ms - last_ms_, 0, full_ / per_second_ + 1);
  held_ = std::min(full_, held_ + passed * per_second_);
  last_ms_ = std::max(last_ms_, now_ms);
  if (held_ < kToken) return false;
  held_ -= kToken;
  return true;
}

}  // namespace gpupool::broker
