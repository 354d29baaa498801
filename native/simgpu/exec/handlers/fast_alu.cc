// Arithmetic without what the place of an instruction makes superfluous: the mask, where the result
// is nobody else's; the canonical NaN, where nobody sees its bits. And comparisons with the branch
// or the logic that follows.
#include <unordered_map>

#include "simgpu/exec/fast_set.h"
#include "simgpu/exec/handlers/rows.h"

namespace gpupool::simgpu::exec::GPUPOOL_ISA {
namespace {

struct Add {
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (std::is_integral_v<T>) return T(std::make_unsigned_t<T>(a) + b);
    return a + b;
  }
};
struct Sub {
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (std::is_integral_v<T>) return T(std::make_unsigned_t<T>(a) - b);
    return a - b;
  }
};
struct Mul {
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (std::is_integral_v<T>) return T(std::make_unsigned_t<T>(a) * b);
    return a * b;
  }
};
struct MadLo {
  template <class T>
  T operator()(T a, T b, T c) const {
    return T(std::make_unsigned_t<T>(a) * b + c);
  }
};
struct Fma {
  float operator()(float a, float b, float c) const { return __builtin_fmaf(a, b, c); }
  double operator()(double a, double b, double c) const { return __builtin_fma(a, b, c); }
};
struct And {
  template <class T>
  T operator()(T a, T b) const {
    return T(a & b);
  }
};
struct Or {
  template <class T>
  T operator()(T a, T b) const {
    return T(a | b);
  }
};
struct Xor {
  template <class T>
  T operator()(T a, T b) const {
    return T(a ^ b);
  }
};
struct Shl {
  uint32_t operator()(uint32_t a, uint32_t n) const { return n < 32 ? a << (n & 31) : 0; }
};
struct Shr {
  uint32_t operator()(uint32_t a, uint32_t n) const { return n < 32 ? a >> (n & 31) : 0; }
};
struct ShrSigned {
  int32_t operator()(int32_t a, uint32_t n) const { return a >> (n < 32 ? n : 31); }
};
struct MulWide {
  int64_t operator()(int32_t a, int32_t b) const { return int64_t{a} * b; }
  uint64_t operator()(uint32_t a, uint32_t b) const { return uint64_t{a} * b; }
};
struct Same {
  template <class T>
  T operator()(T a) const {
    return a;
  }
};

// The canonical NaN after F.
template <class F>
struct Canonical {
  template <class... T>
  float operator()(T... a) const {
    return canonical(F{}(a...));
  }
};

// d = F(sources) for all lanes, active or not.
template <class D, class F, class A>
Ins whole1(Warp& w, Ins i) {
  D* d = row<D>(w, i->d);
  const A* a = row<const A>(w, i->a);
#pragma GCC ivdep
  for (int l = 0; l < kLanes; ++l) d[l] = D(F{}(a[l]));
  return i + 1;
}
template <class D, class F, class A, class B>
Ins whole2(Warp& w, Ins i) {
  D* d = row<D>(w, i->d);
  const A* a = row<const A>(w, i->a);
  const B* b = row<const B>(w, i->b);
#pragma GCC ivdep
  for (int l = 0; l < kLanes; ++l) d[l] = D(F{}(a[l], b[l]));
  return i + 1;
}
template <class D, class F, class A, class B, class C>
Ins whole3(Warp& w, Ins i) {
  D* d = row<D>(w, i->d);
  const A* a = row<const A>(w, i->a);
  const B* b = row<const B>(w, i->b);
  const C* c = row<const C>(w, i->c);
#pragma GCC ivdep
  for (int l = 0; l < kLanes; ++l) d[l] = D(F{}(a[l], b[l], c[l]));
  return i + 1;
}

// ---- comparisons ----

template <Mod kCompare, class T>
inline int32_t compared(T a, T b) {
  switch (kCompare) {
    case Mod::kEq:
      return -int32_t(a == b);
    case Mod::kNe:
      return std::is_floating_point_v<T> ? -int32_t(a < b) | -int32_t(a > b) : -int32_t(a != b);
    case Mod::kLt:
      return -int32_t(a < b);
    case Mod::kLe:
      return -int32_t(a <= b);
    case Mod::kGt:
      return -int32_t(a > b);
    case Mod::kGe:
      return -int32_t(a >= b);
    case Mod::kNeu:
      return -int32_t(!(a == b));
    case Mod::kLtu:
      return -int32_t(!(a >= b));
    case Mod::kLeu:
      return -int32_t(!(a > b));
    case Mod::kGtu:
      return -int32_t(!(a <= b));
    default:
      return -int32_t(!(a < b));
  }
}
template <Mod kCompare, class T>
struct Compare {
  int32_t operator()(T a, T b) const { return compared<kCompare>(a, b); }
};
template <Mod kCompare, class T>
inline uint32_t compared_bits(Warp& w, Ins i) {
  alignas(64) int32_t p[kLanes];
  const T* a = row<const T>(w, i->a);
  const T* b = row<const T>(w, i->b);
#pragma GCC ivdep
  for (int l = 0; l < kLanes; ++l) p[l] = compared<kCompare>(a[l], b[l]);
  return bits_of(p);
}

// Runs what lies between a comparison and its branch, then the branch.
inline Ins branch_after(Warp& w, Ins i, uint32_t between, uint32_t taken) {
  Ins branch = i + between;
  while (i < branch) i = i->run(w, i);
  if (taken == w.mask) {
    count_run(w, branch);
    Ins to = branch + branch->target;
    w.run_start = to;
    if (branch->target <= 0 && (w.budget <= 0 || --w.backward_left <= 0)) return end_slice(w, to);
    return to;
  }
  if (!taken) return branch + 1;
  return split_branch(w, branch, taken);
}

// setp, bra: the predicate itself is wanted by nobody else.
template <Mod kCompare, class T, bool kNot>
Ins compare_branch(Warp& w, Ins i) {
  uint32_t taken = compared_bits<kCompare, T>(w, i);
  if (kNot) taken = ~taken;
  return branch_after(w, i + 1, i->count - 1u, taken & w.mask);
}
template <Mod kCompare, class T, bool kOr, bool kNot>
Ins compare_logic_branch(Warp& w, Ins i) {
  uint32_t taken = compared_bits<kCompare, T>(w, i);
  const uint32_t other = bits_of(row<const int32_t>(w, i->e));
  taken = kOr ? taken | other : taken & other;
  if (kNot) taken = ~taken;
  return branch_after(w, i + 2, i->count - 1u, taken & w.mask);
}

// setp, and/or: only the second predicate is wanted; `e` of the setp is its other operand.
template <Mod kCompare, class T, bool kOr>
Ins compare_logic(Warp& w, Ins i) {
  Ins logic = i + 1;
  const T* a = row<const T>(w, i->a);
  const T* b = row<const T>(w, i->b);
  map_lanes<int32_t>(
      w, logic->d,
      [](T x, T y, int32_t q) {
        const int32_t p = compared<kCompare>(x, y);
        return kOr ? p | q : p & q;
      },
      a, b, row<const int32_t>(w, i->e));
  return i + 2;
}
template <Mod kCompare, class T, bool kOr>
Ins compare_logic_whole(Warp& w, Ins i) {
  Ins logic = i + 1;
  int32_t* d = row<int32_t>(w, logic->d);
  const T* a = row<const T>(w, i->a);
  const T* b = row<const T>(w, i->b);
  const int32_t* q = row<const int32_t>(w, i->e);
#pragma GCC ivdep
  for (int l = 0; l < kLanes; ++l) {
    const int32_t p = compared<kCompare>(a[l], b[l]);
    d[l] = kOr ? p | q[l] : p & q[l];
  }
  return i + 2;
}

// ---- the tables: forms by the general handler ----

using Forms = std::unordered_map<Handler, FastForms>;

template <class T, Mod kCompare>
void add_compare(Forms& forms, Type type) {
  const Handler general = setp_handler(type, kCompare, false);
  if (!general) return;
  FastForms& f = forms[general];
  f.whole = f.whole_raw = whole2<int32_t, Compare<kCompare, T>, T, T>;
  f.branch[0] = compare_branch<kCompare, T, false>;
  f.branch[1] = compare_branch<kCompare, T, true>;
  f.logic[0] = compare_logic<kCompare, T, false>;
  f.logic[1] = compare_logic<kCompare, T, true>;
  f.logic_whole[0] = compare_logic_whole<kCompare, T, false>;
  f.logic_whole[1] = compare_logic_whole<kCompare, T, true>;
  f.logic_branch[0][0] = compare_logic_branch<kCompare, T, false, false>;
  f.logic_branch[0][1] = compare_logic_branch<kCompare, T, false, true>;
  f.logic_branch[1][0] = compare_logic_branch<kCompare, T, true, false>;
  f.logic_branch[1][1] = compare_logic_branch<kCompare, T, true, true>;
}
template <class T>
void add_compares(Forms& forms, Type type) {
  add_compare<T, Mod::kEq>(forms, type);
  add_compare<T, Mod::kNe>(forms, type);
  add_compare<T, Mod::kLt>(forms, type);
  add_compare<T, Mod::kLe>(forms, type);
  add_compare<T, Mod::kGt>(forms, type);
  add_compare<T, Mod::kGe>(forms, type);
  if constexpr (std::is_floating_point_v<T>) {
    add_compare<T, Mod::kNeu>(forms, type);
    add_compare<T, Mod::kLtu>(forms, type);
    add_compare<T, Mod::kLeu>(forms, type);
    add_compare<T, Mod::kGtu>(forms, type);
    add_compare<T, Mod::kGeu>(forms, type);
  }
}
void add_whole(Forms& forms, Handler general, Handler whole) {
  if (!general) return;
  FastForms& f = forms[general];
  f.whole = f.whole_raw = whole;
}
template <class F>
void add_float2(Forms& forms, Op op) {
  FastForms& f = forms[floating_handler(op, Type::kF32, {})];
  f.whole = whole2<float, Canonical<F>, float, float>;
  f.whole_raw = whole2<float, F, float, float>;
  f.raw = binary<float, float, float, F>;
}
template <class T>
void add_integers(Forms& forms, Type type) {
  const auto of = [&](Op op, Mod mode) { return integer_handler(op, type, mode, false); };
  add_whole(forms, of(Op::kAdd, Mod::kUnknown), whole2<T, Add, T, T>);
  add_whole(forms, of(Op::kSub, Mod::kUnknown), whole2<T, Sub, T, T>);
  if constexpr (sizeof(T) == 4) {
    add_whole(forms, of(Op::kMul, Mod::kLo), whole2<T, Mul, T, T>);
    add_whole(forms, of(Op::kMad, Mod::kLo), whole3<T, MadLo, T, T, T>);
    using W = decltype(MulWide{}(T{}, T{}));
    add_whole(forms, of(Op::kMul, Mod::kWide), whole2<W, MulWide, T, T>);
  }
}
template <class T>
void add_bits(Forms& forms, Type type) {
  const auto of = [&](Op op) { return integer_handler(op, type, Mod::kUnknown, false); };
  add_whole(forms, of(Op::kAnd), whole2<T, And, T, T>);
  add_whole(forms, of(Op::kOr), whole2<T, Or, T, T>);
  add_whole(forms, of(Op::kXor), whole2<T, Xor, T, T>);
}

const Forms& all_forms() {
  static const Forms forms = [] {
    Forms f;
    add_float2<Add>(f, Op::kAdd);
    add_float2<Sub>(f, Op::kSub);
    add_float2<Mul>(f, Op::kMul);
    FastForms& fma = f[floating_handler(Op::kFma, Type::kF32, {})];
    fma.whole = whole3<float, Canonical<Fma>, float, float, float>;
    fma.whole_raw = whole3<float, Fma, float, float, float>;
    fma.raw = ternary<float, float, float, float, Fma>;
    add_whole(f, floating_handler(Op::kAdd, Type::kF64, {}), whole2<double, Add, double, double>);
    add_whole(f, floating_handler(Op::kSub, Type::kF64, {}), whole2<double, Sub, double, double>);
    add_whole(f, floating_handler(Op::kMul, Type::kF64, {}), whole2<double, Mul, double, double>);
    add_whole(f, floating_handler(Op::kFma, Type::kF64, {}),
              whole3<double, Fma, double, double, double>);
    add_integers<int32_t>(f, Type::kS32);
    add_integers<uint32_t>(f, Type::kU32);
    add_integers<int64_t>(f, Type::kS64);
    add_integers<uint64_t>(f, Type::kU64);
    add_bits<uint32_t>(f, Type::kB32);
    add_bits<uint64_t>(f, Type::kB64);
    add_whole(f, integer_handler(Op::kShl, Type::kB32, Mod::kUnknown, false),
              whole2<uint32_t, Shl, uint32_t, uint32_t>);
    add_whole(f, integer_handler(Op::kShr, Type::kU32, Mod::kUnknown, false),
              whole2<uint32_t, Shr, uint32_t, uint32_t>);
    add_whole(f, integer_handler(Op::kShr, Type::kS32, Mod::kUnknown, false),
              whole2<int32_t, ShrSigned, int32_t, uint32_t>);
    add_whole(f, move_handler(4), whole1<uint32_t, Same, uint32_t>);
    add_whole(f, move_handler(8), whole1<uint64_t, Same, uint64_t>);
    add_whole(f, predicate_handler(Op::kAnd), whole2<int32_t, And, int32_t, int32_t>);
    add_whole(f, predicate_handler(Op::kOr), whole2<int32_t, Or, int32_t, int32_t>);
    add_compares<int32_t>(f, Type::kS32);
    add_compares<uint32_t>(f, Type::kU32);
    add_compares<float>(f, Type::kF32);
    add_compares<int64_t>(f, Type::kS64);
    add_compares<uint64_t>(f, Type::kU64);
    add_compares<double>(f, Type::kF64);
    return f;
  }();
  return forms;
}

}  // namespace

FastForms fast_forms(Handler general) {
  const Forms& forms = all_forms();
  const auto it = forms.find(general);
  return it == forms.end() ? FastForms{} : it->second;
}

}  // namespace gpupool::simgpu::exec::GPUPOOL_ISA
