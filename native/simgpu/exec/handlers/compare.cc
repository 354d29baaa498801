// setp, set, selp, slct, testp, and logic on predicates.
#include "simgpu/exec/handlers/rows.h"

namespace gpupool::simgpu::exec::GPUPOOL_ISA {
namespace {

template <class T, Mod kCompare>
inline bool compare(T a, T b) {
  // Unordered forms hold when an operand is NaN.
  switch (kCompare) {
    case Mod::kEq:
      return a == b;
    case Mod::kNe:
      return std::is_floating_point_v<T> ? (a < b || a > b) : a != b;
    case Mod::kLt:
    case Mod::kLo:
      return a < b;
    case Mod::kLe:
    case Mod::kLs:
      return a <= b;
    case Mod::kGt:
    case Mod::kHi:
      return a > b;
    case Mod::kGe:
    case Mod::kHs:
      return a >= b;
    case Mod::kEqu:
      return !(a < b || a > b);
    case Mod::kNeu:
      return !(a == b);
    case Mod::kLtu:
      return !(a >= b);
    case Mod::kLeu:
      return !(a > b);
    case Mod::kGtu:
      return !(a <= b);
    case Mod::kGeu:
      return !(a < b);
    case Mod::kNum:
      return a == a && b == b;
    case Mod::kCompareNan:
      return !(a == a && b == b);
    default:
      return false;
  }
}

template <class T, Mod kCompare, bool kFtz>
struct Setp {
  int32_t operator()(T a, T b) const {
    if constexpr (kFtz) return -int32_t(compare<T, kCompare>(flush(a), flush(b)));
    return -int32_t(compare<T, kCompare>(a, b));
  }
};

template <class T, bool kFtz>
Handler float_compare(Mod c) {
  switch (c) {
#define GPUPOOL_CASE(name) \
  case Mod::name:          \
    return binary<int32_t, T, T, Setp<T, Mod::name, kFtz>>;
    // clang-format off
    GPUPOOL_CASE(kEq)
    GPUPOOL_CASE(kNe)
    GPUPOOL_CASE(kLt)
    GPUPOOL_CASE(kLe)
    GPUPOOL_CASE(kGt)
    GPUPOOL_CASE(kGe)
    GPUPOOL_CASE(kEqu)
    GPUPOOL_CASE(kNeu)
    GPUPOOL_CASE(kLtu)
    GPUPOOL_CASE(kLeu)
    GPUPOOL_CASE(kGtu)
    GPUPOOL_CASE(kGeu)
    GPUPOOL_CASE(kNum)
    GPUPOOL_CASE(kCompareNan)
    // clang-format on
    default:
      return nullptr;
  }
}
template <class T>
Handler integer_compare(Mod c, bool is_unsigned) {
  constexpr bool kFtz = false;
  switch (c) {
    GPUPOOL_CASE(kEq)
    GPUPOOL_CASE(kNe)
  GPUPOOL_CASE(kLt) GPUPOOL_CASE(kLe) GPUPOOL_CASE(kGt) GPUPOOL_CASE(kGe) case Mod::kLo:
    return is_unsigned ? integer_compare<T>(Mod::kLt, true) : nullptr;
  case Mod::kLs:
    return is_unsigned ? integer_compare<T>(Mod::kLe, true) : nullptr;
  case Mod::kHi:
    return is_unsigned ? integer_compare<T>(Mod::kGt, true) : nullptr;
  case Mod::kHs:
    return is_unsigned ? integer_compare<T>(Mod::kGe, true) : nullptr;
    default : return nullptr;
  }
}
template <class T>
Handler bits_compare(Mod c) {
  if (c != Mod::kEq && c != Mod::kNe) return nullptr;
  return integer_compare<T>(c, false);
}

template <class T>
Ins selp(Warp& w, Ins i) {
  map_result<T>(
      w, i, [](T a, T b, int32_t p) { return p ? a : b; }, row<const T>(w, i->a),
      row<const T>(w, i->b), row<const int32_t>(w, i->c));
  return i + 1;
}
template <class T, class C, bool kFtz>
Ins slct(Warp& w, Ins i) {
  map_result<T>(
      w, i,
      [](T a, T b, C c) {
        if constexpr (kFtz) return flush(c) >= C(0) ? a : b;
        return c >= C(0) ? a : b;
      },
      row<const T>(w, i->a), row<const T>(w, i->b), row<const C>(w, i->c));
  return i + 1;
}
template <class T>
Handler slct_form(bool floating, bool ftz) {
  if (!floating) return ftz ? nullptr : slct<T, int32_t, false>;
  return ftz ? slct<T, float, true> : slct<T, float, false>;
}

template <class T, Mod kWhat>
struct Test {
  int32_t operator()(T x) const {
    using B = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
    constexpr B kExponent = sizeof(T) == 8 ? B(0x7ff0000000000000ull) : B(0x7f800000u);
    const B u = bits_as<B>(x);
    const B e = u & kExponent;
    const B magnitude = u & B(~(B(1) << (8 * sizeof(T) - 1)));
    bool r = false;
    switch (kWhat) {
      case Mod::kFinite:
        r = e != kExponent;
        break;
      case Mod::kInfinite:
        r = magnitude == kExponent;
        break;
      case Mod::kNumber:
        r = magnitude <= kExponent;
        break;
      case Mod::kNotanumber:
        r = magnitude > kExponent;
        break;
      case Mod::kNormal:
        r = magnitude == 0 || (e != 0 && e != kExponent);
        break;
      case Mod::kSubnormal:
        r = e == 0 && magnitude != 0;
        break;
      default:
        break;
    }
    return -int32_t(r);
  }
};
template <class T>
Handler test_form(Mod what) {
  switch (what) {
    case Mod::kFinite:
      return unary<int32_t, T, Test<T, Mod::kFinite>>;
    case Mod::kInfinite:
      return unary<int32_t, T, Test<T, Mod::kInfinite>>;
    case Mod::kNumber:
      return unary<int32_t, T, Test<T, Mod::kNumber>>;
    case Mod::kNotanumber:
      return unary<int32_t, T, Test<T, Mod::kNotanumber>>;
    case Mod::kNormal:
      return unary<int32_t, T, Test<T, Mod::kNormal>>;
    case Mod::kSubnormal:
      return unary<int32_t, T, Test<T, Mod::kSubnormal>>;
    default:
      return nullptr;
  }
}

struct AndP {
  int32_t operator()(int32_t a, int32_t b) const { return a & b; }
};
struct OrP {
  int32_t operator()(int32_t a, int32_t b) const { return a | b; }
};
struct XorP {
  int32_t operator()(int32_t a, int32_t b) const { return a ^ b; }
};
struct NotP {
  int32_t operator()(int32_t a) const { return ~a; }
};
struct Same {
  int32_t operator()(int32_t a) const { return a; }
};
struct One {
  float operator()(int32_t a) const { return a ? 1.0f : 0.0f; }
};

}  // namespace

Handler setp_handler(Type type, Mod c, bool ftz) {
  switch (type) {
    case Type::kF32:
      return ftz ? float_compare<float, true>(c) : float_compare<float, false>(c);
    case Type::kF64:
      return ftz ? nullptr : float_compare<double, false>(c);
    default:
      break;
  }
  if (ftz) return nullptr;
  switch (type) {
    case Type::kU16:
      return integer_compare<uint16_t>(c, true);
    case Type::kS16:
      return integer_compare<int16_t>(c, false);
    case Type::kU32:
      return integer_compare<uint32_t>(c, true);
    case Type::kS32:
      return integer_compare<int32_t>(c, false);
    case Type::kU64:
      return integer_compare<uint64_t>(c, true);
    case Type::kS64:
      return integer_compare<int64_t>(c, false);
    case Type::kB16:
      return bits_compare<uint16_t>(c);
    case Type::kB32:
      return bits_compare<uint32_t>(c);
    case Type::kB64:
      return bits_compare<uint64_t>(c);
    default:
      return nullptr;
  }
}
Handler selp_handler(uint32_t width) {
  switch (width) {
    case 2:
      return selp<uint16_t>;
    case 4:
      return selp<uint32_t>;
    case 8:
      return selp<uint64_t>;
    default:
      return nullptr;
  }
}
Handler slct_handler(uint32_t width, bool floating, bool ftz) {
  switch (width) {
    case 2:
      return slct_form<uint16_t>(floating, ftz);
    case 4:
      return slct_form<uint32_t>(floating, ftz);
    case 8:
      return slct_form<uint64_t>(floating, ftz);
    default:
      return nullptr;
  }
}
Handler testp_handler(Type type, Mod what) {
  if (type == Type::kF32) return test_form<float>(what);
  if (type == Type::kF64) return test_form<double>(what);
  return nullptr;
}
Handler predicate_handler(Op op) {
  switch (op) {
    case Op::kAnd:
      return binary<int32_t, int32_t, int32_t, AndP>;
    case Op::kOr:
      return binary<int32_t, int32_t, int32_t, OrP>;
    case Op::kXor:
      return binary<int32_t, int32_t, int32_t, XorP>;
    case Op::kNot:
      return unary<int32_t, int32_t, NotP>;
    case Op::kMov:
      return unary<int32_t, int32_t, Same>;
    default:
      return nullptr;
  }
}
Ins sign_mask(Warp& w, Ins i) { return unary<int32_t, int32_t, Same>(w, i); }
Ins set_float(Warp& w, Ins i) { return unary<float, int32_t, One>(w, i); }

}  // namespace gpupool::simgpu::exec::GPUPOOL_ISA
