// Frequent arithmetic, comparisons and branches, many in one call: a loop over instructions that
// have a kind, with the last 32-bit result in processor registers (the accumulator). What only the
// next instruction wants is never stored. Whole rows are written wherever that harms no waiting
// lane (see Instruction::conflicts); else the general handler does the work.
#include <unordered_map>

#include "simgpu/exec/fast_set.h"
#include "simgpu/exec/handlers/rows.h"

namespace gpupool::simgpu::exec::GPUPOOL_ISA {
namespace {

// ---- lanes in processor registers ----

#ifdef __AVX2__
constexpr int kParts = 4;
#else
constexpr int kParts = 8;
#endif
constexpr int kPartBytes = 4 * kLanes / kParts;
typedef int32_t I __attribute__((vector_size(kPartBytes)));
typedef uint32_t U __attribute__((vector_size(kPartBytes)));
typedef float F __attribute__((vector_size(kPartBytes)));

#define GPUPOOL_INLINE inline __attribute__((always_inline))

GPUPOOL_INLINE F canonical(F r) { return (r == r) ? r : (F)(U{} | 0x7fffffffu); }
GPUPOOL_INLINE F fused(F a, F b, F c) {
#ifdef __FMA__
  return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  F r;
  for (int k = 0; k < kLanes / kParts; ++k) r[k] = __builtin_fmaf(a[k], b[k], c[k]);
  return r;
#endif
}
GPUPOOL_INLINE U left(U a, U n) { return (n < 32) ? a << (n & 31) : U{}; }
GPUPOOL_INLINE U right(U a, U n) { return (n < 32) ? a >> (n & 31) : U{}; }
GPUPOOL_INLINE U right_signed(U a, U n) { return (U)((I)a >> (I)((n < 32) ? n : U{} | 31)); }
inline double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline uint64_t left64(uint64_t a, uint32_t n) { return n < 64 ? a << (n & 63) : 0; }
inline uint64_t right64(uint64_t a, uint32_t n) { return n < 64 ? a >> (n & 63) : 0; }

struct Accumulator {
  I v0, v1, v2, v3;
#ifndef __AVX2__
  I v4, v5, v6, v7;
#endif
  template <class Fn>
  GPUPOOL_INLINE void each(Fn fn) {
    fn(v0, 0), fn(v1, 1), fn(v2, 2), fn(v3, 3);
#ifndef __AVX2__
    fn(v4, 4), fn(v5, 5), fn(v6, 6), fn(v7, 7);
#endif
  }
  GPUPOOL_INLINE void load(const std::byte* row) {
    each([row](I& v, int k) { v = reinterpret_cast<const I*>(row)[k]; });
  }
  GPUPOOL_INLINE void store(std::byte* row) const {
    const_cast<Accumulator*>(this)->each([row](I& v, int k) { reinterpret_cast<I*>(row)[k] = v; });
  }
  // Lanes whose mask word isn't 0.
  GPUPOOL_INLINE void store(std::byte* row, const int32_t* mask) const {
    const_cast<Accumulator*>(this)->each([row, mask](I& v, int k) {
      I& d = reinterpret_cast<I*>(row)[k];
      d = (reinterpret_cast<const I*>(mask)[k] != 0) ? v : d;
    });
  }
  GPUPOOL_INLINE uint32_t bits() const {
#ifdef __AVX2__
    const auto of = [](I v) { return uint32_t(_mm256_movemask_ps((__m256)v)); };
    return of(v0) | of(v1) << 8 | of(v2) << 16 | of(v3) << 24;
#else
    alignas(64) int32_t p[kLanes];
    store(reinterpret_cast<std::byte*>(p));
    return bits_of(p);
#endif
  }
};

// ---- kinds ----

// clang-format off
// X(kind, type of the operands, value of a b c, commutative, general handler). Kinds of two
// operands come in four forms, by where a and b are; Raw: any NaN instead of the canonical one.
#define GPUPOOL_FLOATS(X)                                                                         \
  X(AddF32, F, canonical(a + b), true, of_float(Op::kAdd, Type::kF32))                            \
  X(SubF32, F, canonical(a - b), false, of_float(Op::kSub, Type::kF32))                           \
  X(MulF32, F, canonical(a * b), true, of_float(Op::kMul, Type::kF32))
#define GPUPOOL_RAW_FLOATS(X)                                                                     \
  X(AddRaw, F, a + b, true, of_float(Op::kAdd, Type::kF32))                                       \
  X(SubRaw, F, a - b, false, of_float(Op::kSub, Type::kF32))                                      \
  X(MulRaw, F, a * b, true, of_float(Op::kMul, Type::kF32))
#define GPUPOOL_INTEGERS(X)                                                                       \
  X(AddS32, U, a + b, true, of_integer(Op::kAdd, Type::kS32))                                     \
  X(SubS32, U, a - b, false, of_integer(Op::kSub, Type::kS32))                                    \
  X(MulS32, U, a * b, true, of_integer(Op::kMul, Type::kS32, Mod::kLo))                           \
  X(And32, U, a & b, true, of_integer(Op::kAnd, Type::kB32))                                      \
  X(Or32, U, a | b, true, of_integer(Op::kOr, Type::kB32))                                        \
  X(Xor32, U, a ^ b, true, of_integer(Op::kXor, Type::kB32))                                      \
  X(Shl32, U, left(a, b), false, of_integer(Op::kShl, Type::kB32))                                \
  X(ShrU32, U, right(a, b), false, of_integer(Op::kShr, Type::kU32))                              \
  X(ShrS32, U, right_signed(a, b), false, of_integer(Op::kShr, Type::kS32))
#define GPUPOOL_COMPARE(X, name, T, value, commutative, type, compare)                            \
  X(name, T, value, commutative, setp_handler(Type::type, Mod::compare, false))
#define GPUPOOL_COMPARES(X)                                                                       \
  GPUPOOL_COMPARE(X, EqS32, I, a == b, true, kS32, kEq)                                           \
  GPUPOOL_COMPARE(X, NeS32, I, a != b, true, kS32, kNe)                                           \
  GPUPOOL_COMPARE(X, LtS32, I, a < b, false, kS32, kLt)                                           \
  GPUPOOL_COMPARE(X, LeS32, I, a <= b, false, kS32, kLe)                                          \
  GPUPOOL_COMPARE(X, GtS32, I, a > b, false, kS32, kGt)                                           \
  GPUPOOL_COMPARE(X, GeS32, I, a >= b, false, kS32, kGe)                                          \
  GPUPOOL_COMPARE(X, LtU32, U, a < b, false, kU32, kLt)                                           \
  GPUPOOL_COMPARE(X, LeU32, U, a <= b, false, kU32, kLe)                                          \
  GPUPOOL_COMPARE(X, GtU32, U, a > b, false, kU32, kGt)                                           \
  GPUPOOL_COMPARE(X, GeU32, U, a >= b, false, kU32, kGe)                                          \
  GPUPOOL_COMPARE(X, EqF32, F, a == b, true, kF32, kEq)                                           \
  GPUPOOL_COMPARE(X, NeF32, F, (a < b) | (a > b), true, kF32, kNe)                                \
  GPUPOOL_COMPARE(X, LtF32, F, a < b, false, kF32, kLt)                                           \
  GPUPOOL_COMPARE(X, LeF32, F, a <= b, false, kF32, kLe)                                          \
  GPUPOOL_COMPARE(X, GtF32, F, a > b, false, kF32, kGt)                                           \
  GPUPOOL_COMPARE(X, GeF32, F, a >= b, false, kF32, kGe)                                          \
  GPUPOOL_COMPARE(X, NeuF32, F, ~(a == b), true, kF32, kNeu)                                      \
  GPUPOOL_COMPARE(X, LtuF32, F, ~(a >= b), false, kF32, kLtu)                                     \
  GPUPOOL_COMPARE(X, LeuF32, F, ~(a > b), false, kF32, kLeu)                                      \
  GPUPOOL_COMPARE(X, GtuF32, F, ~(a <= b), false, kF32, kGtu)                                     \
  GPUPOOL_COMPARE(X, GeuF32, F, ~(a < b), false, kF32, kGeu)
#define GPUPOOL_TWO(X)                                                                            \
  GPUPOOL_FLOATS(X) GPUPOOL_RAW_FLOATS(X) GPUPOOL_INTEGERS(X) GPUPOOL_COMPARES(X)
// With a in memory or the accumulator.
#define GPUPOOL_OTHERS(X)                                                                         \
  X(MadS32, U, a * b + c, true, of_integer(Op::kMad, Type::kS32, Mod::kLo))                       \
  X(MinS32, I, (a < b) ? a : b, true, of_integer(Op::kMin, Type::kS32))                           \
  X(MaxS32, I, (a > b) ? a : b, true, of_integer(Op::kMax, Type::kS32))                           \
  X(MinU32, U, (a < b) ? a : b, true, of_integer(Op::kMin, Type::kU32))                           \
  X(MaxU32, U, (a > b) ? a : b, true, of_integer(Op::kMax, Type::kU32))                           \
  X(AndP, I, a & b, true, predicate_handler(Op::kAnd))                                            \
  X(OrP, I, a | b, true, predicate_handler(Op::kOr))                                              \
  X(NotP, I, ~a, false, predicate_handler(Op::kNot))                                              \
  X(FmaF32, F, canonical(fused(a, b, c)), true, of_float(Op::kFma, Type::kF32))                   \
  X(FmaRaw, F, fused(a, b, c), true, of_float(Op::kFma, Type::kF32))
// With c in memory or the accumulator.
#define GPUPOOL_THIRD(X)                                                                          \
  X(Select32, I, (c != 0) ? a : b, false, selp_handler(4))                                        \
  X(FmaF32C, F, canonical(fused(a, b, c)), true, nullptr)                                         \
  X(FmaRawC, F, fused(a, b, c), true, nullptr)                                                    \
  X(MadS32C, U, a * b + c, true, nullptr)
// X(kind, result, a, b, value, general handler): these leave the accumulator alone.
#define GPUPOOL_COMPARE64(X, name, T, value, type, compare)                                       \
  X(name, int32_t, T, T, -int32_t(value), setp_handler(Type::type, Mod::compare, false))
#define GPUPOOL_COMPARES64(X, suffix, T, type)                                                    \
  GPUPOOL_COMPARE64(X, Eq##suffix, T, a == b, type, kEq)                                          \
  GPUPOOL_COMPARE64(X, Lt##suffix, T, a < b, type, kLt)                                           \
  GPUPOOL_COMPARE64(X, Le##suffix, T, a <= b, type, kLe)                                          \
  GPUPOOL_COMPARE64(X, Gt##suffix, T, a > b, type, kGt)                                           \
  GPUPOOL_COMPARE64(X, Ge##suffix, T, a >= b, type, kGe)
#define GPUPOOL_WIDE(X)                                                                           \
  X(AddF64, double, double, double, a + b, of_float(Op::kAdd, Type::kF64))                        \
  X(SubF64, double, double, double, a - b, of_float(Op::kSub, Type::kF64))                        \
  X(MulF64, double, double, double, a * b, of_float(Op::kMul, Type::kF64))                        \
  X(FmaF64, double, double, double, fused(a, b, c), of_float(Op::kFma, Type::kF64))               \
  X(AddS64, uint64_t, uint64_t, uint64_t, a + b, of_integer(Op::kAdd, Type::kS64))                \
  X(SubS64, uint64_t, uint64_t, uint64_t, a - b, of_integer(Op::kSub, Type::kS64))                \
  X(WideS32, int64_t, int32_t, int32_t, int64_t{a} * b,                                           \
    of_integer(Op::kMul, Type::kS32, Mod::kWide))                                                 \
  X(WideU32, uint64_t, uint32_t, uint32_t, uint64_t{a} * b,                                       \
    of_integer(Op::kMul, Type::kU32, Mod::kWide))                                                 \
  X(ExtendS32, int64_t, int32_t, int32_t, a, extend_handler(4, Type::kS32, 8))                    \
  X(ExtendU32, uint64_t, uint32_t, uint32_t, a, extend_handler(4, Type::kU32, 8))                 \
  X(And64, uint64_t, uint64_t, uint64_t, a & b, of_integer(Op::kAnd, Type::kB64))                 \
  X(Or64, uint64_t, uint64_t, uint64_t, a | b, of_integer(Op::kOr, Type::kB64))                   \
  X(Xor64, uint64_t, uint64_t, uint64_t, a ^ b, of_integer(Op::kXor, Type::kB64))                 \
  X(Shl64, uint64_t, uint64_t, uint32_t, left64(a, b), of_integer(Op::kShl, Type::kB64))          \
  X(ShrU64, uint64_t, uint64_t, uint32_t, right64(a, b), of_integer(Op::kShr, Type::kU64))        \
  X(Move32, uint32_t, uint32_t, uint32_t, a, move_handler(4))                                     \
  X(Move64, uint64_t, uint64_t, uint64_t, a, move_handler(8))                                     \
  GPUPOOL_COMPARES64(X, S64, int64_t, kS64)                                                       \
  GPUPOOL_COMPARE64(X, NeS64, int64_t, a != b, kS64, kNe)                                         \
  GPUPOOL_COMPARES64(X, U64, uint64_t, kU64)                                                      \
  GPUPOOL_COMPARE64(X, NeU64, uint64_t, a != b, kU64, kNe)                                        \
  GPUPOOL_COMPARES64(X, F64, double, kF64)                                                        \
  GPUPOOL_COMPARE64(X, NeF64, double, (a < b) | (a > b), kF64, kNe)                               \
  GPUPOOL_COMPARE64(X, NeuF64, double, !(a == b), kF64, kNeu)                                     \
  GPUPOOL_COMPARE64(X, LtuF64, double, !(a >= b), kF64, kLtu)                                     \
  GPUPOOL_COMPARE64(X, LeuF64, double, !(a > b), kF64, kLeu)                                      \
  GPUPOOL_COMPARE64(X, GtuF64, double, !(a <= b), kF64, kGtu)                                     \
  GPUPOOL_COMPARE64(X, GeuF64, double, !(a < b), kF64, kGeu)

// All kinds in order, each as GPUPOOL_KIND(name).
#define GPUPOOL_FORMS4(name, ...)                                                                 \
  GPUPOOL_KIND(name) GPUPOOL_KIND(name##A) GPUPOOL_KIND(name##K) GPUPOOL_KIND(name##AK)
#define GPUPOOL_FORMS2(name, ...) GPUPOOL_KIND(name) GPUPOOL_KIND(name##A)
#define GPUPOOL_FORMS1(name, ...) GPUPOOL_KIND(name)
// A: a (of Select32 and the kinds with C: c) is the accumulator; B: b is; K: b is constant. Twice,
// Square: a + a, a * a.
#define GPUPOOL_ALL_KINDS                                                                         \
  GPUPOOL_KIND(None) GPUPOOL_KIND(Edge)                                                           \
  GPUPOOL_KIND(Branch) GPUPOOL_KIND(BranchIf) GPUPOOL_KIND(BranchIfA)                             \
  GPUPOOL_KIND(BranchIfNot) GPUPOOL_KIND(BranchIfNotA)                                            \
  GPUPOOL_KIND(Twice) GPUPOOL_KIND(TwiceRaw) GPUPOOL_KIND(Square) GPUPOOL_KIND(SquareRaw)         \
  GPUPOOL_KIND(SubF32B) GPUPOOL_KIND(SubRawB) GPUPOOL_KIND(SubS32B)                               \
  GPUPOOL_TWO(GPUPOOL_FORMS4) GPUPOOL_OTHERS(GPUPOOL_FORMS2)                                      \
  GPUPOOL_THIRD(GPUPOOL_FORMS2) GPUPOOL_WIDE(GPUPOOL_FORMS1)
// clang-format on
enum Kind : uint8_t {
#define GPUPOOL_KIND(name) k##name,
  GPUPOOL_ALL_KINDS
#undef GPUPOOL_KIND
      kCount,
};
static_assert(kEdge == kStraightEdge);
static_assert(kCount < 255);

Handler of_float(Op op, Type type) { return floating_handler(op, type, {}); }
Handler of_integer(Op op, Type type, Mod mode = Mod::kUnknown) {
  return integer_handler(op, type, mode, false);
}

struct Kinds {
  std::unordered_map<Handler, StraightForms> canonical, raw;
};
const Kinds& all_kinds() {
  static const Kinds kinds = [] {
    Kinds k;
    auto& m = k.canonical;
#define GPUPOOL_ADD(name, type, value, commutes, general)             \
  m.try_emplace(general, StraightForms{.memory = k##name,             \
                                       .first = k##name##A,           \
                                       .constant = k##name##K,        \
                                       .first_constant = k##name##AK, \
                                       .commutative = commutes});
    GPUPOOL_FLOATS(GPUPOOL_ADD)
    GPUPOOL_INTEGERS(GPUPOOL_ADD)
    GPUPOOL_COMPARES(GPUPOOL_ADD)
#undef GPUPOOL_ADD
#define GPUPOOL_ADD(name, type, value, commutes, general)                 \
  k.raw.try_emplace(general, StraightForms{.memory = k##name,             \
                                           .first = k##name##A,           \
                                           .constant = k##name##K,        \
                                           .first_constant = k##name##AK, \
                                           .commutative = commutes});
    GPUPOOL_RAW_FLOATS(GPUPOOL_ADD)
#undef GPUPOOL_ADD
#define GPUPOOL_ADD(name, type, value, commutes, general) \
  m.try_emplace(general,                                  \
                StraightForms{.memory = k##name, .first = k##name##A, .commutative = commutes});
    GPUPOOL_OTHERS(GPUPOOL_ADD)
#undef GPUPOOL_ADD
#define GPUPOOL_ADD(name, result, a, b, value, general) \
  m.try_emplace(general, StraightForms{.memory = k##name, .accumulates = false});
    GPUPOOL_WIDE(GPUPOOL_ADD)
#undef GPUPOOL_ADD
    const Handler add = of_float(Op::kAdd, Type::kF32), mul = of_float(Op::kMul, Type::kF32),
                  sub = of_float(Op::kSub, Type::kF32), fma = of_float(Op::kFma, Type::kF32),
                  mad = of_integer(Op::kMad, Type::kS32, Mod::kLo);
    m[add].same = kTwice, k.raw[add].same = kTwiceRaw;
    m[mul].same = kSquare, k.raw[mul].same = kSquareRaw;
    m[sub].second = kSubF32B, k.raw[sub].second = kSubRawB;
    m[fma].third = kFmaF32CA;
    k.raw[fma] = {.memory = kFmaRaw, .first = kFmaRawA, .third = kFmaRawCA, .commutative = true};
    m[mad].third = kMadS32CA;
    m[of_integer(Op::kSub, Type::kS32)].second = kSubS32B;
    m[selp_handler(4)] = {.memory = kSelect32, .third = kSelect32A};
    m[control_handler(Op::kBra, Mod::kUni, false)] = {.memory = kBranch, .accumulates = false};
    m[control_handler(Op::kBra, Mod::kUnknown, false)] = {
        .memory = kBranchIf, .first = kBranchIfA, .accumulates = false};
    m[control_handler(Op::kBra, Mod::kUnknown, true)] = {
        .memory = kBranchIfNot, .first = kBranchIfNotA, .accumulates = false};
    // The sign doesn't matter.
    const auto alike = [&](Op op, Type type, Type other, Mod mode = Mod::kUnknown) {
      m[of_integer(op, type, mode)] = m[of_integer(op, other, mode)];
    };
    for (const Op op : {Op::kAdd, Op::kSub}) {
      alike(op, Type::kU32, Type::kS32);
      alike(op, Type::kU64, Type::kS64);
    }
    for (const Op op : {Op::kMul, Op::kMad}) alike(op, Type::kU32, Type::kS32, Mod::kLo);
    alike(Op::kShr, Type::kB32, Type::kU32);
    for (const Mod c : {Mod::kEq, Mod::kNe})
      for (const Type t : {Type::kU32, Type::kB32})
        m[setp_handler(t, c, false)] = m[setp_handler(Type::kS32, c, false)];
    m.erase(nullptr);
    return k;
  }();
  return kinds;
}

// ---- running them ----

enum class Held { kNothing, kA, kB, kC };  // which operand is in the accumulator

template <class T, Held kHeld, bool kConstant, class Fn>
GPUPOOL_INLINE void compute(std::byte* rows, Ins i, Accumulator& accumulator, Fn fn) {
  const auto at = [rows](uint32_t offset) {
    return reinterpret_cast<const T*>(__builtin_assume_aligned(rows + offset, 64));
  };
  const T *a = at(i->a), *b = at(i->b), *c = at(i->c);
  const T same = kConstant ? (T)(U{} | *reinterpret_cast<const uint32_t*>(b)) : T{};
  accumulator.each([&](I& v, int k) {
    const T x = kHeld == Held::kA ? (T)v : a[k];
    const T y = kConstant ? same : kHeld == Held::kB ? (T)v : b[k];
    const T z = kHeld == Held::kC ? (T)v : c[k];
    v = (I)fn(x, y, z);
  });
}
template <class D, class A, class B, class Fn>
GPUPOOL_INLINE void compute_wide(std::byte* rows, Ins i, Fn fn) {
  const auto at = [rows](uint32_t offset) { return __builtin_assume_aligned(rows + offset, 64); };
  D* d = static_cast<D*>(at(i->d));
  const A* a = static_cast<const A*>(at(i->a));
  const B* b = static_cast<const B*>(at(i->b));
  const D* c = static_cast<const D*>(at(i->c));
#pragma GCC ivdep
  for (int l = 0; l < kLanes; ++l) d[l] = fn(a[l], b[l], c[l]);
}

// As the handler of bra, for the lanes `taken`.
GPUPOOL_INLINE Ins branch(Warp& w, Ins i, uint32_t taken) {
  taken &= w.mask;
  if (taken == w.mask) {
    count_run(w, i);
    Ins to = i + i->target;
    w.run_start = to;
    if (i->target <= 0 && (w.budget <= 0 || --w.backward_left <= 0)) return end_slice(w, to);
    return to;
  }
  return taken ? split_branch(w, i, taken) : i + 1;
}

}  // namespace

// Paths can stop only at edges here, so nothing else looks at the limit. Each instruction ends with
// a jump of its own to the next, which processors predict better than one for all.
Ins run_straight(Warp& w, Ins i) {
  static const void* const labels[] = {
#define GPUPOOL_KIND(name) &&at_##name,
      GPUPOOL_ALL_KINDS
#undef GPUPOOL_KIND
  };
  std::byte* const rows = w.rows;
  uint32_t waiting = w.waiting, taken;
  Accumulator held{};
#define GPUPOOL_NEXT goto* labels[(++i)->kind]
  goto* labels[i->kind];

at_None:
  return i;
at_Edge:
  if (i >= w.limit) return i;
  if (i->e) row<AddressPattern>(w, i->e)->known = 0;
  goto* labels[i->count];

at_Branch:
  taken = kAllLanes;
  goto branch;
at_BranchIf:
  taken = bits_of(reinterpret_cast<const int32_t*>(rows + i->a));
  goto branch;
at_BranchIfNot:
  taken = ~bits_of(reinterpret_cast<const int32_t*>(rows + i->a));
  goto branch;
at_BranchIfA:
  taken = held.bits();
  goto branch;
at_BranchIfNotA:
  taken = ~held.bits();
branch:
  i = branch(w, i, taken);
  if (i->kind != kEdge) return i;  // where it leads is an edge, or not for this loop
  waiting = w.waiting;
  held = Accumulator{};
  goto at_Edge;

#define GPUPOOL_FORM(name, T, where, constant, value)                              \
  at_##name : compute<T, Held::where, constant>(rows, i, held, [](T a, T b, T c) { \
    (void)a, (void)b, (void)c;                                                     \
    return value;                                                                  \
  });                                                                              \
  if (i->immediate) GPUPOOL_NEXT;                                                  \
  if (__builtin_expect(i->conflicts & waiting, 0)) goto store_masked;              \
  held.store(rows + i->d);                                                         \
  GPUPOOL_NEXT;
#define GPUPOOL_RUN(name, T, value, ...)          \
  GPUPOOL_FORM(name, T, kNothing, false, value)   \
  GPUPOOL_FORM(name##A, T, kA, false, value)      \
  GPUPOOL_FORM(name##K, T, kNothing, true, value) \
  GPUPOOL_FORM(name##AK, T, kA, true, value)
  GPUPOOL_TWO(GPUPOOL_RUN)
#undef GPUPOOL_RUN
#define GPUPOOL_RUN(name, T, value, ...)        \
  GPUPOOL_FORM(name, T, kNothing, false, value) \
  GPUPOOL_FORM(name##A, T, kA, false, value)
  GPUPOOL_OTHERS(GPUPOOL_RUN)
#undef GPUPOOL_RUN
#define GPUPOOL_RUN(name, T, value, ...)        \
  GPUPOOL_FORM(name, T, kNothing, false, value) \
  GPUPOOL_FORM(name##A, T, kC, false, value)
  GPUPOOL_THIRD(GPUPOOL_RUN)
#undef GPUPOOL_RUN
  GPUPOOL_FORM(SubF32B, F, kB, false, canonical(a - b))
  GPUPOOL_FORM(SubRawB, F, kB, false, a - b)
  GPUPOOL_FORM(SubS32B, U, kB, false, a - b)
  GPUPOOL_FORM(Twice, F, kNothing, false, canonical(a + a))
  GPUPOOL_FORM(TwiceRaw, F, kNothing, false, a + a)
  GPUPOOL_FORM(Square, F, kNothing, false, canonical(a * a))
  GPUPOOL_FORM(SquareRaw, F, kNothing, false, a * a)
#undef GPUPOOL_FORM
#define GPUPOOL_RUN(name, D, A, B, value, general)                          \
  at_##name : if (__builtin_expect(i->conflicts & waiting, 0)) goto masked; \
  compute_wide<D, A, B>(rows, i, [](A a, B b, D c) -> D {                   \
    (void)b, (void)c;                                                       \
    return D(value);                                                        \
  });                                                                       \
  GPUPOOL_NEXT;
  GPUPOOL_WIDE(GPUPOOL_RUN)
#undef GPUPOOL_RUN

store_masked:
  held.store(rows + i->d, lane_words<4>(w));
  GPUPOOL_NEXT;
masked: {
  // By way of memory that the compiler knows nothing of, so that the accumulator stays in registers
  // everywhere else.
  alignas(64) std::byte memory[4 * kLanes];
  held.store(memory);
  std::byte* back = memory;
  asm volatile("" : "+r"(back)::"memory");
  i->inner(w, i);
  held.load(back);
  GPUPOOL_NEXT;
}
#undef GPUPOOL_NEXT
}

StraightForms straight_forms(Handler general, bool raw) {
  const Kinds& kinds = all_kinds();
  if (raw) {
    const auto it = kinds.raw.find(general);
    if (it != kinds.raw.end()) return it->second;
  }
  const auto it = kinds.canonical.find(general);
  return it == kinds.canonical.end() ? StraightForms{} : it->second;
}

}  // namespace gpupool::simgpu::exec::GPUPOOL_ISA
