// cvt: integers of natural width (8 and 16 bit ones come as 32-bit rows) and floats.
#include "simgpu/exec/handlers/half.h"

namespace gpupool::simgpu::exec::GPUPOOL_ISA {
namespace {

// ---- widening of integers; also how a narrow result gets into a wider register ----
template <class From, class T, class To>
struct Extend {
  To operator()(From a) const { return To(T(a)); }
};
template <class From, class T>
Handler extend_to(uint32_t to) {
  switch (to) {
    case 2:
      return unary<uint16_t, From, Extend<From, T, uint16_t>>;
    case 4:
      return unary<uint32_t, From, Extend<From, T, uint32_t>>;
    case 8:
      return unary<uint64_t, From, Extend<From, T, uint64_t>>;
    default:
      return nullptr;
  }
}
template <class From>
Handler extend_as(Type type, uint32_t to) {
  switch (type) {
    case Type::kU8:
    case Type::kB8:
      return extend_to<From, uint8_t>(to);
    case Type::kS8:
      return extend_to<From, int8_t>(to);
    case Type::kU16:
    case Type::kB16:
      return extend_to<From, uint16_t>(to);
    case Type::kS16:
      return extend_to<From, int16_t>(to);
    case Type::kU32:
    case Type::kB32:
      return extend_to<From, uint32_t>(to);
    case Type::kS32:
      return extend_to<From, int32_t>(to);
    case Type::kU64:
    case Type::kB64:
    case Type::kS64:
      return extend_to<From, uint64_t>(to);
    default:
      return nullptr;
  }
}

template <class T>
struct ClampSigned {
  int64_t operator()(int64_t v) const {
    if constexpr (std::is_same_v<T, uint64_t>) return v < 0 ? 0 : v;
    const int64_t lo = int64_t(std::numeric_limits<T>::min());
    const int64_t hi =
        std::is_same_v<T, uint64_t> ? INT64_MAX : int64_t(std::numeric_limits<T>::max());
    return v < lo ? lo : v > hi ? hi : v;
  }
};
template <class T>
struct ClampUnsigned {
  uint64_t operator()(uint64_t v) const {
    const uint64_t hi = uint64_t(std::numeric_limits<T>::max());
    return v > hi ? hi : v;
  }
};

// ---- float to integer ----
enum class Rint { kNearest, kZero, kDown, kUp };
template <Rint kRint>
inline double to_integral(double x) {
  if constexpr (kRint == Rint::kNearest) return __builtin_rint(x);
  if constexpr (kRint == Rint::kZero) return __builtin_trunc(x);
  if constexpr (kRint == Rint::kDown) return __builtin_floor(x);
  return __builtin_ceil(x);
}
template <class From, class To, bool kFtz>
struct ToInteger {
  auto operator()(From a) const {
    const double x = in<kFtz>(a);
    const double r = __builtin_trunc(x);
    if constexpr (sizeof(To) == 8) {
      constexpr To kNan = To(uint64_t(1) << 63);
      if (x != x) return kNan;
      if constexpr (std::is_signed_v<To>) {
        if (r >= 9223372036854775808.0) return To(INT64_MAX);
        if (r < -9223372036854775808.0) return To(INT64_MIN);
        return To(r);
      } else {
        if (r <= 0) return To(0);
        if (r >= 18446744073709551616.0) return To(~uint64_t(0));
        return To(r);
      }
    } else {
      constexpr bool kDouble = std::is_same_v<From, double>;
      const double lo = double(std::numeric_limits<To>::min());
      const double hi = double(std::numeric_limits<To>::max());
      double c = r > lo ? r : lo;
      c = c < hi ? c : hi;
      // NaN: 0 from f32; from f64 the type's top bit.
      c = x != x ? 0.0 : c;
      uint32_t v;
      if constexpr (std::is_same_v<To, uint32_t>)
        v = uint32_t(int32_t(c - 2147483648.0)) ^ 0x80000000u;
      else
        v = uint32_t(int32_t(c));
      if constexpr (kDouble) v = x != x ? uint32_t(1) << (8 * sizeof(To) - 1) : v;
      return v;
    }
  }
};

template <class From, class To>
Handler to_integer(bool ftz) {
  using D = std::conditional_t<sizeof(To) == 8, To, uint32_t>;
  constexpr bool kSlow = sizeof(To) == 8;
  if constexpr (std::is_same_v<From, double>) {
    if (ftz) return nullptr;
    if constexpr (kSlow) return unary_slow<D, From, ToInteger<From, To, false>>;
    return unary<D, From, ToInteger<From, To, false>>;
  } else {
    if constexpr (kSlow)
      return ftz ? unary_slow<D, From, ToInteger<From, To, true>>
                 : unary_slow<D, From, ToInteger<From, To, false>>;
    return ftz ? unary<D, From, ToInteger<From, To, true>>
               : unary<D, From, ToInteger<From, To, false>>;
  }
}
template <class From>
Handler from_float(Type to, bool ftz) {
  switch (to) {
    case Type::kU8:
      return to_integer<From, uint8_t>(ftz);
    case Type::kS8:
      return to_integer<From, int8_t>(ftz);
    case Type::kU16:
      return to_integer<From, uint16_t>(ftz);
    case Type::kS16:
      return to_integer<From, int16_t>(ftz);
    case Type::kU32:
      return to_integer<From, uint32_t>(ftz);
    case Type::kS32:
      return to_integer<From, int32_t>(ftz);
    case Type::kU64:
      return to_integer<From, uint64_t>(ftz);
    case Type::kS64:
      return to_integer<From, int64_t>(ftz);
    default:
      return nullptr;
  }
}

// ---- integer to float ----
template <class From, class To>
struct FromInteger {
  To operator()(From a) const {
    To r;
    if constexpr (std::is_same_v<From, uint32_t>)
      // Exact before the last rounding; but rounding down makes 0 a -0.
      r = To(__builtin_fabs(double(int32_t(a ^ 0x80000000u)) + 2147483648.0));
    else
      r = To(a);
    return r;
  }
};
bool rounding_of(Mod m, Round* round) {
  switch (m) {
    case Mod::kUnknown:
    case Mod::kRn:
      *round = Round::kNearest;
      return true;
    case Mod::kRz:
      *round = Round::kZero;
      return true;
    case Mod::kRm:
      *round = Round::kDown;
      return true;
    case Mod::kRp:
      *round = Round::kUp;
      return true;
    default:
      return false;
  }
}
template <class From, class To>
Handler from_integer_to(Round round) {
  if constexpr (sizeof(From) == 8)
    return with_rounding<unary_slow<To, From, FromInteger<From, To>>>(round);
  return with_rounding<unary<To, From, FromInteger<From, To>>>(round);
}
template <class To>
Handler from_integer(Type from, Round round) {
  switch (from) {
    case Type::kU8:
    case Type::kU16:
    case Type::kU32:
      return from_integer_to<uint32_t, To>(round);
    case Type::kS8:
    case Type::kS16:
    case Type::kS32:
      return from_integer_to<int32_t, To>(round);
    case Type::kU64:
      return from_integer_to<uint64_t, To>(round);
    case Type::kS64:
      return from_integer_to<int64_t, To>(round);
    default:
      return nullptr;
  }
}

// ---- float to float ----
template <bool kFtz, bool kSat>
struct FloatToDouble {
  double operator()(float a) const { return out<false, kSat>(double(in<kFtz>(a))); }
};
template <bool kFtz, bool kSat>
struct DoubleToFloat {
  float operator()(double a) const { return out<kFtz, kSat>(float(a)); }
};
template <class T, bool kFtz, bool kSat>
struct SameFloat {
  T operator()(T a) const { return out<kFtz, kSat>(in<kFtz>(a)); }
};
template <class T, Rint kRint, bool kFtz, bool kSat>
struct Integral {
  T operator()(T a) const {
    T r;
    const T x = in<kFtz>(a);
    if constexpr (std::is_same_v<T, float>) {
      if constexpr (kRint == Rint::kNearest) r = __builtin_rintf(x);
      if constexpr (kRint == Rint::kZero) r = __builtin_truncf(x);
      if constexpr (kRint == Rint::kDown) r = __builtin_floorf(x);
      if constexpr (kRint == Rint::kUp) r = __builtin_ceilf(x);
    } else {
      r = to_integral<kRint>(x);
    }
    return out<kFtz, kSat>(r);
  }
};
template <class T, bool kFtz, bool kSat>
Handler same_float(Mod rounding) {
  switch (rounding) {
    case Mod::kUnknown:
    case Mod::kRn:
      return unary<T, T, SameFloat<T, kFtz, kSat>>;
    case Mod::kRni:
      return unary<T, T, Integral<T, Rint::kNearest, kFtz, kSat>>;
    case Mod::kRzi:
      return unary<T, T, Integral<T, Rint::kZero, kFtz, kSat>>;
    case Mod::kRmi:
      return unary<T, T, Integral<T, Rint::kDown, kFtz, kSat>>;
    case Mod::kRpi:
      return unary<T, T, Integral<T, Rint::kUp, kFtz, kSat>>;
    default:
      return nullptr;
  }
}
template <class H, Round kRound>
struct FromFloat {
  uint16_t operator()(float a) const { return H::template narrow<kRound>(a); }
};
template <class H, Round kRound>
struct FromDouble {
  uint16_t operator()(double a) const { return H::template narrow<kRound>(to_float_odd(a)); }
};
// 64-bit integers don't fit a double: 53 bits, the last of which tells of those dropped, are
// rounded as the whole integer would be.
template <class H, Round kRound, class From>
uint16_t narrow_integer(From a) {
  const bool negative = a < 0;
  const uint64_t u = negative ? 0 - uint64_t(a) : uint64_t(a);
  const double d =
      u >> 53 ? double(int64_t(u >> 11 | uint64_t((u & 0x7ff) != 0))) * 2048.0 : double(int64_t(u));
  return H::template narrow<kRound>(to_float_odd(negative ? -d : d));
}
template <class H, Round kRound>
struct FromSigned {
  uint16_t operator()(int64_t a) const { return narrow_integer<H, kRound>(a); }
};
template <class H, Round kRound>
struct FromUnsigned {
  uint16_t operator()(uint64_t a) const { return narrow_integer<H, kRound>(a); }
};
template <class H>
struct Widen {
  float operator()(uint16_t a) const { return canonical(H::widen(a)); }
};
template <class H>
struct WidenDouble {
  double operator()(uint16_t a) const { return H::widen(a); }
};
template <class H, class From, template <class, Round> class F>
Handler narrow(Mod rounding) {
  switch (rounding) {
    case Mod::kUnknown:
    case Mod::kRn:
      return unary_slow<uint16_t, From, F<H, Round::kNearest>>;
    case Mod::kRz:
      return unary_slow<uint16_t, From, F<H, Round::kZero>>;
    case Mod::kRm:
      return unary_slow<uint16_t, From, F<H, Round::kDown>>;
    case Mod::kRp:
      return unary_slow<uint16_t, From, F<H, Round::kUp>>;
    default:
      return nullptr;
  }
}
struct Tf32 {  // nearest, ties away
  uint32_t operator()(uint32_t u) const {
    if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fffffff;
    if ((u & 0x7fffffffu) == 0x7f800000u) return u;
    return (u + 0x1000u) & 0xffffe000u;
  }
};
struct Tf32Zero {
  uint32_t operator()(uint32_t u) const {
    return (u & 0x7fffffffu) > 0x7f800000u ? 0x7fffffff : u & 0xffffe000u;
  }
};
struct Tf32Nearest {
  uint32_t operator()(uint32_t u) const {
    if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fffffff;
    if ((u & 0x7fffffffu) == 0x7f800000u) return u;
    return (u + 0xfffu + ((u >> 13) & 1)) & 0xffffe000u;
  }
};

}  // namespace

Handler extend_handler(uint32_t from, Type type, uint32_t to) {
  switch (from) {
    case 2:
      return extend_as<uint16_t>(type, to);
    case 4:
      return extend_as<uint32_t>(type, to);
    case 8:
      return extend_as<uint64_t>(type, to);
    default:
      return nullptr;
  }
}
Handler saturate_handler(Type to) {
  switch (to) {
    case Type::kU8:
      return unary<int64_t, int64_t, ClampSigned<uint8_t>>;
    case Type::kS8:
      return unary<int64_t, int64_t, ClampSigned<int8_t>>;
    case Type::kU16:
      return unary<int64_t, int64_t, ClampSigned<uint16_t>>;
    case Type::kS16:
      return unary<int64_t, int64_t, ClampSigned<int16_t>>;
    case Type::kU32:
      return unary<int64_t, int64_t, ClampSigned<uint32_t>>;
    case Type::kS32:
      return unary<int64_t, int64_t, ClampSigned<int32_t>>;
    case Type::kU64:
      return unary<int64_t, int64_t, ClampSigned<uint64_t>>;
    case Type::kS64:
      return unary<int64_t, int64_t, ClampSigned<int64_t>>;
    default:
      return nullptr;
  }
}
Handler saturate_unsigned_handler(Type to) {
  switch (to) {
    case Type::kU8:
      return unary<uint64_t, uint64_t, ClampUnsigned<uint8_t>>;
    case Type::kS8:
      return unary<uint64_t, uint64_t, ClampUnsigned<int8_t>>;
    case Type::kU16:
      return unary<uint64_t, uint64_t, ClampUnsigned<uint16_t>>;
    case Type::kS16:
      return unary<uint64_t, uint64_t, ClampUnsigned<int16_t>>;
    case Type::kU32:
      return unary<uint64_t, uint64_t, ClampUnsigned<uint32_t>>;
    case Type::kS32:
      return unary<uint64_t, uint64_t, ClampUnsigned<int32_t>>;
    case Type::kU64:
      return unary<uint64_t, uint64_t, ClampUnsigned<uint64_t>>;
    case Type::kS64:
      return unary<uint64_t, uint64_t, ClampUnsigned<int64_t>>;
    default:
      return nullptr;
  }
}

Handler convert_handler(Type to, Type from, Mod rounding, bool ftz, bool sat) {
  const bool from_is_float = ptx::is_float(from);
  const bool to_is_float = ptx::is_float(to) || to == Type::kTf32;
  Round round;
  if (from_is_float && !to_is_float) {          // clamping is what the conversion does anyway
    if (rounding != Mod::kRzi) return nullptr;  // the decoder rounds before
    if (from == Type::kF32) return from_float<float>(to, ftz);
    if (from == Type::kF64) return from_float<double>(to, ftz);
    return nullptr;
  }
  if (!from_is_float && to_is_float) {
    if (ftz || sat || !rounding_of(rounding, &round)) return nullptr;  // the decoder clamps after
    if (to == Type::kF32) return from_integer<float>(from, round);
    if (to == Type::kF64) return from_integer<double>(from, round);
    if (to == Type::kBf16 && from == Type::kS64)
      return narrow<Bfloat, int64_t, FromSigned>(rounding);
    if (to == Type::kBf16 && from == Type::kU64)
      return narrow<Bfloat, uint64_t, FromUnsigned>(rounding);
    return nullptr;
  }
  if (to == Type::kTf32 && from == Type::kF32) {
    if (ftz || sat) return nullptr;
    if (rounding == Mod::kRna) return unary<uint32_t, uint32_t, Tf32>;
    if (rounding == Mod::kRn) return unary<uint32_t, uint32_t, Tf32Nearest>;
    if (rounding == Mod::kRz) return unary<uint32_t, uint32_t, Tf32Zero>;
    return nullptr;
  }
  if (from == Type::kF32 && to == Type::kF32) {
    if (ftz)
      return sat ? same_float<float, true, true>(rounding)
                 : same_float<float, true, false>(rounding);
    return sat ? same_float<float, false, true>(rounding)
               : same_float<float, false, false>(rounding);
  }
  if (from == Type::kF64 && to == Type::kF64) {
    if (ftz) return nullptr;
    return sat ? same_float<double, false, true>(rounding)
               : same_float<double, false, false>(rounding);
  }
  if (from == Type::kF32 && to == Type::kF64) {
    if (rounding != Mod::kUnknown) return nullptr;
    if (ftz)
      return sat ? unary<double, float, FloatToDouble<true, true>>
                 : unary<double, float, FloatToDouble<true, false>>;
    return sat ? unary<double, float, FloatToDouble<false, true>>
               : unary<double, float, FloatToDouble<false, false>>;
  }
  if (from == Type::kF64 && to == Type::kF32) {
    if (!rounding_of(rounding, &round)) return nullptr;
    if (ftz)
      return sat ? with_rounding<unary<float, double, DoubleToFloat<true, true>>>(round)
                 : with_rounding<unary<float, double, DoubleToFloat<true, false>>>(round);
    return sat ? with_rounding<unary<float, double, DoubleToFloat<false, true>>>(round)
               : with_rounding<unary<float, double, DoubleToFloat<false, false>>>(round);
  }
  if (sat) return nullptr;
  if (from == Type::kF16 && to == Type::kF32 && rounding == Mod::kUnknown)
    return unary_slow<float, uint16_t, Widen<Half>>;  // .ftz: an f16 is never a subnormal f32
  if (ftz) return nullptr;
  if (from == Type::kBf16 && to == Type::kF32 && rounding == Mod::kUnknown)
    return unary<float, uint16_t, Widen<Bfloat>>;
  if (from == Type::kF16 && to == Type::kF64 && rounding == Mod::kUnknown)
    return unary_slow<double, uint16_t, WidenDouble<Half>>;
  if (from == Type::kBf16 && to == Type::kF64 && rounding == Mod::kUnknown)
    return unary<double, uint16_t, WidenDouble<Bfloat>>;
  if (to == Type::kF16 && from == Type::kF32) return narrow<Half, float, FromFloat>(rounding);
  if (to == Type::kBf16 && from == Type::kF32) return narrow<Bfloat, float, FromFloat>(rounding);
  if (to == Type::kF16 && from == Type::kF64) return narrow<Half, double, FromDouble>(rounding);
  if (to == Type::kBf16 && from == Type::kF64) return narrow<Bfloat, double, FromDouble>(rounding);
  return nullptr;
}

}  // namespace gpupool::simgpu::exec::GPUPOOL_ISA
