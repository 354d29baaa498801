// Floating-point arithmetic: rounding, .ftz, .sat, NaN and signed zeros. The reference is the
// processor's IEEE arithmetic under the wanted rounding mode.
#include <cfenv>

#include "exec_test_support.h"

namespace gpupool::simgpu {
namespace {

struct Rounding {
  const char* name;
  int mode;
};
const Rounding kRoundings[] = {
    {"rn", FE_TONEAREST}, {"rz", FE_TOWARDZERO}, {"rm", FE_DOWNWARD}, {"rp", FE_UPWARD}};

// The operations are kept from the compiler's constant folding and reordering around fesetround.
template <class T, class F>
T with_rounding(int mode, F f) {
  fesetround(mode);
  volatile T r = f();
  fesetround(FE_TONEAREST);
  return r;
}

float flush(float f) { return std::fpclassify(f) == FP_SUBNORMAL ? std::copysign(0.0f, f) : f; }
float saturate(float f) { return std::isnan(f) ? 0.0f : f < 0 || f == 0 ? 0.0f : f > 1 ? 1.0f : f; }

template <class T>
__attribute__((noinline)) T apply(const std::string& op, T x, T y, T z) {
  volatile T a = x, b = y, c = z;
  if (op == "add") return a + b;
  if (op == "sub") return a - b;
  if (op == "mul") return a * b;
  if (op == "div") return a / b;
  if (op == "fma") return std::fma(T(a), T(b), T(c));
  if (op == "rcp") return T(1) / a;
  return std::sqrt(T(a));
}

std::string operands(const std::string& op) {
  if (op == "fma") return " ro, ra, rb, rc;";
  return op == "rcp" || op == "sqrt" ? " ro, ra;" : " ro, ra, rb;";
}

TEST(ExecFloat, F32Arithmetic) {
  for (std::string op : {"add", "sub", "mul", "fma", "div", "rcp", "sqrt"}) {
    const bool saturable = op == "add" || op == "sub" || op == "mul" || op == "fma";
    const bool unary = op == "rcp" || op == "sqrt";
    const std::vector<uint64_t> third = {0,          0x80000000, 0x3f800000, 0xbf800000,
                                         0x7f800000, 0x7fc00000, 1,          0x33800000};
    const Inputs in = combine(f32_values(), unary ? std::vector<uint64_t>{0} : f32_values(),
                              op == "fma" ? third : std::vector<uint64_t>{0}, 3000, Compare::kF32);
    for (const Rounding& r : kRoundings) {
      for (bool ftz : {false, true}) {
        for (bool sat : {false, true}) {
          if (sat && !saturable) continue;
          const std::string text =
              op + "." + r.name + (ftz ? ".ftz" : "") + (sat ? ".sat" : "") + ".f32" + operands(op);
          check_instruction(
              text, {}, in,
              [=](auto x, auto y, auto z) {
                float a = f32(x), b = f32(y), c = f32(z);
                if (ftz) {
                  a = flush(a);
                  b = flush(b);
                  c = flush(c);
                }
                float d = with_rounding<float>(r.mode, [&] { return apply<float>(op, a, b, c); });
                if (ftz) d = flush(d);
                if (sat) d = saturate(d);
                return bits32(d);
              },
              Compare::kF32);
        }
      }
    }
  }
}

TEST(ExecFloat, F64Arithmetic) {
  for (std::string op : {"add", "sub", "mul", "fma", "div", "rcp", "sqrt"}) {
    const bool unary = op == "rcp" || op == "sqrt";
    const std::vector<uint64_t> third = {
        0, bits64(-0.0), bits64(1.0), bits64(-1.0), bits64(INFINITY), bits64(1e-320)};
    const Inputs in = combine(f64_values(), unary ? std::vector<uint64_t>{0} : f64_values(),
                              op == "fma" ? third : std::vector<uint64_t>{0}, 3000, Compare::kF64);
    for (const Rounding& r : kRoundings) {
      check_instruction(
          op + "." + r.name + ".f64" + operands(op), {64, 64, 64, 64}, in,
          [=](auto x, auto y, auto z) {
            return bits64(with_rounding<double>(
                r.mode, [&] { return apply<double>(op, f64(x), f64(y), f64(z)); }));
          },
          Compare::kF64);
    }
  }
}

TEST(ExecFloat, DefaultRoundingAndMad) {
  const Inputs in = combine(f32_values(), f32_values(), {0x3f800000, 0}, 1000, Compare::kF32);
  check_instruction(
      "add.f32 ro, ra, rb;", {}, in, [](auto a, auto b, auto) { return bits32(f32(a) + f32(b)); },
      Compare::kF32);
  check_instruction(
      "mul.f32 ro, ra, rb;", {}, in, [](auto a, auto b, auto) { return bits32(f32(a) * f32(b)); },
      Compare::kF32);
  // mad.f32 of sm_20 and later is fma.
  check_instruction(
      "mad.rn.f32 ro, ra, rb, rc;", {}, in,
      [](auto a, auto b, auto c) { return bits32(std::fma(f32(a), f32(b), f32(c))); },
      Compare::kF32);
  const Inputs wide = combine(f64_values(), f64_values(), {bits64(1.0), 0}, 1000, Compare::kF64);
  check_instruction(
      "add.f64 ro, ra, rb;", {64, 64, 64, 64}, wide,
      [](auto a, auto b, auto) { return bits64(f64(a) + f64(b)); }, Compare::kF64);
  check_instruction(
      "mad.rn.f64 ro, ra, rb, rc;", {64, 64, 64, 64}, wide,
      [](auto a, auto b, auto c) { return bits64(std::fma(f64(a), f64(b), f64(c))); },
      Compare::kF64);
}

TEST(ExecFloat, NanResultsAreCanonical) {
  // The ISA: operations that make a NaN of .f32 give 0x7fffffff.
  const Inputs in = {{0x7f800000, 0xff800000, 0}, {0x7fc12345, 0x3f800000, 0}, {0xffc00001, 0, 0}};
  for (const char* text :
       {"add.f32 ro, ra, rb;", "mul.f32 ro, ra, rc;", "fma.rn.f32 ro, ra, rb, ra;"}) {
    std::string error;
    auto got = run_instruction(text, {}, in, false, &error);
    ASSERT_EQ(got.size(), 3u) << error;
    for (uint64_t v : got)
      EXPECT_TRUE(v == 0x7fffffff || !is_nan(Compare::kF32, v)) << text << std::hex << v;
  }
}

TEST(ExecFloat, AbsNegCopysignTestp) {
  for (bool ftz : {false, true}) {
    const Inputs in = combine(f32_values(), f32_values(), {0}, 300, Compare::kF32);
    auto pre = [ftz](uint64_t x) { return ftz ? bits32(flush(f32(x))) : x; };
    const std::string f = ftz ? ".ftz" : "";
    check_instruction(
        "abs" + f + ".f32 ro, ra;", {}, in, [=](auto a, auto, auto) { return pre(a) & 0x7fffffff; },
        Compare::kF32);
    check_instruction(
        "neg" + f + ".f32 ro, ra;", {}, in, [=](auto a, auto, auto) { return pre(a) ^ 0x80000000; },
        Compare::kF32);
  }
  const Inputs in32 = combine(f32_values(), f32_values(), {0}, 300);
  const Inputs in64 = combine(f64_values(), f64_values(), {0}, 300);
  check_instruction(
      "abs.f64 ro, ra;", {64, 64, 0, 0}, in64, [](auto a, auto, auto) { return a & ~(1ull << 63); },
      Compare::kF64);
  check_instruction(
      "neg.f64 ro, ra;", {64, 64, 0, 0}, in64, [](auto a, auto, auto) { return a ^ 1ull << 63; },
      Compare::kF64);
  // copysign d, a, b: the sign of a, the value of b.
  check_instruction(
      "copysign.f32 ro, ra, rb;", {}, in32,
      [](auto a, auto b, auto) { return (b & 0x7fffffff) | (a & 0x80000000); }, Compare::kF32);
  check_instruction(
      "copysign.f64 ro, ra, rb;", {64, 64, 64, 0}, in64,
      [](auto a, auto b, auto) { return (b & ~(1ull << 63)) | (a & 1ull << 63); }, Compare::kF64);
  const std::pair<const char*, std::function<bool(double, int)>> tests[] = {
      {"finite", [](double, int c) { return c != FP_INFINITE && c != FP_NAN; }},
      {"infinite", [](double, int c) { return c == FP_INFINITE; }},
      {"number", [](double, int c) { return c != FP_NAN; }},
      {"notanumber", [](double, int c) { return c == FP_NAN; }},
      {"normal",
       [](double, int c) { return c == FP_NORMAL || c == FP_ZERO; }},  // zeros count, says the ISA
      {"subnormal", [](double, int c) { return c == FP_SUBNORMAL; }}};
  for (auto& [name, f] : tests) {
    auto test = f;
    check_instruction(std::string("testp.") + name + ".f32 po, ra;", {1, 32, 0, 0}, in32,
                      [=](auto a, auto, auto) { return test(f32(a), std::fpclassify(f32(a))); });
    check_instruction(std::string("testp.") + name + ".f64 po, ra;", {1, 64, 0, 0}, in64,
                      [=](auto a, auto, auto) { return test(f64(a), std::fpclassify(f64(a))); });
  }
}

TEST(ExecFloat, MinMax) {
  for (bool max : {false, true}) {
    for (bool ftz : {false, true}) {
      for (bool nan : {false, true}) {
        check_instruction(std::string(max ? "max" : "min") + (ftz ? ".ftz" : "") +
                              (nan ? ".NaN" : "") + ".f32 ro, ra, rb;",
                          {}, combine(f32_values(), f32_values(), {0}, 1000, Compare::kF32),
                          [=](auto x, auto y, auto) {
                            float a = f32(x), b = f32(y);
                            if (ftz) {
                              a = flush(a);
                              b = flush(b);
                            }
                            if (std::isnan(a) && std::isnan(b)) return uint64_t(0x7fffffff);
                            if (std::isnan(a) || std::isnan(b))
                              return nan ? uint64_t(0x7fffffff) : bits32(std::isnan(a) ? b : a);
                            if (a == b)
                              return max ? bits32(a) & bits32(b)
                                         : bits32(a) | bits32(b);  // -0 < +0
                            return bits32((a < b) != max ? a : b);
                          });
      }
    }
    check_instruction(
        std::string(max ? "max" : "min") + ".f64 ro, ra, rb;", {64, 64, 64, 0},
        combine(f64_values(), f64_values(), {0}, 1000, Compare::kF64),
        [=](auto x, auto y, auto) {
          const double a = f64(x), b = f64(y);
          if (std::isnan(a)) return y;
          if (std::isnan(b)) return x;
          if (a == b) return max ? x & y : x | y;
          return (a < b) != max ? x : y;
        },
        Compare::kF64);
    // .xorsign.abs: of the magnitudes, with the product's sign.
    Inputs in;
    for (auto& x : combine(f32_values(), f32_values(), {0}, 1000, Compare::kF32))
      if (!is_nan(Compare::kF32, x[0] & mask_of(32)) && !is_nan(Compare::kF32, x[1] & mask_of(32)))
        in.push_back(x);
    check_instruction(std::string(max ? "max" : "min") + ".xorsign.abs.f32 ro, ra, rb;", {}, in,
                      [=](auto x, auto y, auto) {
                        const float a = std::fabs(f32(x)), b = std::fabs(f32(y));
                        return bits32((a < b) != max ? a : b) | ((x ^ y) & 0x80000000);
                      });
  }
}

// Error in units of the last place of the exact result, which is computed in double.
void check_approximation(const std::string& text, const Inputs& in, double bound,
                         const std::function<double(double, double)>& exact, bool ftz = false) {
  std::string error;
  auto got = run_instruction(text, {}, in, false, &error);
  ASSERT_EQ(got.size(), in.size()) << text << error;
  int shown = 0;
  for (size_t i = 0; i < in.size() && shown < 5; ++i) {
    float a = f32(in[i][0]), b = f32(in[i][1]);
    if (ftz) {
      a = flush(a);
      b = flush(b);
    }
    const double want = exact(a, b);
    const float w = static_cast<float>(want), g = f32(got[i]);
    bool good;
    if (std::isnan(want))
      good = std::isnan(g);
    else if (std::isinf(w) || w == 0)
      good = g == w || std::fabs(double(g) - want) <= 1.2e-38 ||
             (std::isinf(w) && std::fabs(g) >= 3.4e38);
    else if (ftz && std::fabs(w) < 1.1754944e-38f)
      good = std::fabs(g) <= 1.1754944e-38f;
    else
      good = std::fabs(g - want) <=
             (bound + 0.5) * (std::nextafter(std::fabs(w), INFINITY) - std::fabs(w));
    if (!good) {
      ++shown;
      ADD_FAILURE() << text << " a=" << a << " (" << std::hex << bits32(a) << std::dec
                    << ") b=" << b << ": got " << g << ", want " << w;
    }
  }
}

TEST(ExecFloat, Approximations) {
  // The ISA's bounds, in ulp.
  const Inputs all = combine(f32_values(), {0}, {0}, 4000, Compare::kF32);
  check_approximation("rcp.approx.f32 ro, ra;", all, 1, [](double a, double) { return 1 / a; });
  check_approximation(
      "rcp.approx.ftz.f32 ro, ra;", all, 1, [](double a, double) { return 1 / a; }, true);
  check_approximation("sqrt.approx.f32 ro, ra;", all, 1,
                      [](double a, double) { return std::sqrt(a); });
  check_approximation("rsqrt.approx.f32 ro, ra;", all, 2,
                      [](double a, double) { return 1 / std::sqrt(a); });
  check_approximation("ex2.approx.f32 ro, ra;", all, 2,
                      [](double a, double) { return std::exp2(a); });
  check_approximation(
      "ex2.approx.ftz.f32 ro, ra;", all, 2, [](double a, double) { return std::exp2(a); }, true);
  const Inputs two = combine(f32_values(), f32_values(), {0}, 2000, Compare::kF32);
  check_approximation("div.full.f32 ro, ra, rb;", two, 2, [](double a, double b) { return a / b; });
  Inputs moderate;  // |b| in [2^-126, 2^126], as the bound is stated
  for (auto& x : two)
    if (std::fabs(f32(x[1])) >= 0x1p-126 && std::fabs(f32(x[1])) <= 0x1p126) moderate.push_back(x);
  check_approximation("div.approx.f32 ro, ra, rb;", moderate, 2,
                      [](double a, double b) { return a / b; });

  // Absolute or relative bounds.
  std::mt19937 r(5);
  Inputs angles, positive;
  for (int i = 0; i < 4000; ++i) {
    angles.push_back({bits32((r() / 4294967296.0f * 2 - 1) * 3.14159265f), 0, 0});
    positive.push_back(
        {bits32(std::ldexp(0.5f + r() / 8589934592.0f, int(r() % 200) - 100)), 0, 0});
  }
  auto absolute = [](const char* text, const Inputs& in, double bound, double (*f)(double)) {
    std::string error;
    auto got = run_instruction(text, {}, in, false, &error);
    ASSERT_EQ(got.size(), in.size()) << text << error;
    for (size_t i = 0; i < in.size(); ++i) {
      const double want = f(f32(in[i][0]));
      ASSERT_LE(std::fabs(f32(got[i]) - want), bound * std::max(1.0, std::fabs(want)))
          << text << " " << f32(in[i][0]);
    }
  };
  absolute("sin.approx.f32 ro, ra;", angles, std::exp2(-20.5),
           [](double x) { return std::sin(x); });
  absolute("cos.approx.f32 ro, ra;", angles, std::exp2(-20.5),
           [](double x) { return std::cos(x); });
  absolute("lg2.approx.f32 ro, ra;", positive, std::exp2(-22.0),
           [](double x) { return std::log2(x); });
  absolute("tanh.approx.f32 ro, ra;", angles, std::exp2(-10.9),
           [](double x) { return std::tanh(x); });
  std::string error;
  auto special = run_instruction(
      "lg2.approx.f32 ro, ra;", {},
      {{0, 0, 0}, {0x80000000, 0, 0}, {0x7f800000, 0, 0}, {0xbf800000, 0, 0}}, false, &error);
  ASSERT_EQ(special.size(), 4u) << error;
  EXPECT_EQ(special[0], 0xff800000u);
  EXPECT_EQ(special[1], 0xff800000u);
  EXPECT_EQ(special[2], 0x7f800000u);
  EXPECT_TRUE(is_nan(Compare::kF32, special[3]));
}

TEST(ExecFloat, F64GrossApproximations) {
  // rcp and rsqrt .approx.ftz.f64: about 20 bits, the low 32 bits of the result are zero.
  Inputs in;
  std::mt19937_64 r(6);
  for (int i = 0; i < 1000; ++i)
    in.push_back({bits64(std::ldexp(1.0 + (r() >> 12) * 0x1p-52, int(r() % 600) - 300)), 0, 0});
  for (bool rsqrt : {false, true}) {
    const std::string text = rsqrt ? "rsqrt.approx.ftz.f64 ro, ra;" : "rcp.approx.ftz.f64 ro, ra;";
    std::string error;
    auto got = run_instruction(text, {64, 64, 0, 0}, in, false, &error);
    ASSERT_EQ(got.size(), in.size()) << text << error;
    for (size_t i = 0; i < in.size(); ++i) {
      const double x = f64(in[i][0]), want = rsqrt ? 1 / std::sqrt(x) : 1 / x;
      EXPECT_EQ(got[i] & 0xffffffff, 0u);
      ASSERT_LE(std::fabs(f64(got[i]) / want - 1), 0x1p-19) << text << x;
    }
  }
}

}  // namespace
}  // namespace gpupool::simgpu
