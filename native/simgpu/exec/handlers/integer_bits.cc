// Integer division, carry chains and bit manipulation.
#include "simgpu/exec/handlers/rows.h"

namespace gpupool::simgpu::exec::GPUPOOL_ISA {
namespace {

// Division by zero yields all ones, as the hardware's sequence does; a remainder by zero the
// dividend.
template <class T>
struct Div {
  T operator()(T a, T b) const {
    if (b == 0) return T(~T(0));
    if constexpr (std::is_signed_v<T>)
      if (b == T(-1)) return T(0 - std::make_unsigned_t<T>(a));
    return T(a / b);
  }
};
template <class T>
struct Rem {
  T operator()(T a, T b) const {
    if (b == 0) return a;
    if constexpr (std::is_signed_v<T>)
      if (b == T(-1)) return 0;
    return T(a % b);
  }
};
template <class T>
Handler division(Op op) {
  if (op == Op::kDiv) return binary_slow<T, T, T, Div<T>>;
  return binary_slow<T, T, T, Rem<T>>;
}

// The carry lives in a row of 0 / 1 words (e). As on cards it is the adder's after subtractions,
// too: 1 says that there was no borrow, and compiled divisions of 128 bits rely on it. (The PTX ISA
// speaks of a borrow, which only shows where chains of both kinds meet.)
template <class T, Op kOp, Mod kMode, bool kIn, bool kOut>
Ins carry_op(Warp& w, Ins i) {
  using Big = std::conditional_t<sizeof(T) == 8, unsigned __int128, uint64_t>;
  T* d = row<T>(w, i->d);
  const T* a = row<T>(w, i->a);
  const T* b = row<T>(w, i->b);
  const T* c = row<T>(w, i->c);
  uint32_t* flag = row<uint32_t>(w, i->e);
  for (uint32_t m = w.mask; m; m &= m - 1) {
    const int l = __builtin_ctz(m);
    const Big in = kIn ? flag[l] & 1 : kOp == Op::kSub;
    if constexpr (kOp == Op::kSub) {
      const Big r = Big(a[l]) + Big(T(~b[l])) + in;
      d[l] = T(r);
      if (kOut) flag[l] = uint32_t(r >> (8 * sizeof(T))) & 1;
    } else if constexpr (kOp == Op::kAdd) {
      const Big r = Big(a[l]) + Big(b[l]) + in;
      d[l] = T(r);
      if (kOut) flag[l] = uint32_t(r >> (8 * sizeof(T))) & 1;
    } else {
      const Big product = Big(a[l]) * Big(b[l]);
      T part = kMode == Mod::kHi ? T(product >> (8 * sizeof(T))) : T(product);
      const Big r = Big(part) + Big(c[l]) + in;
      d[l] = T(r);
      if (kOut) flag[l] = uint32_t(r >> (8 * sizeof(T))) & 1;
    }
  }
  return i + 1;
}
// High half of a signed product; the sum and its carry are the same as for unsigned numbers.
template <class S, bool kIn, bool kOut>
Ins carry_mad_hi_signed(Warp& w, Ins i) {
  using T = std::make_unsigned_t<S>;
  using Big = std::conditional_t<sizeof(T) == 8, unsigned __int128, uint64_t>;
  using SignedBig = std::conditional_t<sizeof(T) == 8, __int128, int64_t>;
  T* d = row<T>(w, i->d);
  const S* a = row<S>(w, i->a);
  const S* b = row<S>(w, i->b);
  const T* c = row<T>(w, i->c);
  uint32_t* flag = row<uint32_t>(w, i->e);
  for (uint32_t m = w.mask; m; m &= m - 1) {
    const int l = __builtin_ctz(m);
    const T part = T((SignedBig(a[l]) * SignedBig(b[l])) >> (8 * sizeof(T)));
    const Big r = Big(part) + Big(c[l]) + (kIn ? flag[l] & 1 : 0);
    d[l] = T(r);
    if (kOut) flag[l] = uint32_t(r >> (8 * sizeof(T))) & 1;
  }
  return i + 1;
}

template <class T, bool kIn, bool kOut>
Handler carry_typed(Op op, Mod mode, bool is_signed) {
  switch (op) {
    case Op::kAdd:
      return carry_op<T, Op::kAdd, Mod::kUnknown, kIn, kOut>;
    case Op::kSub:
      return carry_op<T, Op::kSub, Mod::kUnknown, kIn, kOut>;
    case Op::kMad:
      if (mode == Mod::kLo) return carry_op<T, Op::kMad, Mod::kLo, kIn, kOut>;
      if (mode == Mod::kHi && is_signed)
        return carry_mad_hi_signed<std::make_signed_t<T>, kIn, kOut>;
      if (mode == Mod::kHi) return carry_op<T, Op::kMad, Mod::kHi, kIn, kOut>;
      return nullptr;
    default:
      return nullptr;
  }
}
template <class T>
Handler carry_flags(Op op, Mod mode, bool is_signed, bool in, bool out) {
  if (in && out) return carry_typed<T, true, true>(op, mode, is_signed);
  if (in) return carry_typed<T, true, false>(op, mode, is_signed);
  if (out) return carry_typed<T, false, true>(op, mode, is_signed);
  return nullptr;
}

template <class T>
struct Popc {
  uint32_t operator()(T a) const { return uint32_t(__builtin_popcountll(uint64_t(a))); }
};
template <class T>
struct Clz {
  uint32_t operator()(T a) const {
    if (a == 0) return 8 * sizeof(T);
    return sizeof(T) == 8 ? __builtin_clzll(a) : __builtin_clz(uint32_t(a));
  }
};
template <class T>
struct Brev {
  T operator()(T v) const {
    uint64_t x = v;
    x = ((x >> 1) & 0x5555555555555555ull) | ((x & 0x5555555555555555ull) << 1);
    x = ((x >> 2) & 0x3333333333333333ull) | ((x & 0x3333333333333333ull) << 2);
    x = ((x >> 4) & 0x0f0f0f0f0f0f0f0full) | ((x & 0x0f0f0f0f0f0f0f0full) << 4);
    x = __builtin_bswap64(x);
    return sizeof(T) == 8 ? T(x) : T(x >> 32);
  }
};
template <class T, bool kAmount>
struct Bfind {
  uint32_t operator()(T a) const {
    using UT = std::make_unsigned_t<T>;
    UT v = UT(a);
    if (std::is_signed_v<T> && a < 0) v = UT(~v);
    if (v == 0) return 0xffffffffu;
    const uint32_t top = sizeof(T) == 8 ? 63 - __builtin_clzll(v) : 31 - __builtin_clz(uint32_t(v));
    return kAmount ? uint32_t(8 * sizeof(T) - 1) - top : top;
  }
};
template <class T>
struct Bfe {
  T operator()(T a, uint32_t b, uint32_t c) const {
    using UT = std::make_unsigned_t<T>;
    constexpr uint32_t kBits = 8 * sizeof(T);
    const uint32_t pos = b & 0xff, len = c & 0xff;
    if (len == 0) return 0;
    const uint64_t last = uint64_t(pos) + len - 1;
    const uint32_t top = last < kBits - 1 ? uint32_t(last) : kBits - 1;
    const bool sign = std::is_signed_v<T> && ((UT(a) >> top) & 1);
    UT v = pos < kBits ? UT(UT(a) >> pos) : UT(0);
    const uint32_t have = pos < kBits ? (top - pos + 1) : 0;  // bits taken from a
    if (have < kBits) {
      const UT keep = UT((UT(1) << have) - 1);
      v &= keep;
      if (sign) v |= UT(~keep);
    }
    return T(v);
  }
};
template <class T>
struct Bfi {  // insert a into b
  T operator()(T a, T b, uint32_t c, uint32_t d) const {
    constexpr uint32_t kBits = 8 * sizeof(T);
    const uint32_t pos = c & 0xff, len = d & 0xff;
    if (pos >= kBits || len == 0) return b;
    const T ones = len >= kBits ? T(~T(0)) : T((T(1) << len) - 1);
    const T mask = T(ones << pos);
    return T((b & ~mask) | ((a << pos) & mask));
  }
};
template <class T>
Ins bfi(Warp& w, Ins i) {
  each_lane<T>(w, i->d, Bfi<T>{}, row<const T>(w, i->a), row<const T>(w, i->b),
               row<const uint32_t>(w, i->c), row<const uint32_t>(w, i->e));
  return i + 1;
}
template <bool kClamp>
struct Bmsk {
  uint32_t operator()(uint32_t a, uint32_t b) const {
    const uint32_t pos = kClamp ? a : a & 31, len = kClamp ? b : b & 31;
    if (pos >= 32 || len == 0) return 0;
    const uint32_t ones = len >= 32 ? 0xffffffffu : (1u << len) - 1;
    return ones << pos;
  }
};
template <bool kClamp, class T>
struct Szext {
  T operator()(T a, uint32_t b) const {
    const uint32_t n = kClamp ? b : b & 31;
    if (n >= 32) return a;
    if (n == 0) return 0;
    return T(T(std::make_unsigned_t<T>(a) << (32 - n)) >> (32 - n));
  }
};
// Funnel shifts: the pair is {b, a}, a the lower word.
template <bool kLeft, bool kClamp>
struct Shf {
  uint32_t operator()(uint32_t a, uint32_t b, uint32_t c) const {
    const uint32_t n = kClamp ? (c < 32 ? c : 32) : c & 31;
    const uint64_t v = uint64_t(b) << 32 | a;
    return kLeft ? uint32_t((v << n) >> 32) : uint32_t(v >> n);
  }
};
template <Mod kMode>
struct Prmt {
  uint32_t operator()(uint32_t a, uint32_t b, uint32_t c) const {
    const uint64_t v = uint64_t(b) << 32 | a;
    auto byte = [&](uint32_t n) { return uint32_t(v >> (8 * (n & 7))) & 0xff; };
    uint32_t r = 0;
    const uint32_t s = c & 3;
    for (uint32_t k = 0; k < 4; ++k) {
      uint32_t x;
      if constexpr (kMode == Mod::kUnknown) {
        const uint32_t sel = (c >> (4 * k)) & 15;
        x = byte(sel);
        if (sel & 8) x = x & 0x80 ? 0xff : 0;
      } else if constexpr (kMode == Mod::kF4e) {
        x = byte(s + k);
      } else if constexpr (kMode == Mod::kB4e) {
        x = byte(s + 8 - k);
      } else if constexpr (kMode == Mod::kRc8) {
        x = byte(s);
      } else if constexpr (kMode == Mod::kEcl) {
        x = byte(k > s ? k : s);
      } else if constexpr (kMode == Mod::kEcr) {
        x = byte(k < s ? k : s);
      } else {
        x = byte((s & 1) * 2 + (k & 1));
      }
      r |= x << (8 * k);
    }
    return r;
  }
};
Ins lop3(Warp& w, Ins i) {
  const uint32_t table = uint32_t(i->immediate);
  uint32_t t[8];
  for (int k = 0; k < 8; ++k) t[k] = (table >> k) & 1 ? 0xffffffffu : 0;
  map_lanes<uint32_t>(
      w, i->d,
      [&](uint32_t a, uint32_t b, uint32_t c) {
        return (t[0] & ~a & ~b & ~c) | (t[1] & ~a & ~b & c) | (t[2] & ~a & b & ~c) |
               (t[3] & ~a & b & c) | (t[4] & a & ~b & ~c) | (t[5] & a & ~b & c) |
               (t[6] & a & b & ~c) | (t[7] & a & b & c);
      },
      row<const uint32_t>(w, i->a), row<const uint32_t>(w, i->b), row<const uint32_t>(w, i->c));
  return i + 1;
}
template <class A, class B>
struct Dp4a {
  uint32_t operator()(uint32_t a, uint32_t b, uint32_t c) const {
    for (int k = 0; k < 4; ++k) c += uint32_t(int32_t(A(a >> (8 * k))) * int32_t(B(b >> (8 * k))));
    return c;
  }
};
template <class A, class B, int kHigh>
struct Dp2a {  // A: 16 bit, B: 8 bit
  uint32_t operator()(uint32_t a, uint32_t b, uint32_t c) const {
    for (int k = 0; k < 2; ++k)
      c += uint32_t(int32_t(A(a >> (16 * k))) * int32_t(B(b >> (8 * (k + 2 * kHigh)))));
    return c;
  }
};
// The n-th set bit of a from a base, upwards for n > 0, downwards for n < 0, the base itself for 0.
struct Fns {
  uint32_t operator()(uint32_t mask, uint32_t base, uint32_t offset_bits) const {
    const int32_t offset = int32_t(offset_bits);
    if (base > 31) return 0xffffffffu;
    if (offset == 0) return (mask >> base) & 1 ? base : 0xffffffffu;
    const int step = offset > 0 ? 1 : -1;
    int64_t left = offset > 0 ? offset : -int64_t(offset);
    for (int pos = int(base); pos >= 0 && pos < 32; pos += step)
      if ((mask >> pos) & 1 && --left == 0) return uint32_t(pos);
    return 0xffffffffu;
  }
};

}  // namespace

Handler division_handler(Op op, Type type) {
  switch (type) {
    case Type::kU16:
      return division<uint16_t>(op);
    case Type::kS16:
      return division<int16_t>(op);
    case Type::kU32:
      return division<uint32_t>(op);
    case Type::kS32:
      return division<int32_t>(op);
    case Type::kU64:
      return division<uint64_t>(op);
    case Type::kS64:
      return division<int64_t>(op);
    default:
      return nullptr;
  }
}

Handler carry_handler(Op op, Type type, Mod mode, bool in, bool out) {
  const bool is_signed = ptx::is_signed_integer(type);
  switch (type) {
    case Type::kB32:
    case Type::kU32:
    case Type::kS32:
      return carry_flags<uint32_t>(op, mode, is_signed, in, out);
    case Type::kB64:
    case Type::kU64:
    case Type::kS64:
      return carry_flags<uint64_t>(op, mode, is_signed, in, out);
    default:
      return nullptr;
  }
}

Handler bits_handler(Op op, Type type, Mod mode, Mod mode2, Type type2) {
  const bool wide = type == Type::kB64 || type == Type::kU64 || type == Type::kS64;
  switch (op) {
    case Op::kPopc:
      return wide ? unary_slow<uint32_t, uint64_t, Popc<uint64_t>>
                  : unary_slow<uint32_t, uint32_t, Popc<uint32_t>>;
    case Op::kClz:
      return wide ? unary_slow<uint32_t, uint64_t, Clz<uint64_t>>
                  : unary_slow<uint32_t, uint32_t, Clz<uint32_t>>;
    case Op::kBrev:
      return wide ? unary<uint64_t, uint64_t, Brev<uint64_t>>
                  : unary<uint32_t, uint32_t, Brev<uint32_t>>;
    case Op::kBfind: {
      const bool amount = mode == Mod::kShiftamt;
      switch (type) {
        case Type::kU32:
          return amount ? unary_slow<uint32_t, uint32_t, Bfind<uint32_t, true>>
                        : unary_slow<uint32_t, uint32_t, Bfind<uint32_t, false>>;
        case Type::kS32:
          return amount ? unary_slow<uint32_t, int32_t, Bfind<int32_t, true>>
                        : unary_slow<uint32_t, int32_t, Bfind<int32_t, false>>;
        case Type::kU64:
          return amount ? unary_slow<uint32_t, uint64_t, Bfind<uint64_t, true>>
                        : unary_slow<uint32_t, uint64_t, Bfind<uint64_t, false>>;
        case Type::kS64:
          return amount ? unary_slow<uint32_t, int64_t, Bfind<int64_t, true>>
                        : unary_slow<uint32_t, int64_t, Bfind<int64_t, false>>;
        default:
          return nullptr;
      }
    }
    case Op::kBfe:
      switch (type) {
        case Type::kU32:
          return ternary_slow<uint32_t, uint32_t, uint32_t, uint32_t, Bfe<uint32_t>>;
        case Type::kS32:
          return ternary_slow<int32_t, int32_t, uint32_t, uint32_t, Bfe<int32_t>>;
        case Type::kU64:
          return ternary_slow<uint64_t, uint64_t, uint32_t, uint32_t, Bfe<uint64_t>>;
        case Type::kS64:
          return ternary_slow<int64_t, int64_t, uint32_t, uint32_t, Bfe<int64_t>>;
        default:
          return nullptr;
      }
    case Op::kBfi:
      return wide ? bfi<uint64_t> : bfi<uint32_t>;
    case Op::kBmsk:
      return mode == Mod::kClamp ? binary<uint32_t, uint32_t, uint32_t, Bmsk<true>>
                                 : binary<uint32_t, uint32_t, uint32_t, Bmsk<false>>;
    case Op::kSzext:
      if (type == Type::kS32)
        return mode == Mod::kClamp ? binary<int32_t, int32_t, uint32_t, Szext<true, int32_t>>
                                   : binary<int32_t, int32_t, uint32_t, Szext<false, int32_t>>;
      return mode == Mod::kClamp ? binary<uint32_t, uint32_t, uint32_t, Szext<true, uint32_t>>
                                 : binary<uint32_t, uint32_t, uint32_t, Szext<false, uint32_t>>;
    case Op::kShf: {
      using T = uint32_t;
      const bool clamp = mode2 == Mod::kClamp;
      if (mode == Mod::kL)
        return clamp ? ternary<T, T, T, T, Shf<true, true>> : ternary<T, T, T, T, Shf<true, false>>;
      return clamp ? ternary<T, T, T, T, Shf<false, true>> : ternary<T, T, T, T, Shf<false, false>>;
    }
    case Op::kPrmt: {
      using T = uint32_t;
      switch (mode) {
        case Mod::kUnknown:
          return ternary_slow<T, T, T, T, Prmt<Mod::kUnknown>>;
        case Mod::kF4e:
          return ternary_slow<T, T, T, T, Prmt<Mod::kF4e>>;
        case Mod::kB4e:
          return ternary_slow<T, T, T, T, Prmt<Mod::kB4e>>;
        case Mod::kRc8:
          return ternary_slow<T, T, T, T, Prmt<Mod::kRc8>>;
        case Mod::kEcl:
          return ternary_slow<T, T, T, T, Prmt<Mod::kEcl>>;
        case Mod::kEcr:
          return ternary_slow<T, T, T, T, Prmt<Mod::kEcr>>;
        case Mod::kRc16:
          return ternary_slow<T, T, T, T, Prmt<Mod::kRc16>>;
        default:
          return nullptr;
      }
    }
    case Op::kLop3:
      return lop3;
    case Op::kFns:
      return ternary_slow<uint32_t, uint32_t, uint32_t, uint32_t, Fns>;
    case Op::kDp4a: {
      using T = uint32_t;
      const bool sa = type == Type::kS32, sb = type2 == Type::kS32;
      if (sa)
        return sb ? ternary<T, T, T, T, Dp4a<int8_t, int8_t>>
                  : ternary<T, T, T, T, Dp4a<int8_t, uint8_t>>;
      return sb ? ternary<T, T, T, T, Dp4a<uint8_t, int8_t>>
                : ternary<T, T, T, T, Dp4a<uint8_t, uint8_t>>;
    }
    case Op::kDp2a: {
      using T = uint32_t;
      const bool sa = type == Type::kS32, sb = type2 == Type::kS32, high = mode == Mod::kHi;
      if (sa && sb)
        return high ? ternary<T, T, T, T, Dp2a<int16_t, int8_t, 1>>
                    : ternary<T, T, T, T, Dp2a<int16_t, int8_t, 0>>;
      if (sa)
        return high ? ternary<T, T, T, T, Dp2a<int16_t, uint8_t, 1>>
                    : ternary<T, T, T, T, Dp2a<int16_t, uint8_t, 0>>;
      if (sb)
        return high ? ternary<T, T, T, T, Dp2a<uint16_t, int8_t, 1>>
                    : ternary<T, T, T, T, Dp2a<uint16_t, int8_t, 0>>;
      return high ? ternary<T, T, T, T, Dp2a<uint16_t, uint8_t, 1>>
                  : ternary<T, T, T, T, Dp2a<uint16_t, uint8_t, 0>>;
    }
    default:
      return nullptr;
  }
}

}  // namespace gpupool::simgpu::exec::GPUPOOL_ISA
