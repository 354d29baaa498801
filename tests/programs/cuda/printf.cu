// The device's printf: the test compares all of standard output.
#include "check.h"

__global__ void speak(const char* unused, double x) {
  if (threadIdx.x == 0) {
    printf("block %d says %s %5.2f %c %u %lld %x %%\n", blockIdx.x, "hello", x + blockIdx.x, 'z',
           4000000000u, -5000000000ll, 0xbeef);
  }
}

int main() {
  for (int i = 0; i < 2; ++i) {
    speak<<<1, 32>>>(nullptr, 1.25 + i);
    CHECK(cudaDeviceSynchronize());
  }
  return verdict_ok();
}
