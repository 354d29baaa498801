// Inclusive prefix sum in three kernels: scan of each block, scan of the blocks' sums, their sum.
#include "check.h"

constexpr int kBlock = 512;

__global__ void scan_blocks(const unsigned* in, unsigned* out, unsigned* sums, int n) {
  __shared__ unsigned shared[2][kBlock];
  int i = blockIdx.x * kBlock + threadIdx.x;
  int current = 0;
  shared[0][threadIdx.x] = i < n ? in[i] : 0;
  __syncthreads();
  for (int offset = 1; offset < kBlock; offset *= 2) {
    unsigned value = shared[current][threadIdx.x];
    if (threadIdx.x >= offset) value += shared[current][threadIdx.x - offset];
    current = 1 - current;
    shared[current][threadIdx.x] = value;
    __syncthreads();
  }
  if (i < n) out[i] = shared[current][threadIdx.x];
  if (sums != nullptr && threadIdx.x == kBlock - 1) sums[blockIdx.x] = shared[current][kBlock - 1];
}

__global__ void add_sums(unsigned* out, const unsigned* sums, int n) {
  int i = blockIdx.x * kBlock + threadIdx.x;
  if (blockIdx.x > 0 && i < n) out[i] += sums[blockIdx.x - 1];
}

int main() {
  const int n = 50021;
  const int blocks = (n + kBlock - 1) / kBlock;
  static_assert((50021 + kBlock - 1) / kBlock <= kBlock, "one block scans the sums");
  Random random(4);
  std::vector<unsigned> in(n), expected(n);
  unsigned sum = 0;
  for (int i = 0; i < n; ++i) {
    in[i] = static_cast<unsigned>(random.next());
    sum += in[i];
    expected[i] = sum;
  }
  unsigned* din = to_device(in);
  unsigned *dout = nullptr, *dsums = nullptr;
  CHECK(cudaMalloc(&dout, n * sizeof(unsigned)));
  CHECK(cudaMalloc(&dsums, blocks * sizeof(unsigned)));
  scan_blocks<<<blocks, kBlock>>>(din, dout, dsums, n);
  scan_blocks<<<1, kBlock>>>(dsums, dsums, nullptr, blocks);
  add_sums<<<blocks, kBlock>>>(dout, dsums, n);
  CHECK(cudaGetLastError());
  expect_equal(to_host(dout, n), expected, "scan");
  return verdict_ok();
}
