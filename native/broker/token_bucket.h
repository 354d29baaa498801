// How often something may happen: a number at once, and so many a second for longer.
#pragma once

#include <cstdint>

namespace gpupool::broker {

class TokenBucket {
 public:
  // Full at first. Both at least 1.
  TokenBucket(uint32_t burst, uint32_t per_second);

  // Whether it may happen at `now_ms` of a steady clock, which then counts.
  bool take(int64_t now_ms);

 private:
  const int64_t full_;        // in thousandths of a token
  const int64_t per_second_;  // tokens: as many thousandths a millisecond
  int64_t held_;
  int64_t last_ms_ = 0;
};

}  // namespace gpupool::broker
