// Each call of CUDA that hands out the device's printf, in the order of the programming guide's
// list: the kernel's line stands in front of what the host prints after the call. fflush keeps both
// in order.
#include "check.h"

__global__ void say(int number, int* seen) {
  if (threadIdx.x == 0) {
    printf("device %d\n", number);
    if (seen != nullptr) *seen = number;
  }
}

void host(int number) {
  std::printf("host %d\n", number);
  std::fflush(stdout);
}

int main() {
  int* seen;
  int value = 0;
  CHECK(cudaMalloc(&seen, sizeof *seen));
  cudaStream_t first, second;
  CHECK(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking));
  CHECK(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
  cudaEvent_t event;
  CHECK(cudaEventCreate(&event));

  say<<<1, 32>>>(1, seen);
  CHECK(cudaDeviceSynchronize());
  host(1);

  say<<<1, 32>>>(2, seen);
  CHECK(cudaMemcpy(&value, seen, sizeof value, cudaMemcpyDeviceToHost));
  if (value != 2) return 1;
  host(2);

  say<<<1, 32, 0, first>>>(3, seen);
  CHECK(cudaEventRecord(event, first));
  CHECK(cudaEventSynchronize(event));
  host(3);

  // Waiting for one stream must not lose what another one prints later.
  say<<<1, 32, 0, first>>>(4, seen);
  CHECK(cudaStreamSynchronize(second));
  CHECK(cudaStreamSynchronize(first));
  host(4);

  say<<<1, 32>>>(5, seen);
  CHECK(cudaMemcpy(&value, seen, sizeof value, cudaMemcpyDeviceToHost));
  CHECK(cudaMemcpy(&value, seen, sizeof value, cudaMemcpyDeviceToHost));
  host(5);

  say<<<1, 32>>>(6, nullptr);
  CHECK(cudaDeviceReset());
  host(6);
  return verdict_ok();
}
