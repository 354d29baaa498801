// Far more output of the device in one go than pipes and buffers on its way hold. All of it
// arrives.
#include "check.h"

__global__ void flood(int lines) {
  for (int i = 0; i < lines; i++)
    printf("thread %d of block %d: line %d\n", threadIdx.x, blockIdx.x, i);
}

int main() {
  CHECK(cudaDeviceSetLimit(cudaLimitPrintfFifoSize, size_t{256} << 20));
  flood<<<32, 32>>>(600);
  CHECK(cudaDeviceSynchronize());
  // What waits at a later launch, too.
  flood<<<32, 32>>>(600);
  flood<<<1, 1>>>(1);
  return verdict_ok();
}
