// From address rows to host memory: checked, and classified by pattern for each half of the warp.
#pragma once

#include "simgpu/exec/handlers/rows.h"

namespace gpupool::simgpu::exec::GPUPOOL_ISA {

enum class Kind { kGlobal, kShared, kLocal, kParam, kGeneric };
enum class Pattern : uint8_t { kNone, kUniform, kContiguous, kGeneral };

struct Resolved {
  Pattern pattern[2];
  uint8_t* base[2];
  alignas(64) uint8_t* host[kLanes];

  uint8_t* of(int lane, uint32_t bytes) const {
    const int h = lane >> 4;
    switch (pattern[h]) {
      case Pattern::kUniform:
        return base[h];
      case Pattern::kContiguous:
        return base[h] + uint64_t(lane & 15) * bytes;
      default:
        return host[lane];
    }
  }
};

inline bool in_global(Warp& w, Ins i, uint64_t first, uint64_t bytes, bool store) {
  CachedRange& r = w.ranges[i->slot];
  if (first >= r.begin && first + bytes <= r.end && (r.writable || !store)) return true;
  return refill_range(w, r, first, first + bytes, store);
}

// Host address of [first, first + bytes), which is one piece; nullptr: not addressable.
template <Kind kKind>
inline uint8_t* translate(Warp& w, Ins i, uint64_t first, uint64_t bytes, bool store) {
  if constexpr (kKind == Kind::kGlobal) {
    return first < kWindows && in_global(w, i, first, bytes, store)
               ? reinterpret_cast<uint8_t*>(first)
               : nullptr;
  } else if constexpr (kKind == Kind::kShared) {
    return first < w.shared_bytes && first + bytes <= w.shared_bytes ? w.shared + first : nullptr;
  } else if constexpr (kKind == Kind::kParam) {
    return !store && first < w.parameter_bytes && first + bytes <= w.parameter_bytes
               ? const_cast<uint8_t*>(w.parameters) + first
               : nullptr;
  } else if constexpr (kKind == Kind::kGeneric) {
    if (first < kWindows) return translate<Kind::kGlobal>(w, i, first, bytes, store);
    if (first - kSharedWindow < kWindowBytes)
      return translate<Kind::kShared>(w, i, first - kSharedWindow, bytes, store);
    if (first - kParamWindow < kWindowBytes)
      return translate<Kind::kParam>(w, i, first - kParamWindow, bytes, store);
  }
  return nullptr;  // local memory is never one piece across lanes
}

// All 16 addresses from p[0] on in steps of kStep bytes.
template <class A, uint32_t kStep>
inline bool is_linear(const A* p) {
#ifdef __AVX2__
  const __m256i* v = reinterpret_cast<const __m256i*>(p);
  __m256i diff = _mm256_setzero_si256();
  if constexpr (sizeof(A) == 4) {
    const __m256i first = _mm256_set1_epi32(int(p[0]));
    const __m256i steps = _mm256_setr_epi32(0, kStep, 2 * kStep, 3 * kStep, 4 * kStep, 5 * kStep,
                                            6 * kStep, 7 * kStep);
    const __m256i low = _mm256_add_epi32(first, steps);
    const __m256i high = _mm256_add_epi32(low, _mm256_set1_epi32(8 * kStep));
    diff = _mm256_or_si256(_mm256_xor_si256(v[0], low), _mm256_xor_si256(v[1], high));
  } else {
    __m256i want = _mm256_add_epi64(_mm256_set1_epi64x(int64_t(p[0])),
                                    _mm256_setr_epi64x(0, kStep, 2 * kStep, 3 * kStep));
    for (int k = 0; k < 4; ++k) {
      diff = _mm256_or_si256(diff, _mm256_xor_si256(v[k], want));
      want = _mm256_add_epi64(want, _mm256_set1_epi64x(4 * kStep));
    }
  }
  return _mm256_testz_si256(diff, diff);
#else
  const A first = p[0];
  A diff = 0;
  for (uint32_t l = 0; l < 16; ++l) diff |= p[l] ^ A(first + A(l * kStep));
  return diff == 0;
#endif
}

// The general case: fills `host` for the active lanes of half h; false: a fault was recorded.
template <Kind kKind, class A>
bool resolve_half(Warp& w, Ins i, int h, uint32_t bytes, bool store, uint8_t** host);

// Fills `out` for the active lanes; false: a fault was recorded. `bytes` is a power of two <= 32.
template <Kind kKind, class A>
bool resolve(Warp& w, Ins i, uint32_t bytes, bool store, Resolved& out);

}  // namespace gpupool::simgpu::exec::GPUPOOL_ISA
