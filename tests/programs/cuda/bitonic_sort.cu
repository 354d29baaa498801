// Sorts pairs by a 64-bit key: a bitonic network whose short strides run in shared memory.
#include <algorithm>

#include "check.h"

constexpr int kBlock = 512;  // threads of a block; each has two elements in the shared part

__global__ void sort_step(unsigned long long* data, int stride, int size) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  int partner = i ^ stride;
  if (partner > i) {
    unsigned long long a = data[i], b = data[partner];
    bool ascending = (i & size) == 0;
    if ((a > b) == ascending) {
      data[i] = b;
      data[partner] = a;
    }
  }
}

__global__ void sort_shared(unsigned long long* data, int first_size, int last_size) {
  __shared__ unsigned long long shared[2 * kBlock];
  int base = blockIdx.x * 2 * kBlock;
  shared[threadIdx.x] = data[base + threadIdx.x];
  shared[threadIdx.x + kBlock] = data[base + threadIdx.x + kBlock];
  for (int size = first_size; size <= last_size; size *= 2) {
    for (int stride = min(size / 2, kBlock); stride > 0; stride /= 2) {
      __syncthreads();
      int low = 2 * threadIdx.x - (threadIdx.x & (stride - 1));
      bool ascending = ((base + low) & size) == 0;
      unsigned long long a = shared[low], b = shared[low + stride];
      if ((a > b) == ascending) {
        shared[low] = b;
        shared[low + stride] = a;
      }
    }
  }
  __syncthreads();
  data[base + threadIdx.x] = shared[threadIdx.x];
  data[base + threadIdx.x + kBlock] = shared[threadIdx.x + kBlock];
}

int main() {
  const int n = 8192;
  Random random(6);
  std::vector<unsigned long long> data(n);
  for (int i = 0; i < n; ++i) data[i] = (random.next() & ~0xffffull) | static_cast<unsigned>(i);
  std::vector<unsigned long long> expected = data;
  std::sort(expected.begin(), expected.end());
  unsigned long long* device = to_device(data);
  sort_shared<<<n / (2 * kBlock), kBlock>>>(device, 2, 2 * kBlock);
  for (int size = 4 * kBlock; size <= n; size *= 2) {
    for (int stride = size / 2; stride > kBlock; stride /= 2) {
      sort_step<<<n / kBlock, kBlock>>>(device, stride, size);
    }
    sort_shared<<<n / (2 * kBlock), kBlock>>>(device, size, size);
  }
  CHECK(cudaGetLastError());
  expect_equal(to_host(device, n), expected, "bitonic_sort");
  return verdict_ok();
}
