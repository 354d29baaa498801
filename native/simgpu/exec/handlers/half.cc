// Arithmetic on f16, bf16 and their packed forms: computed in double, rounded once.
#include "simgpu/exec/handlers/half.h"

namespace gpupool::simgpu::exec::GPUPOOL_ISA {
namespace {

// Flags in Instruction::immediate.
constexpr uint32_t kFlagFtz = 1, kFlagSat = 2, kFlagNan = 4, kFlagXorsign = 8, kFlagRelu = 16;

template <class H, Op kOp>
inline uint16_t compute(uint32_t flags, uint16_t a, uint16_t b, uint16_t c) {
  auto flush16 = [flags](uint16_t h) {
    return (flags & kFlagFtz) && (h & H::kExponent) == 0 ? uint16_t(h & 0x8000) : h;
  };
  a = flush16(a);
  if constexpr (kOp == Op::kNeg) return a ^ 0x8000;
  if constexpr (kOp == Op::kAbs) return a & 0x7fff;
  b = flush16(b);
  c = flush16(c);
  const uint16_t sign = (a ^ b) & 0x8000;
  constexpr bool kExtreme = kOp == Op::kMin || kOp == Op::kMax;
  if (kExtreme && (flags & kFlagXorsign)) {
    a &= 0x7fff;
    b &= 0x7fff;
  }
  const float fa = H::widen(a), fb = H::widen(b);
  uint16_t r;
  if constexpr (kExtreme) {
    const bool na = fa != fa, nb = fb != fb;
    if ((na && nb) || ((flags & kFlagNan) && (na || nb))) return 0x7fff;
    if (na || nb)
      r = na ? b : a;
    else if (fa == fb)
      r = kOp == Op::kMax ? a & b : a | b;
    else
      r = (kOp == Op::kMax) == (fa > fb) ? a : b;
    if (flags & kFlagXorsign) r = uint16_t((r & 0x7fff) | sign);
    return r;
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
  if (flags & kFlagSat) {
    const float f = H::widen(r);
    if (!(f > 0)) return 0;
    if (f > 1) return H::kOne;
  }
  if ((flags & kFlagRelu) && (r & 0x8000)) return 0;
  return r;
}

template <class H, Op kOp>
Ins scalar(Warp& w, Ins i) {
  const uint32_t flags = uint32_t(i->immediate);
  each_lane<uint16_t>(
      w, i->d,
      [flags](uint16_t a, uint16_t b, uint16_t c) { return compute<H, kOp>(flags, a, b, c); },
      row<const uint16_t>(w, i->a), row<const uint16_t>(w, i->b), row<const uint16_t>(w, i->c));
  return i + 1;
}
template <class H, Op kOp>
Ins packed(Warp& w, Ins i) {
  const uint32_t flags = uint32_t(i->immediate);
  auto both = [flags](uint32_t a, uint32_t b, uint32_t c) -> uint32_t {
    uint32_t r = 0;
    for (int shift = 0; shift < 32; shift += 16)
      r |= uint32_t(compute<H, kOp>(flags, uint16_t(a >> shift), uint16_t(b >> shift),
                                    uint16_t(c >> shift)))
           << shift;
    return r;
  };
  each_lane<uint32_t>(w, i->d, both, row<const uint32_t>(w, i->a), row<const uint32_t>(w, i->b),
                      row<const uint32_t>(w, i->c));
  return i + 1;
}
template <class H, Op kOp>
Handler form(bool two) {
  return two ? packed<H, kOp> : scalar<H, kOp>;
}
template <class H>
Handler pick(Op op, bool two) {
  switch (op) {
    case Op::kAdd:
      return form<H, Op::kAdd>(two);
    case Op::kSub:
      return form<H, Op::kSub>(two);
    case Op::kMul:
      return form<H, Op::kMul>(two);
    case Op::kFma:
      return form<H, Op::kFma>(two);
    case Op::kMin:
      return form<H, Op::kMin>(two);
    case Op::kMax:
      return form<H, Op::kMax>(two);
    case Op::kNeg:
      return form<H, Op::kNeg>(two);
    case Op::kAbs:
      return form<H, Op::kAbs>(two);
    case Op::kEx2:
      return form<H, Op::kEx2>(two);
    case Op::kTanh:
      return form<H, Op::kTanh>(two);
    default:
      return nullptr;
  }
}

}  // namespace

Handler half_handler(Op op, Type type, FloatMode mode) {
  const bool extreme = op == Op::kMin || op == Op::kMax;
  const bool computes = op == Op::kAdd || op == Op::kSub || op == Op::kMul || op == Op::kFma;
  if (mode.round != Round::kNearest || ((mode.nan || mode.xorsign) && !extreme) ||
      (mode.sat && !computes))
    return nullptr;
  switch (type) {
    case Type::kF16:
      return pick<Half>(op, false);
    case Type::kF16x2:
      return pick<Half>(op, true);
    case Type::kBf16:
      return pick<Bfloat>(op, false);
    case Type::kBf16x2:
      return pick<Bfloat>(op, true);
    default:
      return nullptr;
  }
}

}  // namespace gpupool::simgpu::exec::GPUPOOL_ISA
