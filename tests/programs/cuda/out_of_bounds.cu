// Wrong on purpose: thread 17 of block 2 writes far behind its buffer. Every later call must say
// 700, in this process only.
#include "check.h"

__global__ void overrun(int* data, long long far_away) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  data[blockIdx.x == 2 && threadIdx.x == 17 ? far_away : i] = i;
}

int main() {
  int* data = nullptr;
  CHECK(cudaMalloc(&data, 128 * sizeof(int)));
  overrun<<<4, 32>>>(data, 1ll << 34);
  cudaError_t at_launch = cudaGetLastError();
  EXPECT(at_launch == cudaSuccess || at_launch == cudaErrorIllegalAddress);
  EXPECT(cudaDeviceSynchronize() == cudaErrorIllegalAddress);
  int value = 0;
  EXPECT(cudaMemcpy(&value, data, sizeof value, cudaMemcpyDeviceToHost) == cudaErrorIllegalAddress);
  void* more = nullptr;
  EXPECT(cudaMalloc(&more, 4096) == cudaErrorIllegalAddress);
  overrun<<<1, 32>>>(data, 0);
  EXPECT(cudaGetLastError() == cudaErrorIllegalAddress);
  EXPECT(cudaDeviceSynchronize() == cudaErrorIllegalAddress);
  std::printf("ok\n");
  return 0;
}
