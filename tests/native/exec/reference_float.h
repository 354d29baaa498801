// Narrow floating-point formats in exact arithmetic, for references.
#pragma once

#include <cfenv>
#include <cmath>
#include <cstdint>

namespace gpupool::simgpu {

struct Format {
  int precision;   // significant bits, the hidden one included
  int emin, emax;  // of normal numbers
};
constexpr Format kF16Format{11, -14, 15}, kBf16Format{8, -126, 127};

// The bits of `x` (finite) rounded to a 16-bit format; f16 and bf16 differ in field widths only.
inline uint64_t round_to(__float128 x, const Format& f, int mode, bool negative_zero = false) {
  const int exponent_bits = f.precision == 11 ? 5 : 8, mantissa_bits = f.precision - 1;
  const uint64_t sign_bit = 0x8000;
  const bool negative = x < 0 || (x == 0 && negative_zero);
  __float128 m = x < 0 ? -x : x;
  uint64_t bits = negative ? sign_bit : 0;
  if (m == 0) return bits;
  int e = 0;  // m = s * 2^e with 1 <= s < 2
  __float128 s = m;
  while (s >= 2) {
    s /= 2;
    ++e;
  }
  while (s < 1) {
    s *= 2;
    --e;
  }
  const int quantum = (e < f.emin ? f.emin : e) - mantissa_bits;
  __float128 scaled = m;
  for (int i = 0; i < quantum; ++i) scaled /= 2;
  for (int i = 0; i > quantum; --i) scaled *= 2;
  unsigned __int128 n = static_cast<unsigned __int128>(scaled);
  const __float128 rest = scaled - static_cast<__float128>(n);
  bool up = false;
  if (mode == FE_TONEAREST) up = rest > 0.5 || (rest == 0.5 && (n & 1));
  if (mode == FE_UPWARD) up = rest > 0 && !negative;
  if (mode == FE_DOWNWARD) up = rest > 0 && negative;
  if (up) ++n;
  int q = quantum;
  if (n == static_cast<unsigned __int128>(1) << f.precision) {
    n >>= 1;
    ++q;
  }
  const uint64_t infinity = ((1u << exponent_bits) - 1) << mantissa_bits;
  if (q > f.emax - mantissa_bits) {
    const bool to_infinity = mode == FE_TONEAREST || (mode == FE_UPWARD && !negative) ||
                             (mode == FE_DOWNWARD && negative);
    return bits | (to_infinity ? infinity : infinity - 1);
  }
  const uint64_t mantissa = static_cast<uint64_t>(n);
  if (mantissa >> mantissa_bits == 0) return bits | mantissa;  // subnormal
  const uint64_t biased = static_cast<uint64_t>(q + mantissa_bits + f.emax);
  return bits | biased << mantissa_bits | (mantissa & ((1u << mantissa_bits) - 1));
}

inline double f16_value(uint64_t h) {
  const int e = static_cast<int>(h >> 10 & 31), m = static_cast<int>(h & 1023);
  double v = e == 31  ? (m ? NAN : INFINITY)
             : e == 0 ? std::ldexp(m, -24)
                      : std::ldexp(1024 + m, e - 25);
  return h & 0x8000 ? -v : v;
}

// Any double, special values included.
inline uint64_t to_narrow(double d, const Format& f, int mode) {
  const uint64_t infinity = f.precision == 11 ? 0x7c00 : 0x7f80;
  if (std::isnan(d)) return 0x7fff;
  if (std::isinf(d)) return infinity | (d < 0 ? 0x8000 : 0);
  return round_to(d, f, mode, std::signbit(d));
}

}  // namespace gpupool::simgpu
