// Half precision: conversions that round once, in any mode.
#pragma once

#include "simgpu/exec/handlers/rows.h"

namespace gpupool::simgpu::exec::GPUPOOL_ISA {

inline float half_to_float(uint16_t h) {
#ifdef __F16C__
  return _cvtsh_ss(h);
#else
  const uint32_t sign = uint32_t(h & 0x8000) << 16;
  const uint32_t e = (h >> 10) & 31, m = h & 0x3ff;
  if (e == 31) return bits_as<float>(sign | 0x7f800000u | m << 13);
  if (e == 0) {
    const float v = float(m) * 5.9604644775390625e-08f;  // 2^-24
    return bits_as<float>(bits_as<uint32_t>(v) | sign);
  }
  return bits_as<float>(sign | (e + 112) << 23 | m << 13);
#endif
}
inline float bfloat_to_float(uint16_t h) { return bits_as<float>(uint32_t(h) << 16); }

// Drops `drop` low bits of the magnitude `u` as the rounding mode says.
template <Round kRound>
inline uint32_t drop_bits(uint32_t u, uint32_t drop, bool negative) {
  const uint32_t rest = u & ((1u << drop) - 1), kept = u >> drop;
  if constexpr (kRound == Round::kNearest) {
    const uint32_t half = 1u << (drop - 1);
    return kept + (rest > half || (rest == half && (kept & 1)));
  }
  if constexpr (kRound == Round::kUp) return kept + (rest != 0 && !negative);
  if constexpr (kRound == Round::kDown) return kept + (rest != 0 && negative);
  return kept;
}

template <Round kRound>
inline uint16_t float_to_half(float f) {
  const uint32_t bits = bits_as<uint32_t>(f);
  const uint32_t sign = (bits >> 16) & 0x8000, u = bits & 0x7fffffffu;
  if (u > 0x7f800000u) return 0x7fff;
  if (u == 0x7f800000u) return uint16_t(sign | 0x7c00);
  const bool negative = sign != 0;
  uint32_t r;
  if (u < 0x38800000u) {  // below 2^-14: subnormal
    const uint32_t e = u >> 23;
    uint32_t m = e ? (u & 0x7fffffu) | 0x800000u : u & 0x7fffffu;
    uint32_t drop = 126 - (e ? e : 1);  // to units of 2^-24
    if (drop > 31) {
      m = m != 0;
      drop = 2;
    } else if (drop > 25) {
      m = (m >> (drop - 25)) | ((m & ((1u << (drop - 25)) - 1)) != 0);
      drop = 25;
    }
    r = drop_bits<kRound>(m, drop, negative);
  } else {
    r = drop_bits<kRound>(u - (112u << 23), 13, negative);
  }
  if (r >= 0x7c00) {
    const bool to_infinity = kRound == Round::kNearest || (kRound == Round::kUp && !negative) ||
                             (kRound == Round::kDown && negative);
    r = to_infinity ? 0x7c00 : 0x7bff;
  }
  return uint16_t(sign | r);
}
template <Round kRound>
inline uint16_t float_to_bfloat(float f) {
  const uint32_t bits = bits_as<uint32_t>(f);
  const uint32_t u = bits & 0x7fffffffu;
  if (u > 0x7f800000u) return 0x7fff;
  if (u == 0x7f800000u) return uint16_t(bits >> 16);
  uint32_t r = drop_bits<kRound>(u, 16, bits >> 31);
  if (r >= 0x7f80 && kRound == Round::kZero) r = 0x7f7f;
  return uint16_t((bits >> 31) << 15 | r);
}

// Rounded to odd: rounding the result again to fewer bits gives what rounding once would give.
inline float to_float_odd(double d) {
  float f = float(d);
  if (double(f) == d || d != d) return f;
  uint32_t u = bits_as<uint32_t>(f);
  if (__builtin_fabs(double(f)) > __builtin_fabs(d)) --u;
  return bits_as<float>(u | 1);
}
inline double add_odd(double p, double c) {
  const double s = p + c;
  const double t = s - p;
  const double e = (p - (s - t)) + (c - t);
  if (!(e != 0.0) || !(__builtin_fabs(s) < std::numeric_limits<double>::infinity())) return s;
  int64_t u = bits_as<int64_t>(s);
  if (u & 1) return s;
  u += (e > 0) == (s > 0) ? 1 : -1;
  return bits_as<double>(u);
}

struct Half {
  static float widen(uint16_t h) { return half_to_float(h); }
  template <Round kRound>
  static uint16_t narrow(float f) {
    return float_to_half<kRound>(f);
  }
  static constexpr uint16_t kExponent = 0x7c00;
  static constexpr uint16_t kOne = 0x3c00;
};
struct Bfloat {
  static float widen(uint16_t h) { return bfloat_to_float(h); }
  template <Round kRound>
  static uint16_t narrow(float f) {
    return float_to_bfloat<kRound>(f);
  }
  static constexpr uint16_t kExponent = 0x7f80;
  static constexpr uint16_t kOne = 0x3f80;
};

}  // namespace gpupool::simgpu::exec::GPUPOOL_ISA
