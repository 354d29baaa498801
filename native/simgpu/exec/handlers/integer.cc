// Integer arithmetic and logic: add sub mul mad min max and or xor not shl shr neg abs.
#include "simgpu/exec/handlers/rows.h"

namespace gpupool::simgpu::exec::GPUPOOL_ISA {
namespace {

template <class T>
using U = std::make_unsigned_t<T>;
template <class T>
struct WideOf;
template <>
struct WideOf<uint16_t> {
  using type = uint32_t;
};
template <>
struct WideOf<int16_t> {
  using type = int32_t;
};
template <>
struct WideOf<uint32_t> {
  using type = uint64_t;
};
template <>
struct WideOf<int32_t> {
  using type = int64_t;
};
template <>
struct WideOf<uint64_t> {
  using type = unsigned __int128;
};
template <>
struct WideOf<int64_t> {
  using type = __int128;
};
template <class T>
using Wide = typename WideOf<T>::type;
// Arithmetic type without overflow traps: at least 32 bits, unsigned.
template <class T>
using Calc = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <class T>
struct Add {
  T operator()(T a, T b) const { return T(Calc<T>(a) + Calc<T>(b)); }
};
template <class T>
struct Sub {
  T operator()(T a, T b) const { return T(Calc<T>(a) - Calc<T>(b)); }
};
template <class T>
struct MulLo {
  T operator()(T a, T b) const { return T(Calc<T>(a) * Calc<T>(b)); }
};
template <class T>
struct MulHi {
  T operator()(T a, T b) const { return T((Wide<T>(a) * Wide<T>(b)) >> (8 * sizeof(T))); }
};
template <class T>
struct MulWide {
  Wide<T> operator()(T a, T b) const { return Wide<T>(Wide<T>(a) * Wide<T>(b)); }
};
template <class T>
struct MadLo {
  T operator()(T a, T b, T c) const { return T(Calc<T>(a) * Calc<T>(b) + Calc<T>(c)); }
};
template <class T>
struct MadHi {
  T operator()(T a, T b, T c) const { return T(Calc<T>(MulHi<T>{}(a, b)) + Calc<T>(c)); }
};
template <class T>
struct MadWide {
  Wide<T> operator()(T a, T b, Wide<T> c) const {
    return Wide<T>(U<Wide<T>>(Wide<T>(a) * Wide<T>(b)) + U<Wide<T>>(c));
  }
};
inline int32_t clamp32(int64_t v) {
  return int32_t(v > INT32_MAX ? INT32_MAX : v < INT32_MIN ? INT32_MIN : v);
}
struct AddSat {
  int32_t operator()(int32_t a, int32_t b) const { return clamp32(int64_t(a) + b); }
};
struct SubSat {
  int32_t operator()(int32_t a, int32_t b) const { return clamp32(int64_t(a) - b); }
};
struct MadHiSat {
  int32_t operator()(int32_t a, int32_t b, int32_t c) const {
    return clamp32(((int64_t(a) * b) >> 32) + c);
  }
};
template <class T>
struct Min {
  T operator()(T a, T b) const { return a < b ? a : b; }
};
template <class T>
struct Max {
  T operator()(T a, T b) const { return a > b ? a : b; }
};
template <class T>
struct And {
  T operator()(T a, T b) const { return T(a & b); }
};
template <class T>
struct Or {
  T operator()(T a, T b) const { return T(a | b); }
};
template <class T>
struct Xor {
  T operator()(T a, T b) const { return T(a ^ b); }
};
template <class T>
struct Not {
  T operator()(T a) const { return T(~a); }
};
template <class T>
struct Cnot {
  T operator()(T a) const { return T(a == 0); }
};
template <class T>
struct Neg {
  T operator()(T a) const { return T(Calc<T>(0) - Calc<T>(a)); }
};
template <class T>
struct Abs {
  T operator()(T a) const { return a < 0 ? T(Calc<T>(0) - Calc<T>(a)) : a; }
};
template <class T>
struct Shl {
  T operator()(T a, uint32_t n) const {
    constexpr uint32_t kBits = 8 * sizeof(T);
    return n < kBits ? T(Calc<T>(a) << (n & (kBits - 1))) : T(0);
  }
};
template <class T>
struct Shr {
  T operator()(T a, uint32_t n) const {
    constexpr uint32_t kBits = 8 * sizeof(T);
    if constexpr (std::is_signed_v<T>) return T(a >> (n < kBits ? n : kBits - 1));
    return n < kBits ? T(a >> (n & (kBits - 1))) : T(0);
  }
};
template <class T>
struct Mul24Lo {
  T operator()(T a, T b) const {
    if constexpr (std::is_signed_v<T>)
      return T((int64_t(int32_t(uint32_t(a) << 8) >> 8) * (int32_t(uint32_t(b) << 8) >> 8)));
    return T(uint64_t(a & 0xffffff) * (b & 0xffffff));
  }
};
template <class T>
struct Mul24Hi {
  T operator()(T a, T b) const {
    if constexpr (std::is_signed_v<T>)
      return T((int64_t(int32_t(uint32_t(a) << 8) >> 8) * (int32_t(uint32_t(b) << 8) >> 8)) >> 16);
    return T((uint64_t(a & 0xffffff) * (b & 0xffffff)) >> 16);
  }
};
template <class T>
struct Mad24Lo {
  T operator()(T a, T b, T c) const { return T(uint32_t(Mul24Lo<T>{}(a, b)) + uint32_t(c)); }
};
template <class T>
struct Mad24Hi {
  T operator()(T a, T b, T c) const { return T(uint32_t(Mul24Hi<T>{}(a, b)) + uint32_t(c)); }
};
struct Mad24HiSat {
  int32_t operator()(int32_t a, int32_t b, int32_t c) const {
    return clamp32(int64_t(Mul24Hi<int32_t>{}(a, b)) + c);
  }
};
template <class T>
struct Sad {
  T operator()(T a, T b, T c) const {
    return T(Calc<T>(c) + (a < b ? Calc<T>(b) - Calc<T>(a) : Calc<T>(a) - Calc<T>(b)));
  }
};

template <class T>
Handler typed(Op op, Mod mode, bool sat) {
  switch (op) {
    case Op::kAdd:
      if (sat)
        return std::is_same_v<T, int32_t> ? binary<int32_t, int32_t, int32_t, AddSat> : nullptr;
      return binary<T, T, T, Add<T>>;
    case Op::kSub:
      if (sat)
        return std::is_same_v<T, int32_t> ? binary<int32_t, int32_t, int32_t, SubSat> : nullptr;
      return binary<T, T, T, Sub<T>>;
    case Op::kMul:
      if (sat) return nullptr;
      if (mode == Mod::kLo) return binary<T, T, T, MulLo<T>>;
      if (mode == Mod::kHi) return binary<T, T, T, MulHi<T>>;
      if constexpr (sizeof(T) < 8)
        if (mode == Mod::kWide) return binary<Wide<T>, T, T, MulWide<T>>;
      return nullptr;
    case Op::kMad:
      if (sat)
        return std::is_same_v<T, int32_t> && mode == Mod::kHi
                   ? ternary<int32_t, int32_t, int32_t, int32_t, MadHiSat>
                   : nullptr;
      if (mode == Mod::kLo) return ternary<T, T, T, T, MadLo<T>>;
      if (mode == Mod::kHi) return ternary<T, T, T, T, MadHi<T>>;
      if constexpr (sizeof(T) < 8)
        if (mode == Mod::kWide) return ternary<Wide<T>, T, T, Wide<T>, MadWide<T>>;
      return nullptr;
    case Op::kMul24:
      if constexpr (sizeof(T) == 4) {
        if (mode == Mod::kLo) return binary<T, T, T, Mul24Lo<T>>;
        if (mode == Mod::kHi) return binary<T, T, T, Mul24Hi<T>>;
      }
      return nullptr;
    case Op::kMad24:
      if constexpr (sizeof(T) == 4) {
        if (sat)
          return std::is_signed_v<T> && mode == Mod::kHi
                     ? ternary<int32_t, int32_t, int32_t, int32_t, Mad24HiSat>
                     : nullptr;
        if (mode == Mod::kLo) return ternary<T, T, T, T, Mad24Lo<T>>;
        if (mode == Mod::kHi) return ternary<T, T, T, T, Mad24Hi<T>>;
      }
      return nullptr;
    case Op::kMin:
      return binary<T, T, T, Min<T>>;
    case Op::kMax:
      return binary<T, T, T, Max<T>>;
    case Op::kSad:
      return ternary<T, T, T, T, Sad<T>>;
    case Op::kNeg:
      return unary<T, T, Neg<T>>;
    case Op::kAbs:
      if constexpr (std::is_signed_v<T>) return unary<T, T, Abs<T>>;
      return nullptr;
    case Op::kShr:
      return binary<T, T, uint32_t, Shr<T>>;
    default:
      return nullptr;
  }
}

template <class T>
Handler untyped(Op op) {
  switch (op) {
    case Op::kAnd:
      return binary<T, T, T, And<T>>;
    case Op::kOr:
      return binary<T, T, T, Or<T>>;
    case Op::kXor:
      return binary<T, T, T, Xor<T>>;
    case Op::kNot:
      return unary<T, T, Not<T>>;
    case Op::kCnot:
      return unary<T, T, Cnot<T>>;
    case Op::kShl:
      return binary<T, T, uint32_t, Shl<T>>;
    case Op::kShr:
      return binary<T, T, uint32_t, Shr<T>>;
    default:
      return nullptr;
  }
}

// Packed halves: d.hi = op(a.hi, b.hi), d.lo = op(a.lo, b.lo).
template <class T, template <class> class F>
struct Packed {
  uint32_t operator()(uint32_t a, uint32_t b) const {
    const uint32_t lo = uint16_t(F<T>{}(T(a), T(b)));
    const uint32_t hi = uint16_t(F<T>{}(T(a >> 16), T(b >> 16)));
    return lo | hi << 16;
  }
};
template <class T>
Handler packed(Op op) {
  switch (op) {
    case Op::kAdd:
      return binary<uint32_t, uint32_t, uint32_t, Packed<T, Add>>;
    case Op::kSub:
      return binary<uint32_t, uint32_t, uint32_t, Packed<T, Sub>>;
    case Op::kMin:
      return binary<uint32_t, uint32_t, uint32_t, Packed<T, Min>>;
    case Op::kMax:
      return binary<uint32_t, uint32_t, uint32_t, Packed<T, Max>>;
    default:
      return nullptr;
  }
}

}  // namespace

Handler integer_handler(Op op, Type type, Mod mode, bool sat) {
  if (op == Op::kDiv || op == Op::kRem) return sat ? nullptr : division_handler(op, type);
  switch (type) {
    case Type::kU16:
      return typed<uint16_t>(op, mode, sat);
    case Type::kS16:
      return typed<int16_t>(op, mode, sat);
    case Type::kU32:
      return typed<uint32_t>(op, mode, sat);
    case Type::kS32:
      return typed<int32_t>(op, mode, sat);
    case Type::kU64:
      return typed<uint64_t>(op, mode, sat);
    case Type::kS64:
      return typed<int64_t>(op, mode, sat);
    case Type::kU16x2:
      return sat ? nullptr : packed<uint16_t>(op);
    case Type::kS16x2:
      return sat ? nullptr : packed<int16_t>(op);
    case Type::kB16:
      return untyped<uint16_t>(op);
    case Type::kB32:
      return untyped<uint32_t>(op);
    case Type::kB64:
      return untyped<uint64_t>(op);
    default:
      return nullptr;
  }
}

}  // namespace gpupool::simgpu::exec::GPUPOOL_ISA
