// How many bytes a call touches, from the first to the last one. Counts come from programs: what
// they lead to is never more than wraps around, but kTooFar, which is in no allocation.
#pragma once

#include <cstdint>

namespace gpupool::wire {

constexpr uint64_t kTooFar = UINT64_MAX;

// `count` elements of `element` bytes.
constexpr uint64_t extent(uint64_t count, uint64_t element) {
  uint64_t bytes = 0;
  return __builtin_mul_overflow(count, element, &bytes) ? kTooFar : bytes;
}

// `height` rows of `width` elements, which begin `pitch` bytes apart. A pitch shorter than a row is
// wrong where there is a second row.
constexpr uint64_t extent(uint64_t pitch, uint64_t width, uint64_t element, uint64_t height) {
  const uint64_t row = extent(width, element);
  if (row == 0 || height == 0) return 0;
  if (height == 1) return row;
  const uint64_t before = extent(height - 1, pitch);
  return pitch < row || before > kTooFar - row ? kTooFar : before + row;
}

}  // namespace gpupool::wire
