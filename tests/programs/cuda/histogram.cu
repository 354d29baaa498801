// 256 bins: atomics in shared memory, then one global atomic per bin and block.
#include "check.h"

__global__ void histogram(const unsigned char* data, int n, unsigned* bins) {
  __shared__ unsigned local[256];
  for (int i = threadIdx.x; i < 256; i += blockDim.x) local[i] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    atomicAdd(&local[data[i]], 1u);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 256; i += blockDim.x) {
    if (local[i] != 0) atomicAdd(&bins[i], local[i]);
  }
}

int main() {
  const int n = 150000;
  Random random(5);
  std::vector<unsigned char> data(n);
  std::vector<unsigned> expected(256, 0);
  for (unsigned char& value : data) {
    double x = random.unit();
    value = static_cast<unsigned char>(x * x * 256);  // small values are frequent
    ++expected[value];
  }
  unsigned char* device = to_device(data);
  unsigned* bins = nullptr;
  CHECK(cudaMalloc(&bins, 256 * sizeof(unsigned)));
  CHECK(cudaMemset(bins, 0, 256 * sizeof(unsigned)));
  histogram<<<20, 192>>>(device, n, bins);
  CHECK(cudaGetLastError());
  expect_equal(to_host(bins, 256), expected, "histogram");
  return verdict_ok();
}
