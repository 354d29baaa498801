// The kernels of kernels/classic.cu against plain loops on the host.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "fixture.h"

namespace gpupool::simgpu {
namespace {

class Classic : public EngineTest {
 protected:
  void SetUp() override { load(GPUPOOL_KERNELS "/classic.ptx"); }
  std::mt19937 random{1};
  std::vector<float> floats(size_t n) {
    std::uniform_real_distribution<float> d(-1, 1);
    std::vector<float> v(n);
    for (float& x : v) x = d(random);
    return v;
  }
  std::vector<int> integers(size_t n) {
    std::vector<int> v(n);
    for (int& x : v) x = static_cast<int>(random() % 20001) - 10000;
    return v;
  }
};

TEST_F(Classic, VectorAdd) {
  const int n = 100003;
  const auto a = floats(n), b = floats(n);
  float* c = array<float>(n);
  run("vector_add", {.gx = (n + 255) / 256, .bx = 256}, copy(a), copy(b), c, n);
  for (int i = 0; i < n; ++i) ASSERT_EQ(c[i], a[i] + b[i]) << i;
  EXPECT_EQ(counters.blocks, (n + 255) / 256);
  EXPECT_GT(counters.thread_instructions, static_cast<uint64_t>(n) * 8);
}

void check_product(const std::vector<float>& a, const std::vector<float>& b, const float* c,
                   int n) {
  for (int y = 0; y < n; y += 7)
    for (int x = 0; x < n; ++x) {
      double sum = 0;
      for (int k = 0; k < n; ++k) sum += static_cast<double>(a[y * n + k]) * b[k * n + x];
      ASSERT_NEAR(c[y * n + x], sum, 1e-4) << y << ' ' << x;
    }
}

TEST_F(Classic, MatmulTiled) {
  const int n = 128;
  const auto a = floats(n * n), b = floats(n * n);
  float* c = array<float>(n * n);
  run("matmul_tiled", {.gx = n / 16, .gy = n / 16, .bx = 16, .by = 16}, copy(a), copy(b), c, n);
  check_product(a, b, c, n);
}

TEST_F(Classic, MatmulNaive) {
  const int n = 96;
  const auto a = floats(n * n), b = floats(n * n);
  float* c = array<float>(n * n);
  run("matmul_naive", {.gx = n / 32, .gy = n / 8, .bx = 32, .by = 8}, copy(a), copy(b), c, n);
  check_product(a, b, c, n);
}

TEST_F(Classic, ReduceShuffle) {
  const int n = 123457;
  const auto in = integers(n);
  int* out = array<int>(1);
  run("reduce_shuffle", {.gx = 24, .bx = 192}, copy(in), out, n);
  EXPECT_EQ(*out, std::accumulate(in.begin(), in.end(), 0));
}

TEST_F(Classic, ScanBlock) {
  const int blocks = 5, n = 384;
  const auto in = integers(blocks * n);
  int* out = array<int>(blocks * n);
  run("scan_block", {.gx = blocks, .bx = n, .shared = n * 4}, copy(in), out);
  for (int b = 0; b < blocks; ++b) {
    int sum = 0;
    for (int i = 0; i < n; ++i) ASSERT_EQ(out[b * n + i], sum += in[b * n + i]);
  }
}

TEST_F(Classic, Histogram) {
  const int n = 77777;
  std::vector<unsigned char> in(n);
  std::vector<unsigned> want(256);
  for (auto& x : in) ++want[x = static_cast<unsigned char>(random() % 200)];
  unsigned* bins = array<unsigned>(256);
  run("histogram", {.gx = 7, .bx = 96}, copy(in), bins, n);
  for (int i = 0; i < 256; ++i) ASSERT_EQ(bins[i], want[i]);
}

TEST_F(Classic, BitonicSort) {
  auto in = integers(512 * 3);
  int* data = copy(in);
  run("bitonic_sort", {.gx = 3, .bx = 512}, data);
  for (int b = 0; b < 3; ++b) {
    std::sort(in.begin() + b * 512, in.begin() + (b + 1) * 512);
    for (int i = 0; i < 512; ++i) ASSERT_EQ(data[b * 512 + i], in[b * 512 + i]);
  }
}

TEST_F(Classic, Transpose) {
  const int n = 96;
  const auto in = floats(n * n);
  float* out = array<float>(n * n);
  run("transpose", {.gx = n / 32, .gy = n / 32, .bx = 32, .by = 8}, copy(in), out, n);
  for (int y = 0; y < n; ++y)
    for (int x = 0; x < n; ++x) ASSERT_EQ(out[x * n + y], in[y * n + x]);
}

TEST_F(Classic, NBody) {
  const int n = 256;
  const auto p = floats(n * 4);
  float* out = array<float>(n * 4);
  run("nbody", {.gx = n / 128, .bx = 128}, copy(p), out, n);
  for (int i = 0; i < n; ++i) {
    double f[3] = {0, 0, 0};
    for (int k = 0; k < n; ++k) {
      double d[3], r2 = 0.01;
      for (int c = 0; c < 3; ++c) {
        d[c] = static_cast<double>(p[k * 4 + c]) - p[i * 4 + c];
        r2 += d[c] * d[c];
      }
      for (int c = 0; c < 3; ++c) f[c] += d[c] * p[k * 4 + 3] / (r2 * std::sqrt(r2));
    }
    for (int c = 0; c < 3; ++c) ASSERT_NEAR(out[i * 4 + c], f[c], 2e-3 + 1e-4 * std::fabs(f[c]));
  }
}

TEST_F(Classic, Stencil) {
  const int n = 70;
  std::vector<double> in(n * n);
  for (double& x : in) x = static_cast<double>(random()) / 1e9;
  double* out = array<double>(n * n);
  run("stencil", {.gx = 3, .gy = 9, .bx = 32, .by = 8}, copy(in), out, n);
  for (int y = 1; y < n - 1; ++y)
    for (int x = 1; x < n - 1; ++x)
      ASSERT_EQ(out[y * n + x], 0.25 * (in[y * n + x - 1] + in[y * n + x + 1] +
                                        in[(y - 1) * n + x] + in[(y + 1) * n + x]));
  EXPECT_EQ(out[0], 0.0);
}

TEST_F(Classic, Mandelbrot) {
  const int n = 64, limit = 200;
  int* out = array<int>(n * n);
  run("mandelbrot", {.gx = n / 16, .gy = n / 16, .bx = 16, .by = 16}, out, n, limit);
  int differ = 0;  // the device fuses multiplications and additions
  for (int py = 0; py < n; ++py)
    for (int px = 0; px < n; ++px) {
      const float cx = -2.0f + 3.0f * px / n, cy = -1.5f + 3.0f * py / n;
      float x = 0, y = 0;
      int k = 0;
      while (k < limit && x * x + y * y < 4.0f) {
        const float t = x * x - y * y + cx;
        y = 2 * x * y + cy;
        x = t;
        ++k;
      }
      differ += out[py * n + px] != k;
    }
  EXPECT_LT(differ, n * n / 50);
}

}  // namespace
}  // namespace gpupool::simgpu
