// atom and red. Memory of the device is shared by the host's threads, so it takes locked
// instructions; a block runs on one thread, so shared memory takes plain ones.
#include "simgpu/exec/handlers/half.h"
#include "simgpu/exec/handlers/memory.h"

namespace gpupool::simgpu::exec::GPUPOOL_ISA {
namespace {

template <class T>
using BitsOf = std::conditional_t<sizeof(T) == 8, uint64_t,
                                  std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>>;

template <class H, Op kOp>
uint16_t half_op(uint16_t a, uint16_t b) {
  const float x = H::widen(a), y = H::widen(b);
  if constexpr (kOp == Op::kAdd)
    return H::template narrow<Round::kNearest>(to_float_odd(add_odd(x, y)));
  if (x != x) return y != y ? 0x7fff : b;
  if (y != y) return a;
  if (x == y) return kOp == Op::kMax ? a & b : a | b;
  return (kOp == Op::kMax) == (x > y) ? a : b;
}

// New value from the old one and the operands.
template <Mod kOp, class T>
struct Update {
  T operator()(T old, T b, T c) const {
    if constexpr (kOp == Mod::kAdd) {
      if constexpr (std::is_floating_point_v<T>)
        return canonical(T(old + b));
      else
        return T(std::make_unsigned_t<T>(old) + std::make_unsigned_t<T>(b));
    }
    if constexpr (kOp == Mod::kMin) return b < old ? b : old;
    if constexpr (kOp == Mod::kMax) return b > old ? b : old;
    if constexpr (kOp == Mod::kExch) return b;
    if constexpr (kOp == Mod::kCas) return old == b ? c : old;
    if constexpr (!std::is_floating_point_v<T>) {
      if constexpr (kOp == Mod::kAnd) return old & b;
      if constexpr (kOp == Mod::kOr) return old | b;
      if constexpr (kOp == Mod::kXor) return old ^ b;
      if constexpr (kOp == Mod::kInc) return old >= b ? T(0) : T(old + 1);
      if constexpr (kOp == Mod::kDec) return old == 0 || old > b ? b : T(old - 1);
    }
    return old;
  }
};
// A device's f32 atomic add in memory flushes subnormals.
struct AddFlush {
  float operator()(float old, float b, float) const {
    return canonical(flush(flush(old) + flush(b)));
  }
};
template <class H>
struct AddHalf {
  uint16_t operator()(uint16_t old, uint16_t b, uint16_t) const {
    return half_op<H, Op::kAdd>(old, b);
  }
};
template <class H>
struct AddHalves {
  uint32_t operator()(uint32_t old, uint32_t b, uint32_t) const {
    return uint32_t(half_op<H, Op::kAdd>(uint16_t(old), uint16_t(b))) |
           uint32_t(half_op<H, Op::kAdd>(uint16_t(old >> 16), uint16_t(b >> 16))) << 16;
  }
};

template <class T, class F, Mod kOp>
inline T locked(T* p, T b, T c) {
  using B = BitsOf<T>;
  B* q = reinterpret_cast<B*>(p);
  if constexpr (!std::is_floating_point_v<T>) {
    if constexpr (kOp == Mod::kAdd && std::is_same_v<F, Update<Mod::kAdd, T>>)
      return T(__atomic_fetch_add(q, B(b), __ATOMIC_SEQ_CST));
    if constexpr (kOp == Mod::kAnd) return T(__atomic_fetch_and(q, B(b), __ATOMIC_SEQ_CST));
    if constexpr (kOp == Mod::kOr) return T(__atomic_fetch_or(q, B(b), __ATOMIC_SEQ_CST));
    if constexpr (kOp == Mod::kXor) return T(__atomic_fetch_xor(q, B(b), __ATOMIC_SEQ_CST));
    if constexpr (kOp == Mod::kExch) return T(__atomic_exchange_n(q, B(b), __ATOMIC_SEQ_CST));
    if constexpr (kOp == Mod::kCas) {
      B expected = B(b);
      __atomic_compare_exchange_n(q, &expected, B(c), false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
      return T(expected);
    }
  }
  B old = __atomic_load_n(q, __ATOMIC_RELAXED);
  for (;;) {
    const T value = F{}(bits_as<T>(old), b, c);
    const B next = bits_as<B>(value);
    if (__atomic_compare_exchange_n(q, &old, next, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
      return bits_as<T>(old);
  }
}

template <class T, class F, Mod kOp, Kind kKind, bool kPlain, bool kResult>
Ins atomic(Warp& w, Ins i) {
  Resolved x;
  if (!(resolve<kKind, uint64_t>(w, i, sizeof(T), true, x))) return i;
  const T* b = row<const T>(w, i->b);
  const T* c = row<const T>(w, i->c);
  T* d = row<T>(w, i->d);
  bool failed = kOp == Mod::kCas || kOp == Mod::kExch;
  for (uint32_t m = w.mask; m; m &= m - 1) {
    const int l = __builtin_ctz(m);
    T* p = reinterpret_cast<T*>(x.of(l, sizeof(T)));
    T old;
    const T vb = b[l], vc = c[l];
    if constexpr (kPlain) {
      old = *p;
      *p = F{}(old, vb, vc);
    } else {
      old = locked<T, F, kOp>(p, vb, vc);
    }
    if (kOp == Mod::kCas && old == vb) failed = false;
    if (kOp == Mod::kExch && old != vb) failed = false;
    if constexpr (kResult) d[l] = old;
  }
  if ((kOp == Mod::kCas || kOp == Mod::kExch) && failed) return poll(w, i + 1);
  w.spin = 0;
  return i + 1;
}
// 128 bits: exch and cas.
struct Wide {
  uint64_t lo, hi;
};
template <Mod kOp, Kind kKind>
Ins atomic_wide(Warp& w, Ins i) {
  Resolved x;
  if (!(resolve<kKind, uint64_t>(w, i, 16, true, x))) return i;
  const Wide* b = row<const Wide>(w, i->b);
  const Wide* c = row<const Wide>(w, i->c);
  Wide* d = row<Wide>(w, i->d);
  for (uint32_t m = w.mask; m; m &= m - 1) {
    const int l = __builtin_ctz(m);
    Wide* p = reinterpret_cast<Wide*>(x.of(l, 16));
    Wide expected = kOp == Mod::kCas ? b[l] : *p;
    const Wide desired = kOp == Mod::kCas ? c[l] : b[l];
    for (;;) {
      bool done;
      asm volatile("lock cmpxchg16b %1"
                   : "=@ccz"(done), "+m"(*p), "+a"(expected.lo), "+d"(expected.hi)
                   : "b"(desired.lo), "c"(desired.hi)
                   : "memory");
      if (done || kOp == Mod::kCas) break;
    }
    if (i->d) d[l] = expected;
  }
  return poll(w, i + 1);
}

template <class T, class F, Mod kOp, Kind kKind, bool kPlain>
Handler result_form(bool result) {
  return result ? atomic<T, F, kOp, kKind, kPlain, true> : atomic<T, F, kOp, kKind, kPlain, false>;
}
template <class T, class F, Mod kOp>
Handler access_form(Access access, bool result) {
  switch (access) {
    case Access::kGlobal:
      return result_form<T, F, kOp, Kind::kGlobal, false>(result);
    case Access::kShared64:
      return result_form<T, F, kOp, Kind::kShared, true>(result);
    case Access::kGeneric:
      return result_form<T, F, kOp, Kind::kGeneric, false>(result);
    default:
      return nullptr;  // the decoder widens 32-bit addresses
  }
}
template <Mod kOp, class T>
Handler plain_form(Access access, bool result) {
  return access_form<T, Update<kOp, T>, kOp>(access, result);
}
template <class T>
Handler integer_form(Access access, Mod op, bool result) {
  switch (op) {
    case Mod::kAdd:
      return plain_form<Mod::kAdd, T>(access, result);
    case Mod::kMin:
      return plain_form<Mod::kMin, T>(access, result);
    case Mod::kMax:
      return plain_form<Mod::kMax, T>(access, result);
    case Mod::kInc:
      if constexpr (std::is_same_v<T, uint32_t>) return plain_form<Mod::kInc, T>(access, result);
      return nullptr;
    case Mod::kDec:
      if constexpr (std::is_same_v<T, uint32_t>) return plain_form<Mod::kDec, T>(access, result);
      return nullptr;
    default:
      return nullptr;
  }
}
template <class T>
Handler bits_form(Access access, Mod op, bool result) {
  switch (op) {
    case Mod::kAnd:
      return plain_form<Mod::kAnd, T>(access, result);
    case Mod::kOr:
      return plain_form<Mod::kOr, T>(access, result);
    case Mod::kXor:
      return plain_form<Mod::kXor, T>(access, result);
    case Mod::kExch:
      return plain_form<Mod::kExch, T>(access, result);
    case Mod::kCas:
      return plain_form<Mod::kCas, T>(access, result);
    default:
      return nullptr;
  }
}
template <Mod kOp>
Handler wide_form(Access access) {
  switch (access) {
    case Access::kGlobal:
      return atomic_wide<kOp, Kind::kGlobal>;
    case Access::kShared64:
      return atomic_wide<kOp, Kind::kShared>;
    case Access::kGeneric:
      return atomic_wide<kOp, Kind::kGeneric>;
    default:
      return nullptr;
  }
}

}  // namespace

Handler atomic_handler(Access access, Mod op, Type type, bool result) {
  switch (type) {
    case Type::kU32:
      return integer_form<uint32_t>(access, op, result);
    case Type::kS32:
      return integer_form<int32_t>(access, op, result);
    case Type::kU64:
      return integer_form<uint64_t>(access, op, result);
    case Type::kS64:
      return integer_form<int64_t>(access, op, result);
    case Type::kB32:
      return bits_form<uint32_t>(access, op, result);
    case Type::kB64:
      return bits_form<uint64_t>(access, op, result);
    case Type::kB128:
      if (op == Mod::kExch) return wide_form<Mod::kExch>(access);
      if (op == Mod::kCas) return wide_form<Mod::kCas>(access);
      return nullptr;
    case Type::kB16:
      if (op == Mod::kCas) return plain_form<Mod::kCas, uint16_t>(access, result);
      if (op == Mod::kExch) return plain_form<Mod::kExch, uint16_t>(access, result);
      return nullptr;
    case Type::kF32:
      if (op != Mod::kAdd) return nullptr;
      if (access == Access::kGlobal) return access_form<float, AddFlush, Mod::kAdd>(access, result);
      return plain_form<Mod::kAdd, float>(access, result);
    case Type::kF64:
      return op == Mod::kAdd ? plain_form<Mod::kAdd, double>(access, result) : nullptr;
    case Type::kF16:
      return op == Mod::kAdd ? access_form<uint16_t, AddHalf<Half>, Mod::kAdd>(access, result)
                             : nullptr;
    case Type::kBf16:
      return op == Mod::kAdd ? access_form<uint16_t, AddHalf<Bfloat>, Mod::kAdd>(access, result)
                             : nullptr;
    case Type::kF16x2:
      return op == Mod::kAdd ? access_form<uint32_t, AddHalves<Half>, Mod::kAdd>(access, result)
                             : nullptr;
    case Type::kBf16x2:
      return op == Mod::kAdd ? access_form<uint32_t, AddHalves<Bfloat>, Mod::kAdd>(access, result)
                             : nullptr;
    default:
      return nullptr;
  }
}

}  // namespace gpupool::simgpu::exec::GPUPOOL_ISA
