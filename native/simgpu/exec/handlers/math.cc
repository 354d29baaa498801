// Division, roots and the approximate functions. The approximate ones are computed in double and
// rounded once, so they are within one ulp of the exact value, inside the bounds of the PTX ISA.
#include "simgpu/exec/handlers/rows.h"

namespace gpupool::simgpu::exec::GPUPOOL_ISA {
namespace {

template <class T, bool kFtz>
struct Div {
  T operator()(T a, T b) const { return out<kFtz, false>(in<kFtz>(a) / in<kFtz>(b)); }
};
// a * (1/b), where the reciprocal of a divisor above 2^126 is a zero: then the quotient is one too,
// or NaN of an infinity.
template <bool kFtz>
struct DivApprox {
  float operator()(float a, float b) const {
    const float x = in<kFtz>(a), y = in<kFtz>(b);
    const uint32_t u = bits_as<uint32_t>(y), magnitude = u & 0x7fffffffu;
    const bool huge = magnitude > 0x7e800000u && magnitude < 0x7f800000u;
    const float by_zero = x * bits_as<float>(u & 0x80000000u);
    return out<kFtz, false>(huge ? by_zero : x / y);
  }
};
template <class T, bool kFtz>
struct Rcp {
  T operator()(T a) const { return out<kFtz, false>(T(1) / in<kFtz>(a)); }
};
inline float root(float x) { return __builtin_sqrtf(x); }
inline double root(double x) { return __builtin_sqrt(x); }
template <class T, bool kFtz>
struct Sqrt {
  T operator()(T a) const { return out<kFtz, false>(root(in<kFtz>(a))); }
};
template <bool kFtz>
struct Rsqrt {
  float operator()(float a) const {
    return out<kFtz, false>(1.0f / __builtin_sqrtf(in<kFtz>(a)));  // two roundings: below 1 ulp
  }
};
struct RsqrtDouble {
  double operator()(double a) const { return 1.0 / __builtin_sqrt(a); }
};
// rcp/rsqrt.approx.ftz.f64: only the upper 32 bits of operand and result count.
inline double upper_half(double x) {
  return bits_as<double>(bits_as<uint64_t>(x) & 0xffffffff00000000ull);
}
inline double flush_double(double x) {
  const uint64_t u = bits_as<uint64_t>(x);
  return bits_as<double>((u & 0x7ff0000000000000ull) ? u : (u & 0x8000000000000000ull));
}
struct RcpApproxDouble {
  double operator()(double a) const {
    const double r = upper_half(flush_double(1.0 / flush_double(upper_half(a))));
    return r != r ? bits_as<double>(uint64_t{0x7fffffff00000000}) : r;
  }
};
struct RsqrtApproxDouble {
  double operator()(double a) const {
    const double r = upper_half(flush_double(1.0 / __builtin_sqrt(flush_double(upper_half(a)))));
    return r != r ? bits_as<double>(uint64_t{0x7fffffff00000000}) : r;
  }
};

constexpr double kRoundMagic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer

// 2^x for |x| < 1100: the integer part goes to the exponent, the rest (|f| <= 1/2) to a polynomial.
inline double exp2_core(double x) {
  const double shifted = x + kRoundMagic;
  const double whole = shifted - kRoundMagic;
  const double f = x - whole;
  double p = 1.32154867901443e-06 / 1.0;
  p = p * f + 1.5252733804059841e-05;
  p = p * f + 0.00015403530393381609;
  p = p * f + 0.0013333558146428443;
  p = p * f + 0.0096181291076284772;
  p = p * f + 0.055504108664821580;
  p = p * f + 0.24022650695910072;
  p = p * f + 0.69314718055994531;
  p = p * f + 1.0;
  const int64_t k = bits_as<int64_t>(shifted) << 52;  // the integer, from the low bits
  return bits_as<double>(bits_as<int64_t>(p) + k);
}
template <bool kFtz>
struct Ex2 {
  float operator()(float a) const {
    const double x = in<kFtz>(a);
    double c = x < 200.0 ? x : 200.0;
    c = c > -200.0 ? c : -200.0;
    const float r = float(exp2_core(c));
    return out<kFtz, false>(x != x ? float(x) : r);
  }
};

// log2 of a positive, finite, normal double.
inline double log2_core(double x) {
  const uint64_t u = bits_as<uint64_t>(x);
  // Mantissa into [sqrt(1/2), sqrt(2)).
  const uint64_t shifted = u - 0x3fe6a09e667f3bcdull;
  const int64_t e = int64_t(shifted) >> 52;
  const double m = bits_as<double>(u - (uint64_t(e) << 52));
  const double s = (m - 1.0) / (m + 1.0);
  const double z = s * s;
  double p = 2.0 / 15;
  p = p * z + 2.0 / 13;
  p = p * z + 2.0 / 11;
  p = p * z + 2.0 / 9;
  p = p * z + 2.0 / 7;
  p = p * z + 2.0 / 5;
  p = p * z + 2.0 / 3;
  p = p * z + 2.0;
  return double(e) + s * p * 1.4426950408889634;
}
template <bool kFtz>
struct Lg2 {
  float operator()(float a) const {
    const float x = in<kFtz>(a);
    const float inf = std::numeric_limits<float>::infinity();
    const bool ordinary = x > 0.0f && x < inf;
    const float r = float(log2_core(double(ordinary ? x : 1.0f)));
    const float zero = x == 0.0f ? -inf : x;  // +inf and NaN stay
    const float special = x < 0.0f ? bits_as<float>(uint32_t{0x7fffffff}) : zero;
    return out<kFtz, false>(ordinary ? r : special);
  }
};

// sin and cos of a multiple of pi/2 taken off in double; exact enough for |x| < 2^40.
template <bool kCos>
inline double circular(double x) {
  const double shifted = x * 0.63661977236758134308 + kRoundMagic;
  const double n = shifted - kRoundMagic;
  double r = x - n * 1.5707963267341256e+00;
  r = r - n * 6.0771005065061922e-11;
  const int64_t quadrant = bits_as<int64_t>(shifted) + (kCos ? 1 : 0);
  const double z = r * r;
  double s = 1.5896230157654656e-10;
  s = s * z + -2.5050747762857807e-08;
  s = s * z + 2.7557313621385722e-06;
  s = s * z + -1.9841269829589539e-04;
  s = s * z + 8.3333333333221186e-03;
  s = s * z + -1.6666666666666630e-01;
  s = r + r * z * s;
  double c = 2.08757008419747316778e-09;
  c = c * z + -2.75573141792967388112e-07;
  c = c * z + 2.48015872888517045348e-05;
  c = c * z + -1.38888888888730564116e-03;
  c = c * z + 4.16666666666665929218e-02;
  c = 1.0 - 0.5 * z + z * z * c;
  const double v = (quadrant & 1) ? c : s;
  return (quadrant & 2) ? -v : v;
}
template <bool kFtz, bool kCos>
struct Circular {
  float operator()(float a) const {
    const float x = in<kFtz>(a);
    const float inf = std::numeric_limits<float>::infinity();
    const bool finite = x < inf && x > -inf;
    float v = float(circular<kCos>(double(finite ? x : 0.0f)));
    v = v > 1.0f ? 1.0f : v;  // arguments too large for the reduction
    v = v < -1.0f ? -1.0f : v;
    const float r = !kCos && x == 0.0f ? x : v;
    return out<kFtz, false>(finite ? r : bits_as<float>(uint32_t{0x7fffffff}));
  }
};
struct Tanh {
  float operator()(float a) const {
    const double x = a;
    double c = x < 20.0 ? x : 20.0;
    c = c > -20.0 ? c : -20.0;
    const double t = exp2_core(c * 2.8853900817779268);
    const double big = (t - 1.0) / (t + 1.0);
    const double small = x * (1.0 - x * x * (1.0 / 3));
    double r = (x < 1e-3 && x > -1e-3) ? small : big;
    r = x != x ? x : r;
    return canonical(a == 0.0f ? a : float(r));
  }
};

template <class T, bool kFtz>
Handler exact(Op op, Round round) {
  switch (op) {
    case Op::kDiv:
      return with_rounding<binary<T, T, T, Div<T, kFtz>>>(round);
    case Op::kRcp:
      return with_rounding<unary<T, T, Rcp<T, kFtz>>>(round);
    case Op::kSqrt:
      return with_rounding<unary<T, T, Sqrt<T, kFtz>>>(round);
    default:
      return nullptr;
  }
}

template <bool kFtz>
Handler approximate(Op op) {
  switch (op) {
    case Op::kDiv:
      return binary<float, float, float, DivApprox<kFtz>>;
    case Op::kRcp:
      return unary<float, float, Rcp<float, kFtz>>;
    case Op::kSqrt:
      return unary<float, float, Sqrt<float, kFtz>>;
    case Op::kRsqrt:
      return unary<float, float, Rsqrt<kFtz>>;
    case Op::kEx2:
      return unary<float, float, Ex2<kFtz>>;
    case Op::kLg2:
      return unary<float, float, Lg2<kFtz>>;
    case Op::kSin:
      return unary<float, float, Circular<kFtz, false>>;
    case Op::kCos:
      return unary<float, float, Circular<kFtz, true>>;
    default:
      return nullptr;
  }
}

}  // namespace

Handler math_handler(Op op, Type type, FloatMode mode, bool approx) {
  if (mode.sat || mode.nan || mode.xorsign) return nullptr;
  if (type == Type::kF64) {
    if (!approx) return mode.ftz ? nullptr : exact<double, false>(op, mode.round);
    if (op == Op::kRcp && mode.ftz) return unary<double, double, RcpApproxDouble>;
    if (op == Op::kRsqrt && mode.ftz) return unary<double, double, RsqrtApproxDouble>;
    if (op == Op::kRsqrt) return unary<double, double, RsqrtDouble>;
    return nullptr;
  }
  if (type != Type::kF32) return nullptr;
  if (!approx)
    return mode.ftz ? exact<float, true>(op, mode.round) : exact<float, false>(op, mode.round);
  if (op == Op::kTanh) return mode.ftz ? nullptr : unary<float, float, Tanh>;
  return mode.ftz ? approximate<true>(op) : approximate<false>(op);
}

}  // namespace gpupool::simgpu::exec::GPUPOOL_ISA
