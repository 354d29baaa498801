// f32 and f64 arithmetic: add sub mul fma mad min max neg abs copysign, with rounding, .ftz, .sat.
#include "simgpu/exec/handlers/rows.h"

namespace gpupool::simgpu::exec::GPUPOOL_ISA {
namespace {

template <class T, bool kFtz, bool kSat>
struct Add {
  T operator()(T a, T b) const { return out<kFtz, kSat>(in<kFtz>(a) + in<kFtz>(b)); }
};
template <class T, bool kFtz, bool kSat>
struct Sub {
  T operator()(T a, T b) const { return out<kFtz, kSat>(in<kFtz>(a) - in<kFtz>(b)); }
};
template <class T, bool kFtz, bool kSat>
struct Mul {
  T operator()(T a, T b) const { return out<kFtz, kSat>(in<kFtz>(a) * in<kFtz>(b)); }
};
inline float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }
template <class T, bool kFtz, bool kSat>
struct Fma {
  T operator()(T a, T b, T c) const {
    return out<kFtz, kSat>(fused(in<kFtz>(a), in<kFtz>(b), in<kFtz>(c)));
  }
};

template <class T>
using BitsOf = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
template <class T>
constexpr BitsOf<T> kSign = BitsOf<T>(1) << (8 * sizeof(T) - 1);

template <class T, bool kFtz>
struct Neg {
  T operator()(T a) const { return bits_as<T>(bits_as<BitsOf<T>>(in<kFtz>(a)) ^ kSign<T>); }
};
template <class T, bool kFtz>
struct Abs {
  T operator()(T a) const { return bits_as<T>(bits_as<BitsOf<T>>(in<kFtz>(a)) & ~kSign<T>); }
};
template <class T>
struct Copysign {  // the sign of a, the rest of b
  T operator()(T a, T b) const {
    return bits_as<T>((bits_as<BitsOf<T>>(a) & kSign<T>) | (bits_as<BitsOf<T>>(b) & ~kSign<T>));
  }
};

// A NaN loses against a number unless .NaN; -0 is less than +0.
template <class T, bool kFtz, bool kNan, bool kXorsign, bool kMax>
struct Extreme {
  T operator()(T x, T y) const {
    using B = BitsOf<T>;
    const T a0 = in<kFtz>(x), b0 = in<kFtz>(y);
    T a = a0, b = b0;
    if constexpr (kXorsign) {
      a = bits_as<T>(bits_as<B>(a0) & ~kSign<T>);
      b = bits_as<T>(bits_as<B>(b0) & ~kSign<T>);
    }
    const B ua = bits_as<B>(a), ub = bits_as<B>(b);
    const T equal = bits_as<T>(kMax ? ua & ub : ua | ub);  // +0 and -0
    T r = kMax ? (a > b ? a : b) : (a < b ? a : b);        // b if unordered
    r = a == b ? equal : r;
    if constexpr (kNan) {
      r = a != a ? a : r;
      r = b != b ? b : r;
    } else {
      r = b != b ? a : r;
    }
    if constexpr (kXorsign) {
      const B sign = (bits_as<B>(a0) ^ bits_as<B>(b0)) & kSign<T>;
      const T with = bits_as<T>((bits_as<B>(r) & ~kSign<T>) | sign);
      r = r != r ? r : with;
    }
    return canonical(r);
  }
};

template <class T, bool kFtz, bool kSat>
Handler arithmetic(Op op, Round round) {
  switch (op) {
    case Op::kAdd:
      return with_rounding<binary<T, T, T, Add<T, kFtz, kSat>>>(round);
    case Op::kSub:
      return with_rounding<binary<T, T, T, Sub<T, kFtz, kSat>>>(round);
    case Op::kMul:
      return with_rounding<binary<T, T, T, Mul<T, kFtz, kSat>>>(round);
    case Op::kFma:
    case Op::kMad:
      return with_rounding<ternary<T, T, T, T, Fma<T, kFtz, kSat>>>(round);
    default:
      return nullptr;
  }
}

template <class T, bool kFtz, bool kMax>
Handler extreme(FloatMode mode) {
  if (mode.nan)
    return mode.xorsign ? binary<T, T, T, Extreme<T, kFtz, true, true, kMax>>
                        : binary<T, T, T, Extreme<T, kFtz, true, false, kMax>>;
  return mode.xorsign ? binary<T, T, T, Extreme<T, kFtz, false, true, kMax>>
                      : binary<T, T, T, Extreme<T, kFtz, false, false, kMax>>;
}

template <class T, bool kFtz>
Handler others(Op op, FloatMode mode) {
  switch (op) {
    case Op::kMin:
      return extreme<T, kFtz, false>(mode);
    case Op::kMax:
      return extreme<T, kFtz, true>(mode);
    case Op::kNeg:
      return unary<T, T, Neg<T, kFtz>>;
    case Op::kAbs:
      return unary<T, T, Abs<T, kFtz>>;
    case Op::kCopysign:
      return binary<T, T, T, Copysign<T>>;
    default:
      return nullptr;
  }
}

}  // namespace

Handler double_handler(Op op, FloatMode mode) {
  if (mode.ftz) return nullptr;
  Handler h = mode.sat ? arithmetic<double, false, true>(op, mode.round)
                       : arithmetic<double, false, false>(op, mode.round);
  if (h) return h;
  return mode.sat ? nullptr : others<double, false>(op, mode);
}

Handler floating_handler(Op op, Type type, FloatMode mode) {
  if (type == Type::kF64) return double_handler(op, mode);
  if (type != Type::kF32) return nullptr;
  Handler h;
  if (mode.ftz)
    h = mode.sat ? arithmetic<float, true, true>(op, mode.round)
                 : arithmetic<float, true, false>(op, mode.round);
  else
    h = mode.sat ? arithmetic<float, false, true>(op, mode.round)
                 : arithmetic<float, false, false>(op, mode.round);
  if (h) return h;
  if (mode.sat) return nullptr;
  return mode.ftz ? others<float, true>(op, mode) : others<float, false>(op, mode);
}

}  // namespace gpupool::simgpu::exec::GPUPOOL_ISA
