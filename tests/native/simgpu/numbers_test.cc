// The kernels of kernels/numbers.cu against the host's C library and integer arithmetic.
#include <cfenv>
#include <cmath>
#include <random>

#include "fixture.h"

namespace gpupool::simgpu {
namespace {

class Numbers : public EngineTest {
 protected:
  void SetUp() override { load(GPUPOOL_KERNELS "/numbers.ptx"); }
};

template <class T>
double ulps(T got, double want) {
  if (std::isnan(want)) return std::isnan(got) ? 0 : 1e9;
  if (std::isinf(static_cast<T>(want))) return got == static_cast<T>(want) ? 0 : 1e9;
  const T w = static_cast<T>(want);
  const T step = std::nextafter(std::fabs(w), std::numeric_limits<T>::infinity()) - std::fabs(w);
  return std::fabs((static_cast<double>(got) - want) / step);
}

// Bounds are those of the CUDA programming guide, plus half an ulp for the reference's rounding.
TEST_F(Numbers, MathFloat) {
  std::vector<float> x = {0.0f,   -0.0f,    1.0f,      -1.0f,   0.5f,       1e-30f,    1e30f,
                          88.0f,  -87.0f,   104.0f,    -150.0f, 1e5f,       123456.0f, 3.0e9f,
                          1e-40f, INFINITY, -INFINITY, NAN,     3.14159265f};
  std::mt19937 random(3);
  std::uniform_real_distribution<float> d(-20, 20);
  for (int i = 0; i < 500; ++i) x.push_back(d(random));
  const int n = static_cast<int>(x.size());
  float* out = array<float>(n * 12);
  run("math_float", {.gx = 5, .bx = 128}, copy(x), out, n);
  const double bound[12] = {2, 2, 2, 1, 4, 2, 0.5, 0.5, 2, 2, 1, 2};
  for (int i = 0; i < n; ++i) {
    const double v = x[i];
    const double want[12] = {std::sin(v),
                             std::cos(v),
                             std::exp(v),
                             std::log(std::fabs(v)),
                             std::pow(std::fabs(v), 1.5),
                             std::tanh(v),
                             std::sqrt(std::fabs(v)),
                             1.0 / v,
                             std::atan(v),
                             std::erf(v),
                             std::cbrt(v),
                             std::exp2(v)};
    for (int k = 0; k < 12; ++k)
      EXPECT_LE(ulps(out[i * 12 + k], want[k]), bound[k] + 0.5)
          << "function " << k << " of " << v << ": " << out[i * 12 + k] << ", want " << want[k];
  }
}

TEST_F(Numbers, MathDouble) {
  std::vector<double> x = {0.0,    1.0, -1.0, 0.5,  1e-300, 1e300,    700.0,
                           -700.0, 1e5, 1e15, 1e22, -1e200, INFINITY, NAN};
  std::mt19937 random(4);
  std::uniform_real_distribution<double> d(-20, 20);
  for (int i = 0; i < 300; ++i) x.push_back(d(random));
  const int n = static_cast<int>(x.size());
  double* out = array<double>(n * 12);
  run("math_double", {.gx = 3, .bx = 128}, copy(x), out, n);
  const double bound[12] = {2, 2, 1, 1, 2, 2, 0, 0, 2, 2, 4, 0};
  for (int i = 0; i < n; ++i) {
    const double v = x[i];
    const double want[12] = {std::sin(v),
                             std::cos(v),
                             std::exp(v),
                             std::log(std::fabs(v)),
                             std::pow(std::fabs(v), 1.5),
                             std::tanh(v),
                             std::sqrt(std::fabs(v)),
                             1.0 / v,
                             std::atan(v),
                             std::erf(v),
                             std::lgamma(std::fabs(v)),
                             std::fmod(v, 3.0)};
    for (int k = 0; k < 12; ++k) {
      if (k == 10 && std::fabs(std::fabs(v) - 1.5) < 1.5) continue;  // near lgamma's zeros
      EXPECT_LE(ulps(out[i * 12 + k], want[k]), bound[k] + 0.5)
          << "function " << k << " of " << v << ": " << out[i * 12 + k] << ", want " << want[k];
    }
  }
}

TEST_F(Numbers, FastFunctions) {
  std::vector<float> x;
  for (int i = 1; i < 300; ++i) x.push_back(0.01f * static_cast<float>(i) * (i & 1 ? 1 : -1));
  const int n = static_cast<int>(x.size());
  float* out = array<float>(n * 6);
  run("math_fast", {.gx = 3, .bx = 128}, copy(x), out, n);
  for (int i = 0; i < n; ++i) {
    const double v = x[i];
    EXPECT_NEAR(out[i * 6], std::sin(v), 5e-7);
    EXPECT_NEAR(out[i * 6 + 1], std::cos(v), 5e-7);
    EXPECT_LE(ulps(out[i * 6 + 2], std::exp(v)), 5);
    EXPECT_NEAR(out[i * 6 + 3], std::log(std::fabs(v)), 1e-6);
    EXPECT_LE(ulps(out[i * 6 + 4], v / 3), 2.5);
    EXPECT_LE(ulps(out[i * 6 + 5], 1 / std::sqrt(std::fabs(v))), 2.5);
  }
}

TEST_F(Numbers, DirectedRounding) {
  std::mt19937 random(5);
  std::uniform_real_distribution<float> d(-10, 10);
  std::vector<float> a, b;
  for (int i = 0; i < 400; ++i) {
    a.push_back(d(random));
    b.push_back(d(random));
  }
  const int n = static_cast<int>(a.size());
  float* out = array<float>(n * 16);
  run("rounding", {.gx = 4, .bx = 128}, copy(a), copy(b), out, n);
  const int modes[4] = {FE_TONEAREST, FE_TOWARDZERO, FE_UPWARD, FE_DOWNWARD};
  for (int m = 0; m < 4; ++m) {
    std::vector<float> want;
    std::fesetround(modes[m]);
    for (int i = 0; i < n; ++i) {
      volatile float x = a[i], y = b[i];
      volatile float r[4] = {x + y, x * y, x / y, std::fma(x, y, x)};
      for (float v : {r[0], r[1], r[2], r[3]}) want.push_back(v);
    }
    std::fesetround(FE_TONEAREST);
    for (int i = 0; i < n; ++i)
      for (int k = 0; k < 4; ++k)
        EXPECT_EQ(out[i * 16 + k * 4 + m], want[i * 4 + k])
            << a[i] << ' ' << b[i] << ' ' << k << ' ' << m;
  }
}

TEST_F(Numbers, Conversions) {
  std::vector<double> x = {0.0,          -0.0,         0.5,           1.5,    2.5,    -0.5,
                           -1.5,         1e10,         -1e10,         1e20,   -1e20,  3e9,
                           4294967295.5, 2147483647.5, -2147483648.5, 9.3e18, 1.9e19, INFINITY,
                           -INFINITY,    1e-45,        65504,         65520,  6e-8,   3e-8};
  const int n = static_cast<int>(x.size());
  long long* out = array<long long>(n * 16);
  run("conversions", {.bx = 64}, copy(x), out, n);
  auto clamp = [](double v, double lo, double hi) { return v < lo ? lo : v > hi ? hi : v; };
  for (int i = 0; i < n; ++i) {
    const double v = x[i];
    const float f = static_cast<float>(v);
    const long long* o = out + i * 16;
    EXPECT_EQ(o[0], static_cast<int>(clamp(std::nearbyint(v), INT32_MIN, INT32_MAX))) << v;
    EXPECT_EQ(o[1], static_cast<int>(clamp(std::trunc(v), INT32_MIN, INT32_MAX))) << v;
    EXPECT_EQ(o[2], static_cast<int>(clamp(std::ceil(v), INT32_MIN, INT32_MAX))) << v;
    EXPECT_EQ(o[3], static_cast<int>(clamp(std::floor(v), INT32_MIN, INT32_MAX))) << v;
    EXPECT_EQ(o[4], static_cast<long long>(clamp(std::nearbyint(v), 0, UINT32_MAX))) << v;
    EXPECT_EQ(o[5], static_cast<int>(clamp(std::nearbyint(f), INT32_MIN, INT32_MAX))) << v;
    EXPECT_EQ(o[6], static_cast<long long>(clamp(std::trunc(f), 0, UINT32_MAX))) << v;
    const double ll = std::nearbyint(v);
    EXPECT_EQ(o[7], ll >= 9223372036854775808.0    ? INT64_MAX
                    : ll <= -9223372036854775808.0 ? INT64_MIN
                                                   : static_cast<long long>(ll))
        << v;
    const double ull = std::trunc(v);
    EXPECT_EQ(static_cast<unsigned long long>(o[8]), ull >= 18446744073709551616.0 ? UINT64_MAX
                                                     : ull <= 0
                                                         ? 0
                                                         : static_cast<unsigned long long>(ull))
        << v;
    float saturated = f > 0 ? f < 1 ? f : 1.0f : 0.0f;
    int bits;
    std::memcpy(&bits, &saturated, 4);
    EXPECT_EQ(o[12], bits) << v;
  }
}

TEST_F(Numbers, Integers) {
  std::vector<long long> x = {0,
                              1,
                              -1,
                              2,
                              -2,
                              7,
                              100,
                              -100,
                              INT32_MAX,
                              INT32_MIN,
                              INT64_MAX,
                              INT64_MIN,
                              0x123456789abcdefll};
  std::mt19937_64 random(6);
  for (int i = 0; i < 300; ++i) x.push_back(static_cast<long long>(random()));
  const int n = static_cast<int>(x.size());
  long long* out = array<long long>(n * 20);
  run("integers", {.gx = 3, .bx = 128}, copy(x), out, n);
  for (int i = 0; i < n; ++i) {
    const long long v = x[i], y = x[(i + 1) % n];
    const int a = static_cast<int>(v), b = static_cast<int>(y);
    const unsigned ua = a, ub = b;
    const long long* o = out + i * 20;
    EXPECT_EQ(o[0], a ? __builtin_clz(ua) : 32);
    EXPECT_EQ(o[1], v ? __builtin_clzll(v) : 64);
    EXPECT_EQ(o[2], __builtin_popcount(ua));
    EXPECT_EQ(o[3], __builtin_popcountll(v));
    unsigned reversed = 0;
    for (int k = 0; k < 32; ++k) reversed |= (ua >> k & 1) << (31 - k);
    EXPECT_EQ(o[4], reversed);
    EXPECT_EQ(o[6], __builtin_ffs(a));
    EXPECT_EQ(o[7], static_cast<long long>(a) * b >> 32);
    EXPECT_EQ(o[8], static_cast<long long>(static_cast<unsigned long long>(ua) * ub >> 32));
    EXPECT_EQ(o[9], static_cast<long long>(static_cast<__int128>(v) * y >> 64));
    if (b && !(a == INT32_MIN && b == -1)) {
      EXPECT_EQ(o[12], a / b);
      EXPECT_EQ(o[13], a % b);
    }
    if (y && !(v == INT64_MIN && y == -1)) {
      EXPECT_EQ(o[14], v / y);
    }
    if (ub) {
      EXPECT_EQ(o[15], ua / ub);
    }
    const int s = a & 31;
    EXPECT_EQ(o[16],
              s ? static_cast<long long>(ub << s | ua >> (32 - s)) : static_cast<long long>(ub));
    EXPECT_EQ(o[17],
              s ? static_cast<long long>(ua >> s | ub << (32 - s)) : static_cast<long long>(ua));
    EXPECT_EQ(o[18],
              static_cast<signed char>(a) + static_cast<unsigned char>(b) + static_cast<short>(v));
    int dot = 3;
    for (int k = 0; k < 4; ++k)
      dot += static_cast<signed char>(a >> (8 * k)) * static_cast<signed char>(b >> (8 * k));
    EXPECT_EQ(o[19], dot);
  }
}

TEST_F(Numbers, Halves) {
  const std::vector<float> a = {1, 2.5f, 0.1f, 65504, -3, 1e-5f}, b = {0.3f, 4, -0.1f, 1, 7, 2e-5f};
  const int n = static_cast<int>(a.size());
  float* out = array<float>(n * 10);
  run("halves", {.bx = 32}, copy(a), copy(b), out, n);
  for (int i = 0; i < n; ++i) {
    const _Float16 x = static_cast<_Float16>(a[i]), y = static_cast<_Float16>(b[i]);
    const float* o = out + i * 10;
    EXPECT_EQ(o[0], static_cast<float>(
                        static_cast<_Float16>(static_cast<float>(x) + static_cast<float>(y))));
    EXPECT_EQ(o[1], static_cast<float>(
                        static_cast<_Float16>(static_cast<float>(x) * static_cast<float>(y))));
    EXPECT_EQ(o[2], static_cast<float>(static_cast<_Float16>(static_cast<double>(x) * y +
                                                             static_cast<double>(x))));
    EXPECT_EQ(o[3], x < y);
    EXPECT_EQ(o[4], static_cast<float>(x > y ? x : y));
    EXPECT_EQ(o[9], static_cast<float>(x));
  }
}

TEST_F(Numbers, Atomics) {
  unsigned* u = array<unsigned>(9);
  u[1] = 50;
  u[5] = 0xffffffffu;
  u[7] = 1000;
  float* f = array<float>(1);
  double* d = array<double>(1);
  unsigned long long* q = array<unsigned long long>(1);
  run("atomics", {.gx = 4, .bx = 96}, u, f, d, q);
  const unsigned n = 384;
  unsigned x = 0;
  for (unsigned t = 0; t < n; ++t) x ^= t;
  EXPECT_EQ(u[0], n * (n - 1) / 2);
  EXPECT_EQ(u[1], 0u);
  EXPECT_EQ(u[2], n - 1);
  EXPECT_EQ(u[3], n % 101);
  EXPECT_EQ(u[4], 0xffffffffu);
  EXPECT_EQ(u[5], 0xffffff00u);
  EXPECT_EQ(u[6], x);
  EXPECT_EQ(u[7], 1000 - n);
  EXPECT_EQ(u[8], n * (n - 1) / 2);
  EXPECT_EQ(*f, n);
  EXPECT_EQ(*d, n * 0.5);
  EXPECT_EQ(*q, static_cast<unsigned long long>(n * (n - 1) / 2) << 20);
}

TEST_F(Numbers, ConstantsAndGlobals) {
  int* out = array<int>(16);
  run("constants", {.bx = 16}, out);
  const int table[8] = {3, 1, 4, 1, 5, 9, 2, 6};
  for (int i = 0; i < 16; ++i) EXPECT_EQ(out[i], table[i & 7] + 7);
  const auto g = program->global("counter");
  ASSERT_TRUE(g);
  EXPECT_EQ(g->bytes, 4u);
  *reinterpret_cast<int*>(g->address) = 100;
  run("constants", {.bx = 16}, out);
  EXPECT_EQ(out[0], 103);
}

}  // namespace
}  // namespace gpupool::simgpu
