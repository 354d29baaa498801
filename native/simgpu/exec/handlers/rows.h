// How handlers see rows: typed access, and loops over the lanes with and without a mask.
// Included only by translation units that are compiled once per ISA level.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "simgpu/exec/handler_set.h"
#include "simgpu/exec/machine.h"

#ifndef GPUPOOL_ISA
#error "GPUPOOL_ISA names the ISA level's namespace"
#endif

namespace gpupool::simgpu::exec::GPUPOOL_ISA {

using ptx::Mod;
using ptx::Op;
using ptx::Type;
using Ins = const Instruction*;

template <class T>
inline T* row(Warp& w, uint32_t offset) {
  return static_cast<T*>(__builtin_assume_aligned(w.rows + offset, 64));
}

inline void expand32(Warp& w) {
  if (w.expanded32 == w.mask) return;
  const uint32_t m = w.mask;
  for (int l = 0; l < kLanes; ++l) w.lanes32[l] = -static_cast<int32_t>((m >> l) & 1);
  w.expanded32 = m;
}
inline void expand64(Warp& w) {
  if (w.expanded64 == w.mask) return;
  expand32(w);
  for (int l = 0; l < kLanes; ++l) w.lanes64[l] = w.lanes32[l];
  w.expanded64 = w.mask;
}
inline void expand16(Warp& w) {
  if (w.expanded16 == w.mask) return;
  const uint32_t m = w.mask;
  for (int l = 0; l < kLanes; ++l)
    w.lanes16[l] = static_cast<int16_t>(-static_cast<int32_t>((m >> l) & 1));
  w.expanded16 = m;
}

template <size_t kBytes>
inline auto* lane_words(Warp& w) {
  if constexpr (kBytes == 8) {
    expand64(w);
    return static_cast<const int64_t*>(w.lanes64);
  } else if constexpr (kBytes == 4) {
    expand32(w);
    return static_cast<const int32_t*>(w.lanes32);
  } else {
    expand16(w);
    return static_cast<const int16_t*>(w.lanes16);
  }
}

// d[lane] = fn(sources[lane] ...) for the active lanes, or all. Rows are equal or disjoint.
template <class D, class Fn, class... S>
inline void map_lanes(Warp& w, uint32_t d, bool all, Fn fn, const S*... s) {
  D* out = row<D>(w, d);
  if (all) {
#pragma GCC ivdep
    for (int l = 0; l < kLanes; ++l) out[l] = fn(s[l]...);
  } else {
    const auto* m = lane_words<sizeof(D)>(w);
#pragma GCC ivdep
    for (int l = 0; l < kLanes; ++l) {
      const D r = fn(s[l]...);
      out[l] = m[l] ? r : out[l];
    }
  }
}

template <class D, class Fn, class... S>
inline void map_lanes(Warp& w, uint32_t d, Fn fn, const S*... s) {
  map_lanes<D>(w, d, w.waiting == 0, fn, s...);
}
// For an instruction whose result is row `d` alone.
template <class D, class Fn, class... S>
inline void map_result(Warp& w, Ins i, Fn fn, const S*... s) {
  map_lanes<D>(w, i->d, (w.waiting & i->conflicts) == 0, fn, s...);
}

// The same for functions too large for the vectoriser: only active lanes are computed.
template <class D, class Fn, class... S>
inline void each_lane(Warp& w, uint32_t d, Fn fn, const S*... s) {
  D* out = row<D>(w, d);
  for (uint32_t m = w.mask; m; m &= m - 1) {
    const int l = __builtin_ctz(m);
    out[l] = fn(s[l]...);
  }
}

// The active lanes whose predicate holds, and others: callers mask.
inline uint32_t bits_of(const int32_t* p) {
#ifdef __AVX2__
  uint32_t bits = 0;
  for (int q = 0; q < 4; ++q)
    bits |= static_cast<uint32_t>(
                _mm256_movemask_ps(_mm256_load_ps(reinterpret_cast<const float*>(p + 8 * q))))
            << (8 * q);
  return bits;
#else
  uint32_t bits = 0;
  for (int q = 0; q < 8; ++q)
    bits |= static_cast<uint32_t>(
                _mm_movemask_ps(_mm_load_ps(reinterpret_cast<const float*>(p + 4 * q))))
            << (4 * q);
  return bits;
#endif
}

// d = F(a), F(a, b), F(a, b, c): one handler each.
template <class D, class A, class F>
inline Ins unary(Warp& w, Ins i) {
  map_result<D>(w, i, F{}, row<const A>(w, i->a));
  return i + 1;
}
template <class D, class A, class B, class F>
inline Ins binary(Warp& w, Ins i) {
  map_result<D>(w, i, F{}, row<const A>(w, i->a), row<const B>(w, i->b));
  return i + 1;
}
template <class D, class A, class B, class C, class F>
inline Ins ternary(Warp& w, Ins i) {
  map_result<D>(w, i, F{}, row<const A>(w, i->a), row<const B>(w, i->b), row<const C>(w, i->c));
  return i + 1;
}
template <class D, class A, class F>
inline Ins unary_slow(Warp& w, Ins i) {
  each_lane<D>(w, i->d, F{}, row<const A>(w, i->a));
  return i + 1;
}
template <class D, class A, class B, class F>
inline Ins binary_slow(Warp& w, Ins i) {
  each_lane<D>(w, i->d, F{}, row<const A>(w, i->a), row<const B>(w, i->b));
  return i + 1;
}
template <class D, class A, class B, class C, class F>
inline Ins ternary_slow(Warp& w, Ins i) {
  each_lane<D>(w, i->d, F{}, row<const A>(w, i->a), row<const B>(w, i->b), row<const C>(w, i->c));
  return i + 1;
}

template <class To, class From>
inline To bits_as(From v) {
  static_assert(sizeof(To) == sizeof(From));
  To r;
  __builtin_memcpy(&r, &v, sizeof r);
  return r;
}

// ---- f32 and f64 rules ----
inline float canonical(float r) { return r != r ? bits_as<float>(uint32_t{0x7fffffff}) : r; }
inline double canonical(double r) { return r; }
inline float flush(float x) {
  const uint32_t u = bits_as<uint32_t>(x);
  return bits_as<float>((u & 0x7f800000u) ? u : (u & 0x80000000u));
}
template <bool kFtz>
inline float in(float x) {
  if constexpr (kFtz) return flush(x);
  return x;
}
template <bool kFtz>
inline double in(double x) {
  return x;
}
template <class T>
inline T saturated(T r) {
  r = r > T(0) ? r : T(0);  // NaN and -0 too
  return r < T(1) ? r : T(1);
}
template <bool kFtz, bool kSat, class T>
inline T out(T r) {
  r = in<kFtz>(r);
  if constexpr (kSat) return saturated(r);
  return canonical(r);
}

// Runs a handler under another rounding mode. Operands come from memory and results go there, so
// the barriers keep the arithmetic between the two settings.
inline void set_rounding(unsigned mode) {
  asm volatile("" ::: "memory");
  _mm_setcsr((_mm_getcsr() & ~0x6000u) | mode);
  asm volatile("" ::: "memory");
}
template <Handler kHandler, unsigned kMode>
Ins rounded(Warp& w, Ins i) {
  set_rounding(kMode);
  Ins next = kHandler(w, i);
  set_rounding(_MM_ROUND_NEAREST);
  return next;
}
template <Handler kHandler>
inline Handler with_rounding(Round round) {
  switch (round) {
    case Round::kNearest:
      return kHandler;
    case Round::kZero:
      return rounded<kHandler, _MM_ROUND_TOWARD_ZERO>;
    case Round::kDown:
      return rounded<kHandler, _MM_ROUND_DOWN>;
    case Round::kUp:
      return rounded<kHandler, _MM_ROUND_UP>;
  }
  return nullptr;
}

// The functions of HandlerSet, one translation unit or more each.
Handler integer_handler(Op op, Type type, Mod mode, bool sat);
Handler division_handler(Op op, Type type);
Handler carry_handler(Op op, Type type, Mod mode, bool in, bool out);
Handler bits_handler(Op op, Type type, Mod mode, Mod mode2, Type type2);
Handler floating_handler(Op op, Type type, FloatMode mode);
Handler double_handler(Op op, FloatMode mode);
Handler math_handler(Op op, Type type, FloatMode mode, bool approx);
Handler setp_handler(Type type, Mod compare, bool ftz);
Handler selp_handler(uint32_t width);
Handler slct_handler(uint32_t width, bool floating, bool ftz);
Handler testp_handler(Type type, Mod what);
Handler extend_handler(uint32_t from, Type type, uint32_t to);
Handler saturate_handler(Type to);
Handler saturate_unsigned_handler(Type to);
Handler convert_handler(Type to, Type from, Mod rounding, bool ftz, bool sat);
Handler half_handler(Op op, Type type, FloatMode mode);
Handler move_handler(uint32_t width);
Handler predicate_handler(Op op);
Handler pack_handler(uint32_t from, uint32_t to, uint32_t part);
Handler unpack_handler(uint32_t from, uint32_t to, uint32_t part);
Handler load_handler(Access access, Type type, uint32_t width, bool vector, bool poll);
Handler store_handler(Access access, Type type, uint32_t width, bool vector);
Handler atomic_handler(Access access, Mod operation, Type type, bool result);
Handler warp_handler(Op op, Mod mode, Type type);
Handler control_handler(Op op, Mod mode, bool negated);
Handler special_handler(Clock which);
Ins run_guarded(Warp& w, Ins i);
Ins run_guarded_not(Warp& w, Ins i);
Ins sign_mask(Warp& w, Ins i);
Ins set_float(Warp& w, Ins i);

}  // namespace gpupool::simgpu::exec::GPUPOOL_ISA
