// Arithmetic on f16, bf16 and their packed forms: computed in double, rounded once.
#include "simgpu/exec/handlers/half.h"

namespace gpupool::simgpu::exec::GPUPOOL_ISA {
namespace {

template <class H, Op kOp, bool kFtz, bool kSat, bool kNan>
inline uint16_t compute(uint16_t a, uint16_t b, uint16_t c) {
  auto flush16 = [](uint16_t h) {
    return kFtz && (h & H::kExponent) == 0 ? uint16_t(h & 0x8000) : h;
  };
  a = flush16(a);
  b = flush16(b);
  c = flush16(c);
  if constexpr (kOp == Op::kNeg) return a ^ 0x8000;
  if constexpr (kOp == Op::kAbs) return a & 0x7fff;
  const float fa = H::widen(a), fb = H::widen(b);
  uint16_t r;
  if constexpr (kOp == Op::kMin || kOp == Op::kMax) {
    const bool na = fa != fa, nb = fb != fb;
    if ((na && nb) || (kNan && (na || nb))) return 0x7fff;
    if (na) return b;
    if (nb) return a;
    if (fa == fb) return kOp == Op::kMax ? a & b : a | b;
    r = (kOp == Op::kMax) == (fa > fb) ? a : b;
  } else {
    double v;
    if constexpr (kOp == Op::kAdd) v = add_odd(fa, fb);
    if constexpr (kOp == Op::kSub) v = add_odd(fa, -double(fb));
    if constexpr (kOp == Op::kMul) v = double(fa) * fb;
    if constexpr (kOp == Op::kFma) v = add_odd(double(fa) * fb, H::widen(c));
    if constexpr (kOp == Op::kEx2) v = __builtin_exp2(double(fa));
    if constexpr (kOp == Op::kTanh) v = __builtin_tanh(double(fa));
    r = H::template narrow<Round::kNearest>(to_float_odd(v));
  }
  r = flush16(r);
  if constexpr (kSat) {
    const float f = H::widen(r);
    if (!(f > 0)) return 0;
    if (f > 1) return H::kOne;
  }
  return r;
}

template <class H, Op kOp, bool kFtz, bool kSat, bool kNan>
Ins scalar(Warp& w, Ins i) {
  each_lane<uint16_t>(w, i->d, compute<H, kOp, kFtz, kSat, kNan>, row<const uint16_t>(w, i->a),
                      row<const uint16_t>(w, i->b), row<const uint16_t>(w, i->c));
  return i + 1;
}
template <class H, Op kOp, bool kFtz, bool kSat, bool kNan>
Ins packed(Warp& w, Ins i) {
  auto both = [](uint32_t a, uint32_t b, uint32_t c) -> uint32_t {
    const uint32_t lo =
        compute<H, kOp, kFtz, kSat, kNan>(uint16_t(a), uint16_t(b), uint16_t(c));
    const uint32_t hi =
        compute<H, kOp, kFtz, kSat, kNan>(uint16_t(a >> 16), uint16_t(b >> 16), uint16_t(c >> 16));
    return lo | hi << 16;
  };
  each_lane<uint32_t>(w, i->d, both, row<const uint32_t>(w, i->a), row<const uint32_t>(w, i->b),
                      row<const uint32_t>(w, i->c));
  return i + 1;
}
template <class H, Op kOp, bool kFtz, bool kSat, bool kNan>
Handler form(bool two) {
  return two ? packed<H, kOp, kFtz, kSat, kNan> : scalar<H, kOp, kFtz, kSat, kNan>;
}
template <class H, Op kOp>
Handler arithmetic(bool two, FloatMode mode) {
  if (mode.ftz)
    return mode.sat ? form<H, kOp, true, true, false>(two) : form<H, kOp, true, false, false>(two);
  return mode.sat ? form<H, kOp, false, true, false>(two) : form<H, kOp, false, false, false>(two);
}
template <class H, Op kOp>
Handler other(bool two, FloatMode mode) {
  if (mode.sat) return nullptr;
  if (mode.ftz)
    return mode.nan ? form<H, kOp, true, false, true>(two) : form<H, kOp, true, false, false>(two);
  return mode.nan ? form<H, kOp, false, false, true>(two) : form<H, kOp, false, false, false>(two);
}
template <class H>
Handler pick(Op op, bool two, FloatMode mode) {
  switch (op) {
    case Op::kAdd: return arithmetic<H, Op::kAdd>(two, mode);
    case Op::kSub: return arithmetic<H, Op::kSub>(two, mode);
    case Op::kMul: return arithmetic<H, Op::kMul>(two, mode);
    case Op::kFma: return arithmetic<H, Op::kFma>(two, mode);
    case Op::kMin: return other<H, Op::kMin>(two, mode);
    case Op::kMax: return other<H, Op::kMax>(two, mode);
    case Op::kNeg: return other<H, Op::kNeg>(two, mode);
    case Op::kAbs: return other<H, Op::kAbs>(two, mode);
    case Op::kEx2: return other<H, Op::kEx2>(two, mode);
    case Op::kTanh: return other<H, Op::kTanh>(two, mode);
    default: return nullptr;
  }
}

}  // namespace

Handler half_handler(Op op, Type type, FloatMode mode) {
  if (mode.round != Round::kNearest || mode.xorsign) return nullptr;
  switch (type) {
    case Type::kF16: return pick<Half>(op, false, mode);
    case Type::kF16x2: return pick<Half>(op, true, mode);
    case Type::kBf16: return pick<Bfloat>(op, false, mode);
    case Type::kBf16x2: return pick<Bfloat>(op, true, mode);
    default: return nullptr;
  }
}

}  // namespace gpupool::simgpu::exec::GPUPOOL_ISA
