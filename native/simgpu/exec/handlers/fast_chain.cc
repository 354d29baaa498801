// Sums of products whose factors come straight from memory: the inner loop of every matrix product.
#include "simgpu/exec/handlers/fast_memory.h"

namespace gpupool::simgpu::exec::GPUPOOL_ISA {
namespace {

// Sixteen lanes. In vectors by hand: the sums are to stay in registers from product to product.
#ifdef __FMA__
template <class T>
struct Lanes;
template <>
struct Lanes<float> {
  __m256 v[2];
  static __m256 flushed(__m256 x) {
    const __m256i u = _mm256_castps_si256(x);
    const __m256i zero = _mm256_cmpeq_epi32(_mm256_and_si256(u, _mm256_set1_epi32(0x7f800000)),
                                            _mm256_setzero_si256());
    const __m256i sign = _mm256_and_si256(u, _mm256_set1_epi32(INT32_MIN));
    return _mm256_castsi256_ps(_mm256_blendv_epi8(u, sign, zero));
  }
  template <bool kFtz, bool kOne>
  void load(const float* p) {
    for (int k = 0; k < 2; ++k) {
      v[k] = kOne ? _mm256_broadcast_ss(p) : _mm256_loadu_ps(p + 8 * k);
      if (kFtz) v[k] = flushed(v[k]);
    }
  }
  template <bool kFtz>
  void add_product(const Lanes& a, const Lanes& b) {
    for (int k = 0; k < 2; ++k) {
      v[k] = _mm256_fmadd_ps(a.v[k], b.v[k], v[k]);
      if (kFtz) v[k] = flushed(v[k]);
    }
  }
  void store(float* p) const {
    for (int k = 0; k < 2; ++k) _mm256_storeu_ps(p + 8 * k, v[k]);
  }
};
template <>
struct Lanes<double> {
  __m256d v[4];
  template <bool kFtz, bool kOne>
  void load(const double* p) {
    for (int k = 0; k < 4; ++k) v[k] = kOne ? _mm256_broadcast_sd(p) : _mm256_loadu_pd(p + 4 * k);
  }
  template <bool kFtz>
  void add_product(const Lanes& a, const Lanes& b) {
    for (int k = 0; k < 4; ++k) v[k] = _mm256_fmadd_pd(a.v[k], b.v[k], v[k]);
  }
  void store(double* p) const {
    for (int k = 0; k < 4; ++k) _mm256_storeu_pd(p + 4 * k, v[k]);
  }
};
#else
inline float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }
template <class T>
struct Lanes {
  T v[16];
  template <bool kFtz, bool kOne>
  void load(const T* p) {
    for (int l = 0; l < 16; ++l) v[l] = in<kFtz>(p[kOne ? 0 : l]);
  }
  template <bool kFtz>
  void add_product(const Lanes& a, const Lanes& b) {
    for (int l = 0; l < 16; ++l) v[l] = in<kFtz>(fused(a.v[l], b.v[l], v[l]));
  }
  void store(T* p) const {
    for (int l = 0; l < 16; ++l) p[l] = v[l];
  }
};
#endif

// One half of a warp. A stream is read either at one address for all lanes or lane after lane.
// A NaN may travel through the sums unchanged: it becomes the canonical one at the end.
template <class T, bool kFtz, bool kOne0, bool kOne1>
inline void half_chain(Ins i, const uint8_t* x, const uint8_t* y, const T* from, T* to,
                       uint32_t count) {
  Lanes<T> sum;
  sum.template load<kFtz, false>(from);
  for (uint32_t k = 0; k < count; ++k, i += 3) {
    Lanes<T> a, b;
    a.template load<kFtz, kOne0>(reinterpret_cast<const T*>(x + i[0].immediate));
    b.template load<kFtz, kOne1>(reinterpret_cast<const T*>(y + i[1].immediate));
    sum.template add_product<kFtz>(a, b);
  }
  sum.store(to);
#pragma GCC ivdep
  for (int l = 0; l < 16; ++l) to[l] = canonical(to[l]);
}

template <class T, bool kFtz, Kind kKind0, class A0, Kind kKind1, class A1>
Ins multiply_chain(Warp& w, Ins i) {
  if (w.mask != kAllLanes) return i[2].inner(w, i);
  const uint32_t count = i->count;
  Ins j = i + 1, last = i + 3 * count - 1;
  const AddressPattern& p = pattern_of<A0>(w, i);
  const AddressPattern& q = pattern_of<A1>(w, j);
  // The lowest and highest offsets of the two streams are kept in the first fma.
  const Instruction& f = i[2];
  const int64_t low0 = int32_t(f.immediate), high0 = f.immediate >> 32;
  const int64_t low1 = f.target, high1 = int32_t(f.e);
  uint64_t base0, base1;
  const auto whole = [](const AddressPattern& a) {
    return (a.step[0] == 0 || a.step[0] == int64_t(sizeof(T))) &&
           (a.step[1] == 0 || a.step[1] == int64_t(sizeof(T)));
  };
  if (!whole(p) || !whole(q) ||
      !find_base<kKind0, A0>(w, i, p, low0, high0, sizeof(T), false, &base0) ||
      !find_base<kKind1, A1>(w, j, q, low1, high1, sizeof(T), false, &base1))
    return i[2].inner(w, i);
  for (int h = 0; h < 2; ++h) {
    const auto* x = reinterpret_cast<const uint8_t*>(base0 + A0(p.lowest + uint64_t(low0)) -
                                                     uint64_t(low0) + (p.first[h] - p.lowest));
    const auto* y = reinterpret_cast<const uint8_t*>(base1 + A1(q.lowest + uint64_t(low1)) -
                                                     uint64_t(low1) + (q.first[h] - q.lowest));
    const T* from = row<const T>(w, f.c) + 16 * h;
    T* to = row<T>(w, last->d) + 16 * h;
    if (p.step[h]) {
      if (q.step[h])
        half_chain<T, kFtz, false, false>(i, x, y, from, to, count);
      else
        half_chain<T, kFtz, false, true>(i, x, y, from, to, count);
    } else if (q.step[h]) {
      half_chain<T, kFtz, true, false>(i, x, y, from, to, count);
    } else {
      half_chain<T, kFtz, true, true>(i, x, y, from, to, count);
    }
  }
  return last + 1;
}

template <class T, bool kFtz, Kind kKind0, class A0>
Handler second_access(Access second) {
  switch (second) {
    case Access::kGlobal:
      return multiply_chain<T, kFtz, kKind0, A0, Kind::kGlobal, uint64_t>;
    case Access::kShared32:
      return multiply_chain<T, kFtz, kKind0, A0, Kind::kShared, uint32_t>;
    default:
      return nullptr;
  }
}
template <class T, bool kFtz>
Handler first_access(Access first, Access second) {
  switch (first) {
    case Access::kGlobal:
      return second_access<T, kFtz, Kind::kGlobal, uint64_t>(second);
    case Access::kShared32:
      return second_access<T, kFtz, Kind::kShared, uint32_t>(second);
    default:
      return nullptr;
  }
}

}  // namespace

Handler multiply_chain_handler(Access first, Access second, Type type, bool ftz) {
  if (type == Type::kF32)
    return ftz ? first_access<float, true>(first, second)
               : first_access<float, false>(first, second);
  return type == Type::kF64 && !ftz ? first_access<double, false>(first, second) : nullptr;
}

}  // namespace gpupool::simgpu::exec::GPUPOOL_ISA
