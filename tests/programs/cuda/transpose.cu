// Transposes through a padded 32 x 33 tile, with pitched memory on both sides.
#include "check.h"

constexpr int kTile = 32, kRows = 8;

__global__ void transpose(const float* in, size_t in_pitch, float* out, size_t out_pitch, int width,
                          int height) {
  __shared__ float tile[kTile][kTile + 1];
  int x = blockIdx.x * kTile + threadIdx.x;
  for (int j = threadIdx.y; j < kTile; j += kRows) {
    int y = blockIdx.y * kTile + j;
    if (x < width && y < height) tile[j][threadIdx.x] = in[y * in_pitch + x];
  }
  __syncthreads();
  x = blockIdx.y * kTile + threadIdx.x;
  for (int j = threadIdx.y; j < kTile; j += kRows) {
    int y = blockIdx.x * kTile + j;
    if (x < height && y < width) out[y * out_pitch + x] = tile[threadIdx.x][j];
  }
}

int main() {
  const int width = 301, height = 187;
  std::vector<float> in(width * height), expected(width * height), got(width * height);
  for (int y = 0; y < height; ++y) {
    for (int x = 0; x < width; ++x) {
      in[y * width + x] = static_cast<float>(y * 1000 + x);
      expected[x * height + y] = in[y * width + x];
    }
  }
  float *din = nullptr, *dout = nullptr;
  size_t in_pitch = 0, out_pitch = 0;
  CHECK(cudaMallocPitch(&din, &in_pitch, width * sizeof(float), height));
  CHECK(cudaMallocPitch(&dout, &out_pitch, height * sizeof(float), width));
  EXPECT(in_pitch >= width * sizeof(float) && out_pitch >= height * sizeof(float));
  CHECK(cudaMemcpy2D(din, in_pitch, in.data(), width * sizeof(float), width * sizeof(float), height,
                     cudaMemcpyHostToDevice));
  dim3 grid((width + kTile - 1) / kTile, (height + kTile - 1) / kTile);
  transpose<<<grid, dim3(kTile, kRows)>>>(din, in_pitch / sizeof(float), dout,
                                          out_pitch / sizeof(float), width, height);
  CHECK(cudaGetLastError());
  CHECK(cudaMemcpy2D(got.data(), height * sizeof(float), dout, out_pitch, height * sizeof(float),
                     width, cudaMemcpyDeviceToHost));
  expect_equal(got, expected, "transpose");
  return verdict_ok();
}
