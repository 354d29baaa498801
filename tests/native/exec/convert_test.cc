// cvt: every pair of types, rounding, saturation, NaN; and half-precision arithmetic.
#include "exec_test_support.h"
#include "reference_float.h"

namespace gpupool::simgpu {
namespace {

struct Kind {
  const char* name;
  int bits;
  bool is_signed;
  int reg() const { return bits == 8 ? 16 : bits; }
};
const Kind kIntegers[] = {{"u8", 8, false},   {"s8", 8, true},    {"u16", 16, false},
                          {"s16", 16, true},  {"u32", 32, false}, {"s32", 32, true},
                          {"u64", 64, false}, {"s64", 64, true}};
struct Rounding {
  const char* name;
  int mode;
};
const Rounding kToFloat[] = {
    {"rn", FE_TONEAREST}, {"rz", FE_TOWARDZERO}, {"rm", FE_DOWNWARD}, {"rp", FE_UPWARD}};
const Rounding kToInteger[] = {
    {"rni", FE_TONEAREST}, {"rzi", FE_TOWARDZERO}, {"rmi", FE_DOWNWARD}, {"rpi", FE_UPWARD}};

__int128 number(const Kind& k, uint64_t v) {
  v &= mask_of(k.bits);
  if (k.is_signed && v >> (k.bits - 1) & 1)
    return static_cast<__int128>(v) - (static_cast<__int128>(1) << k.bits);
  return static_cast<__int128>(v);
}
__int128 lowest(const Kind& k) {
  return k.is_signed ? -(static_cast<__int128>(1) << (k.bits - 1)) : 0;
}
__int128 highest(const Kind& k) {
  return (static_cast<__int128>(1) << (k.is_signed ? k.bits - 1 : k.bits)) - 1;
}

float flush(float f) { return std::fpclassify(f) == FP_SUBNORMAL ? std::copysign(0.0f, f) : f; }

double rounded(double d, int mode) {
  switch (mode) {
    case FE_TONEAREST:
      return std::nearbyint(d);
    case FE_TOWARDZERO:
      return std::trunc(d);
    case FE_DOWNWARD:
      return std::floor(d);
    default:
      return std::ceil(d);
  }
}

TEST(ExecConvert, IntegerToInteger) {
  for (const Kind& to : kIntegers) {
    for (const Kind& from : kIntegers) {
      for (bool sat : {false, true}) {
        // The destination register may be wider: the result is extended to it.
        for (int out : {to.reg(), 32}) {
          if (out < to.bits) continue;
          check_instruction(
              std::string("cvt") + (sat ? ".sat." : ".") + to.name + "." + from.name + " ro, ra;",
              {out, from.reg(), 0, 0}, combine(integer_values(from.bits), {0}, {0}, 200),
              [=](auto a, auto, auto) {
                __int128 v = number(from, a);
                if (sat) v = std::min(std::max(v, lowest(to)), highest(to));
                return static_cast<uint64_t>(number(to, static_cast<uint64_t>(v)));
              });
        }
      }
    }
  }
}

uint64_t to_integer(double d, const Kind& to, int mode, bool narrow_source) {
  if (std::isnan(d)) {
    // The ISA: 0 if neither is 64 bits wide, otherwise the value with the highest bit alone.
    if (narrow_source && to.bits < 64) return 0;
    return static_cast<uint64_t>(number(to, 1ull << (to.bits - 1)));
  }
  const double r = rounded(d, mode);
  __int128 v = std::fabs(r) < 1e30 ? static_cast<__int128>(r) : (r < 0 ? lowest(to) : highest(to));
  return static_cast<uint64_t>(std::min(std::max(v, lowest(to)), highest(to)));
}

TEST(ExecConvert, FloatToInteger) {
  const Inputs singles = combine(f32_values(), {0}, {0}, 1500, Compare::kF32);
  const Inputs doubles = combine(f64_values(), {0}, {0}, 1500, Compare::kF64);
  const Inputs halves = combine(f16_values(), {0}, {0}, 500);
  for (const Kind& to : kIntegers) {
    for (const Rounding& r : kToInteger) {
      for (bool ftz : {false, true}) {
        check_instruction(
            std::string("cvt.") + r.name + (ftz ? ".ftz." : ".") + to.name + ".f32 ro, ra;",
            {to.reg(), 32, 0, 0}, singles, [=](auto a, auto, auto) {
              return to_integer(ftz ? flush(f32(a)) : f32(a), to, r.mode, true);
            });
      }
      check_instruction(std::string("cvt.") + r.name + "." + to.name + ".f64 ro, ra;",
                        {to.reg(), 64, 0, 0}, doubles,
                        [=](auto a, auto, auto) { return to_integer(f64(a), to, r.mode, false); });
      check_instruction(
          std::string("cvt.") + r.name + "." + to.name + ".f16 ro, ra;", {to.reg(), 16, 0, 0},
          halves, [=](auto a, auto, auto) { return to_integer(f16_value(a), to, r.mode, true); });
    }
  }
}

template <class F>
F integer_to_float(const Kind& from, uint64_t v, int mode) {
  const __int128 n = number(from, v);
  fesetround(mode);
  volatile F f;
  if (from.is_signed) {
    volatile int64_t i = static_cast<int64_t>(n);
    f = static_cast<F>(i);
  } else {
    volatile uint64_t u = static_cast<uint64_t>(n);
    f = static_cast<F>(u);
  }
  fesetround(FE_TONEAREST);
  return f;
}

TEST(ExecConvert, IntegerToFloat) {
  for (const Kind& from : kIntegers) {
    const Inputs in = combine(integer_values(from.bits), {0}, {0}, 600);
    for (const Rounding& r : kToFloat) {
      check_instruction(
          std::string("cvt.") + r.name + ".f32." + from.name + " ro, ra;", {32, from.reg(), 0, 0},
          in, [=](auto a, auto, auto) { return bits32(integer_to_float<float>(from, a, r.mode)); });
      check_instruction(std::string("cvt.") + r.name + ".f64." + from.name + " ro, ra;",
                        {64, from.reg(), 0, 0}, in, [=](auto a, auto, auto) {
                          return bits64(integer_to_float<double>(from, a, r.mode));
                        });
    }
    check_instruction(std::string("cvt.rn.f16.") + from.name + " ro, ra;", {16, from.reg(), 0, 0},
                      in, [=](auto a, auto, auto) {
                        return round_to(static_cast<__float128>(number(from, a)), kF16Format,
                                        FE_TONEAREST);
                      });
    check_instruction(std::string("cvt.rn.sat.f32.") + from.name + " ro, ra;",
                      {32, from.reg(), 0, 0}, in, [=](auto a, auto, auto) {
                        const __int128 n = number(from, a);
                        return bits32(n <= 0 ? 0.0f : 1.0f);
                      });
  }
}

TEST(ExecConvert, BetweenFloats) {
  const Inputs singles = combine(f32_values(), {0}, {0}, 1500, Compare::kF32);
  const Inputs doubles = combine(f64_values(), {0}, {0}, 1500, Compare::kF64);
  for (const Rounding& r : kToFloat) {
    for (bool ftz : {false, true}) {
      for (bool sat : {false, true}) {
        check_instruction(
            std::string("cvt.") + r.name + (ftz ? ".ftz" : "") + (sat ? ".sat" : "") +
                ".f32.f64 ro, ra;",
            {32, 64, 0, 0}, doubles,
            [=](auto a, auto, auto) {
              fesetround(r.mode);
              volatile double d = f64(a);
              volatile float v = static_cast<float>(d);
              fesetround(FE_TONEAREST);
              float f = v;
              if (ftz) f = flush(f);
              if (sat) f = std::isnan(f) || f <= 0 ? 0.0f : f > 1 ? 1.0f : f;
              return bits32(f);
            },
            Compare::kF32);
      }
    }
    // f16 and bf16 have rn and rz; f16 from f32 has all four.
    check_instruction(
        std::string("cvt.") + r.name + ".f16.f32 ro, ra;", {16, 32, 0, 0}, singles,
        [=](auto a, auto, auto) { return to_narrow(f32(a), kF16Format, r.mode); }, Compare::kF16);
    check_instruction(
        std::string("cvt.") + r.name + ".f16.f64 ro, ra;", {16, 64, 0, 0}, doubles,
        [=](auto a, auto, auto) { return to_narrow(f64(a), kF16Format, r.mode); }, Compare::kF16);
  }
  check_instruction(
      "cvt.f64.f32 ro, ra;", {64, 32, 0, 0}, singles,
      [](auto a, auto, auto) { return bits64(f32(a)); }, Compare::kF64);
  check_instruction(
      "cvt.ftz.f64.f32 ro, ra;", {64, 32, 0, 0}, singles,
      [](auto a, auto, auto) { return bits64(flush(f32(a))); }, Compare::kF64);
  const Inputs halves = combine(f16_values(), {0}, {0}, 800);
  check_instruction(
      "cvt.f32.f16 ro, ra;", {32, 16, 0, 0}, halves,
      [](auto a, auto, auto) { return bits32(static_cast<float>(f16_value(a))); }, Compare::kF32);
  check_instruction(
      "cvt.f64.f16 ro, ra;", {64, 16, 0, 0}, halves,
      [](auto a, auto, auto) { return bits64(f16_value(a)); }, Compare::kF64);
  auto is_nan_bf16 = [](uint64_t v) { return (v & 0x7fff) > 0x7f80; };
  for (int rz : {0, 1}) {
    Inputs numbers;
    for (auto& x : singles)
      if (!is_nan(Compare::kF32, x[0] & mask_of(32))) numbers.push_back(x);
    check_instruction(rz ? "cvt.rz.bf16.f32 ro, ra;" : "cvt.rn.bf16.f32 ro, ra;", {16, 32, 0, 0},
                      numbers, [=](auto a, auto, auto) {
                        return to_narrow(f32(a), kBf16Format, rz ? FE_TOWARDZERO : FE_TONEAREST);
                      });
    std::string error;
    auto nan = run_instruction(rz ? "cvt.rz.bf16.f32 ro, ra;" : "cvt.rn.bf16.f32 ro, ra;",
                               {16, 32, 0, 0}, {{0x7f800001, 0, 0}}, false, &error);
    ASSERT_EQ(nan.size(), 1u) << error;
    EXPECT_TRUE(is_nan_bf16(nan[0]));
  }
  // Packed: the first operand goes to the upper half.
  const Inputs two = combine(f32_values(), f32_values(), {0}, 300, Compare::kF32);
  Inputs numbers;
  for (auto& x : two)
    if (!is_nan(Compare::kF32, x[0] & mask_of(32)) && !is_nan(Compare::kF32, x[1] & mask_of(32)))
      numbers.push_back(x);
  check_instruction("cvt.rn.f16x2.f32 ro, ra, rb;", {}, numbers, [](auto a, auto b, auto) {
    return to_narrow(f32(a), kF16Format, FE_TONEAREST) << 16 |
           to_narrow(f32(b), kF16Format, FE_TONEAREST);
  });
  check_instruction("cvt.rn.bf16x2.f32 ro, ra, rb;", {}, numbers, [](auto a, auto b, auto) {
    return to_narrow(f32(a), kBf16Format, FE_TONEAREST) << 16 |
           to_narrow(f32(b), kBf16Format, FE_TONEAREST);
  });
}

TEST(ExecConvert, RoundingToIntegralValues) {
  for (const Rounding& r : kToInteger) {
    for (bool ftz : {false, true}) {
      check_instruction(
          std::string("cvt.") + r.name + (ftz ? ".ftz" : "") + ".f32.f32 ro, ra;", {32, 32, 0, 0},
          combine(f32_values(), {0}, {0}, 1000, Compare::kF32),
          [=](auto a, auto, auto) {
            const float f = ftz ? flush(f32(a)) : f32(a);
            return bits32(static_cast<float>(rounded(f, r.mode)));
          },
          Compare::kF32);
    }
    check_instruction(
        std::string("cvt.") + r.name + ".f64.f64 ro, ra;", {64, 64, 0, 0},
        combine(f64_values(), {0}, {0}, 1000, Compare::kF64),
        [=](auto a, auto, auto) { return bits64(rounded(f64(a), r.mode)); }, Compare::kF64);
  }
  check_instruction("cvt.sat.f32.f32 ro, ra;", {32, 32, 0, 0},
                    combine(f32_values(), {0}, {0}, 500, Compare::kF32), [](auto a, auto, auto) {
                      const float f = f32(a);
                      return bits32(std::isnan(f) || f <= 0 ? 0.0f : f > 1 ? 1.0f : f);
                    });
}

TEST(ExecConvert, HalfArithmetic) {
  const Inputs in = combine(f16_values(), f16_values(), {0, 0x3c00, 0xbc00, 0x0001, 0x7bff}, 2000);
  const Shape s{16, 16, 16, 16};
  auto narrow = [](__float128 exact, double special) -> uint64_t {
    if (std::isnan(special) || std::isinf(special))
      return to_narrow(special, kF16Format, FE_TONEAREST);
    return round_to(exact, kF16Format, FE_TONEAREST, std::signbit(special));
  };
  check_instruction(
      "add.f16 ro, ra, rb;", s, in,
      [=](auto a, auto b, auto) {
        return narrow(__float128(f16_value(a)) + f16_value(b), f16_value(a) + f16_value(b));
      },
      Compare::kF16);
  check_instruction(
      "sub.f16 ro, ra, rb;", s, in,
      [=](auto a, auto b, auto) {
        return narrow(__float128(f16_value(a)) - f16_value(b), f16_value(a) - f16_value(b));
      },
      Compare::kF16);
  check_instruction(
      "mul.f16 ro, ra, rb;", s, in,
      [=](auto a, auto b, auto) {
        return narrow(__float128(f16_value(a)) * f16_value(b), f16_value(a) * f16_value(b));
      },
      Compare::kF16);
  check_instruction(
      "fma.rn.f16 ro, ra, rb, rc;", s, in,
      [=](auto a, auto b, auto c) {
        const double x = f16_value(a), y = f16_value(b), z = f16_value(c);
        return narrow(__float128(x) * y + z, std::fma(x, y, z));
      },
      Compare::kF16);
  check_instruction(
      "neg.f16 ro, ra;", s, in, [](auto a, auto, auto) { return a ^ 0x8000; }, Compare::kF16);
  check_instruction(
      "abs.f16 ro, ra;", s, in, [](auto a, auto, auto) { return a & 0x7fff; }, Compare::kF16);
}

}  // namespace
}  // namespace gpupool::simgpu
