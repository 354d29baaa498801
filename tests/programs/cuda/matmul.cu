// C = A B with 16 x 16 tiles in shared memory; sizes that no tile divides. Both sides use fused
// multiply-add in the same order, so results are equal to the bit.
#include "check.h"

constexpr int kTile = 16;

__global__ void matmul(const float* a, const float* b, float* c, int m, int n, int k) {
  __shared__ float tile_a[kTile][kTile];
  __shared__ float tile_b[kTile][kTile];
  int row = blockIdx.y * kTile + threadIdx.y;
  int column = blockIdx.x * kTile + threadIdx.x;
  float sum = 0;
  for (int start = 0; start < k; start += kTile) {
    int x = start + threadIdx.x, y = start + threadIdx.y;
    tile_a[threadIdx.y][threadIdx.x] = row < m && x < k ? a[row * k + x] : 0.0f;
    tile_b[threadIdx.y][threadIdx.x] = y < k && column < n ? b[y * n + column] : 0.0f;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kTile; ++i) {
      sum = __fmaf_rn(tile_a[threadIdx.y][i], tile_b[i][threadIdx.x], sum);
    }
    __syncthreads();
  }
  if (row < m && column < n) c[row * n + column] = sum;
}

int main() {
  const int m = 75, n = 91, k = 117;
  Random random(2);
  std::vector<float> a(m * k), b(k * n), expected(m * n);
  for (float& value : a) value = static_cast<float>(random.unit() - 0.5);
  for (float& value : b) value = static_cast<float>(random.unit() - 0.5);
  for (int row = 0; row < m; ++row) {
    for (int column = 0; column < n; ++column) {
      float sum = 0;
      for (int i = 0; i < k; ++i) sum = std::fmaf(a[row * k + i], b[i * n + column], sum);
      expected[row * n + column] = sum;
    }
  }
  float* da = to_device(a);
  float* db = to_device(b);
  float* dc = nullptr;
  CHECK(cudaMalloc(&dc, m * n * sizeof(float)));
  dim3 grid((n + kTile - 1) / kTile, (m + kTile - 1) / kTile);
  matmul<<<grid, dim3(kTile, kTile)>>>(da, db, dc, m, n, k);
  CHECK(cudaGetLastError());
  expect_equal(to_host(dc, m * n), expected, "matmul");
  return verdict_ok();
}
