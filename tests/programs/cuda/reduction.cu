// Sum and maximum with warp shuffles, one value per block, finished by an atomic.
#include "check.h"

__global__ void reduce(const int* values, int n, long long* sum, int* maximum) {
  __shared__ long long sums[32];
  __shared__ int maxima[32];
  long long s = 0;
  int m = -2147483647 - 1;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    s += values[i];
    m = max(m, values[i]);
  }
  for (int offset = 16; offset > 0; offset /= 2) {
    s += __shfl_down_sync(0xffffffffu, s, offset);
    m = max(m, __shfl_xor_sync(0xffffffffu, m, offset));
  }
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane == 0) {
    sums[warp] = s;
    maxima[warp] = m;
  }
  __syncthreads();
  if (warp == 0) {
    int warps = blockDim.x / 32;
    s = lane < warps ? sums[lane] : 0;
    m = lane < warps ? maxima[lane] : -2147483647 - 1;
    for (int offset = 16; offset > 0; offset /= 2) {
      s += __shfl_down_sync(0xffffffffu, s, offset);
      m = max(m, __shfl_down_sync(0xffffffffu, m, offset));
    }
    if (lane == 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(sum), static_cast<unsigned long long>(s));
      atomicMax(maximum, m);
    }
  }
}

int main() {
  const int n = 200001;
  Random random(3);
  std::vector<int> values(n);
  long long expected_sum = 0;
  int expected_maximum = -2147483647 - 1;
  for (int& value : values) {
    value = static_cast<int>(random.next() % 2000001) - 1000000;
    expected_sum += value;
    if (value > expected_maximum) expected_maximum = value;
  }
  int* device = to_device(values);
  long long* sum = to_device(std::vector<long long>{0});
  int* maximum = to_device(std::vector<int>{-2147483647 - 1});
  reduce<<<24, 256>>>(device, n, sum, maximum);
  CHECK(cudaGetLastError());
  expect_equal(to_host(sum, 1), std::vector<long long>{expected_sum}, "sum");
  expect_equal(to_host(maximum, 1), std::vector<int>{expected_maximum}, "maximum");
  return verdict_ok();
}
