// Two f32 instructions of which only the second result is wanted: the first stays in registers.
#include "simgpu/exec/fast_set.h"
#include "simgpu/exec/handlers/rows.h"

namespace gpupool::simgpu::exec::GPUPOOL_ISA {
namespace {

template <Op kFirst>
inline float first_of(float a, float b, float c) {
  switch (kFirst) {
    case Op::kAdd:
      return a + b;
    case Op::kSub:
      return a - b;
    case Op::kMul:
      return a * b;
    default:
      return __builtin_fmaf(a, b, c);
  }
}
template <Second kSecond>
inline float second_of(float x, float p, float q) {
  switch (kSecond) {
    case Second::kAdd:
      return x + p;
    case Second::kSubtract:
      return x - p;
    case Second::kSubtractFrom:
      return p - x;
    case Second::kMultiply:
      return x * p;
    case Second::kFactor:
      return __builtin_fmaf(x, p, q);
    default:
      return __builtin_fmaf(p, q, x);
  }
}

template <Op kFirst, Second kSecond, bool kRaw>
Ins pair(Warp& w, Ins i) {
  constexpr bool kThree = kFirst == Op::kFma;
  constexpr bool kTwoMore = kSecond == Second::kFactor || kSecond == Second::kAddend;
  const float* a = row<const float>(w, i->a);
  const float* b = row<const float>(w, i->b);
  const float* c = kThree ? row<const float>(w, i->c) : a;
  const float* p = row<const float>(w, i->e);
  const float* q = kTwoMore ? row<const float>(w, i->guard) : a;
  float* d = row<float>(w, i[1].d);
  const auto value = [&](int l) {
    const float r = second_of<kSecond>(first_of<kFirst>(a[l], b[l], kThree ? c[l] : 0), p[l],
                                       kTwoMore ? q[l] : 0);
    return kRaw ? r : canonical(r);
  };
  if (w.full || i->target) {
#pragma GCC ivdep
    for (int l = 0; l < kLanes; ++l) d[l] = value(l);
  } else {
    const int32_t* m = lane_words<4>(w);
#pragma GCC ivdep
    for (int l = 0; l < kLanes; ++l) {
      const float r = value(l);
      d[l] = m[l] ? r : d[l];
    }
  }
  return i + 2;
}

template <Op kFirst, Second kSecond>
Handler raw_form(bool raw) {
  return raw ? pair<kFirst, kSecond, true> : pair<kFirst, kSecond, false>;
}
template <Op kFirst>
Handler second_form(Second second, bool raw) {
  switch (second) {
    case Second::kAdd:
      return raw_form<kFirst, Second::kAdd>(raw);
    case Second::kSubtract:
      return raw_form<kFirst, Second::kSubtract>(raw);
    case Second::kSubtractFrom:
      return raw_form<kFirst, Second::kSubtractFrom>(raw);
    case Second::kMultiply:
      return raw_form<kFirst, Second::kMultiply>(raw);
    case Second::kFactor:
      return raw_form<kFirst, Second::kFactor>(raw);
    case Second::kAddend:
      return raw_form<kFirst, Second::kAddend>(raw);
    default:
      return nullptr;
  }
}

}  // namespace

Handler pair_handler(Op first, Second second, bool raw) {
  switch (first) {
    case Op::kAdd:
      return second_form<Op::kAdd>(second, raw);
    case Op::kSub:
      return second_form<Op::kSub>(second, raw);
    case Op::kMul:
      return second_form<Op::kMul>(second, raw);
    case Op::kFma:
      return second_form<Op::kFma>(second, raw);
    default:
      return nullptr;
  }
}

}  // namespace gpupool::simgpu::exec::GPUPOOL_ISA
