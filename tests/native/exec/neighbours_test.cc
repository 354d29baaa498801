// Instructions that the engine treats differently by where their operands come from: from the
// instruction before, from a constant, twice from the same register. Against scalar references.
#include "exec_test_support.h"

namespace gpupool::simgpu {
namespace {

using Two = std::function<uint64_t(uint64_t, uint64_t)>;
struct Operation {
  std::string name;
  Two value;
  std::string constant;  // as the text has it
  uint64_t bits;         // of the constant
  Compare compare = Compare::kBits;
  bool predicate = false;  // the result is one
};

int32_t s(uint64_t x) { return static_cast<int32_t>(x); }
uint32_t u(uint64_t x) { return static_cast<uint32_t>(x); }

std::vector<Operation> operations() {
  std::vector<Operation> all;
  const auto integer = [&](const char* name, const Two& value) {
    all.push_back({name, value, "13", 13});
  };
  integer("add.s32", [](uint64_t a, uint64_t b) { return u(a) + u(b); });
  integer("sub.u32", [](uint64_t a, uint64_t b) { return u(a) - u(b); });
  integer("mul.lo.s32", [](uint64_t a, uint64_t b) { return u(a) * u(b); });
  integer("and.b32", [](uint64_t a, uint64_t b) { return a & b; });
  integer("or.b32", [](uint64_t a, uint64_t b) { return a | b; });
  integer("xor.b32", [](uint64_t a, uint64_t b) { return a ^ b; });
  integer("shl.b32", [](uint64_t a, uint64_t b) { return u(b) < 32 ? u(a) << u(b) : 0; });
  integer("shr.u32", [](uint64_t a, uint64_t b) { return u(b) < 32 ? u(a) >> u(b) : 0; });
  integer("shr.s32",
          [](uint64_t a, uint64_t b) { return u(uint64_t(s(a) >> (u(b) < 32 ? u(b) : 31))); });
  integer("min.s32", [](uint64_t a, uint64_t b) { return u(uint64_t(std::min(s(a), s(b)))); });
  integer("max.u32", [](uint64_t a, uint64_t b) { return std::max(u(a), u(b)); });
  const auto floating = [&](const char* name, float (*value)(float, float)) {
    all.push_back({name, [=](uint64_t a, uint64_t b) { return bits32(value(f32(a), f32(b))); },
                   "0f3FC00000", 0x3fc00000, Compare::kF32});
  };
  floating("add.f32", [](float a, float b) { return a + b; });
  floating("sub.f32", [](float a, float b) { return a - b; });
  floating("mul.f32", [](float a, float b) { return a * b; });
  const auto comparison = [&](const std::string& name, const Two& value, bool is_float) {
    all.push_back({"setp." + name, value, is_float ? "0f3FC00000" : "13",
                   is_float ? 0x3fc00000u : 13u, Compare::kBits, true});
  };
#define GPUPOOL_ORDER(name, op)                                                        \
  comparison(name ".s32", [](uint64_t a, uint64_t b) { return s(a) op s(b); }, false); \
  comparison(name ".u32", [](uint64_t a, uint64_t b) { return u(a) op u(b); }, false); \
  comparison(                                                                          \
      name ".f32",                                                                     \
      [](uint64_t a, uint64_t b) {                                                     \
        return !std::isnan(f32(a)) && !std::isnan(f32(b)) && f32(a) op f32(b);         \
      },                                                                               \
      true);                                                                           \
  comparison(                                                                          \
      name "u.f32",                                                                    \
      [](uint64_t a, uint64_t b) {                                                     \
        return std::isnan(f32(a)) || std::isnan(f32(b)) || f32(a) op f32(b);           \
      },                                                                               \
      true);
  GPUPOOL_ORDER("eq", ==)
  GPUPOOL_ORDER("ne", !=)
  GPUPOOL_ORDER("lt", <)
  GPUPOOL_ORDER("le", <=)
  GPUPOOL_ORDER("gt", >)
  GPUPOOL_ORDER("ge", >=)
#undef GPUPOOL_ORDER
  return all;
}

Inputs inputs_for(const Operation& o) {
  std::vector<uint64_t> v = integer_values(32);
  if (o.bits != 13) v = f32_values();
  v.push_back(o.bits);
  Inputs inputs = combine(v, v, {0}, 300, o.bits == 13 ? Compare::kBits : Compare::kF32);
  for (auto& x : inputs) x[2] = 0;
  return inputs;
}

TEST(ExecNeighbours, OperandsFromTheInstructionBefore) {
  for (const Operation& o : operations()) {
    const Shape shape{.out = o.predicate ? 1 : 32};
    const Inputs inputs = inputs_for(o);
    const std::string to = o.name + (o.predicate ? " po, " : " ro, ");
    const auto check = [&](const std::string& text, const Two& value) {
      check_instruction(
          text, shape, inputs, [&](uint64_t a, uint64_t b, uint64_t) { return value(a, b); },
          o.compare, false);
    };
    const Two f = o.value;
    const uint64_t k = o.bits;
    // t0 is wanted once.
    check("not.b32 t1, ra; xor.b32 t0, t1, 0xffffffff; " + to + "t0, rb;", f);
    check("xor.b32 t0, ra, rc; " + to + "rb, t0;", [=](uint64_t a, uint64_t b) { return f(b, a); });
    check("xor.b32 t0, ra, rc; " + to + "t0, " + o.constant + ";",
          [=](uint64_t a, uint64_t) { return f(a, k); });
    check("xor.b32 t0, ra, rc; " + to + o.constant + ", t0;",
          [=](uint64_t a, uint64_t) { return f(k, a); });
    // And again later, or in both places.
    check("xor.b32 t0, ra, rc; " + to + "t0, rb; xor.b32 t2, t0, t0; st.global.u32 [%d5+4], t2;",
          [=](uint64_t a, uint64_t b) { return f(a, b); });
    check("xor.b32 t0, ra, rc; " + to + "t0, t0;", [=](uint64_t a, uint64_t) { return f(a, a); });
    // With a copy, or 64-bit arithmetic, between.
    check("xor.b32 t0, ra, rc; mov.b32 t3, t0; add.u64 u0, %d0, %d1; " + to + "t0, rb;", f);
    check("xor.b32 t0, ra, rc; mov.b32 t3, t0; xor.b32 t0, t0, t0; " + to + "t3, rb;", f);
    // The result takes the place of an operand.
    if (!o.predicate) check("xor.b32 ro, ra, rc; " + to + "ro, rb; or.b32 ro, ro, rc;", f);
  }
}

TEST(ExecNeighbours, OperandsFromRegistersAndConstants) {
  for (const Operation& o : operations()) {
    const Shape shape{.out = o.predicate ? 1 : 32};
    const Inputs inputs = inputs_for(o);
    const std::string to = o.name + (o.predicate ? " po, " : " ro, ");
    const Two f = o.value;
    const uint64_t k = o.bits;
    const auto check = [&](const std::string& text, const Two& value) {
      check_instruction(
          text, shape, inputs, [&](uint64_t a, uint64_t b, uint64_t) { return value(a, b); },
          o.compare);
    };
    check(to + "ra, rb;", f);
    check(to + "ra, ra;", [=](uint64_t a, uint64_t) { return f(a, a); });
    check(to + "ra, " + o.constant + ";", [=](uint64_t a, uint64_t) { return f(a, k); });
    check(to + o.constant + ", ra;", [=](uint64_t a, uint64_t) { return f(k, a); });
  }
}

TEST(ExecNeighbours, ThreeOperands) {
  const Inputs floats = combine(f32_values(), {bits32(1.5f), bits32(-0.0f), bits32(INFINITY)},
                                {bits32(2.0f), bits32(-3e38f), 0x7fc00000}, 500, Compare::kF32);
  const Inputs words = combine(integer_values(32), integer_values(32), {7, 0x80000000}, 300);
  const Reference fma = [](uint64_t a, uint64_t b, uint64_t c) {
    return bits32(std::fma(f32(a), f32(b), f32(c)));
  };
  const Reference mad = [](uint64_t a, uint64_t b, uint64_t c) { return u(a) * u(b) + u(c); };
  for (const char* text :
       {"%s ro, ra, rb, rc;", "xor.b32 t0, ra, 0; %s ro, t0, rb, rc;",
        "xor.b32 t0, rb, 0; %s ro, ra, t0, rc;", "xor.b32 t0, rc, 0; %s ro, ra, rb, t0;"}) {
    std::string x = text, y = text;
    x.replace(x.find("%s"), 2, "fma.rn.f32");
    y.replace(y.find("%s"), 2, "mad.lo.u32");
    check_instruction(x, {}, floats, fma, Compare::kF32, false);
    check_instruction(y, {}, words, mad, Compare::kBits, false);
  }
  // A choice by the comparison before it, and by what is made of comparisons.
  const auto less = [](uint64_t a, uint64_t b) { return s(a) < s(b); };
  check_instruction(
      "setp.lt.s32 p0, ra, rb; selp.b32 ro, ra, rc, p0;", {}, words,
      [&](uint64_t a, uint64_t b, uint64_t c) { return less(a, b) ? a : c; }, Compare::kBits,
      false);
  check_instruction(
      "setp.lt.s32 p0, ra, rb; setp.lt.s32 p1, rb, rc; and.pred p2, p0, p1; selp.b32 ro, 1, 2, p2;",
      {}, words,
      [&](uint64_t a, uint64_t b, uint64_t c) { return less(a, b) && less(b, c) ? 1 : 2; },
      Compare::kBits, false);
  check_instruction(
      "setp.lt.s32 p0, ra, rb; setp.lt.s32 p1, rb, rc; or.pred p2, p1, p0; not.pred p2, p2; "
      "mov.b32 ro, 5; @p2 bra SKIP; mov.b32 ro, 6; SKIP:",
      {}, words,
      [&](uint64_t a, uint64_t b, uint64_t c) { return less(a, b) || less(b, c) ? 6 : 5; },
      Compare::kBits, false);
}

// A NaN's bits are the canonical ones wherever they can be seen.
TEST(ExecNeighbours, CanonicalNaN) {
  const Inputs inputs = combine({0x7f800001, 0xffc12345, bits32(INFINITY)},
                                {0xff800000, 0x7fabcdef}, {bits32(0.0f)}, 0);
  for (const char* op : {"add.f32 ro, ra, rb;", "sub.f32 ro, rb, rb;", "mul.f32 ro, rb, rc;",
                         "fma.rn.f32 ro, rb, rc, ra;", "mul.f32 t0, ra, rb; sub.f32 ro, t0, t0;",
                         "mul.f32 t0, rb, rc; add.f32 t1, t0, ra; fma.rn.f32 ro, rb, rc, t1;",
                         "sub.f32 t0, rb, rb; mul.f32 ro, t0, t0;"})
    check_instruction(
        op, {}, inputs, [](uint64_t, uint64_t, uint64_t) { return 0x7fffffff; }, Compare::kBits,
        false);
}

}  // namespace
}  // namespace gpupool::simgpu
