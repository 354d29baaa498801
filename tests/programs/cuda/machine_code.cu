// Says what becomes of a kernel and a variable: prints the launch's error, whether the kernel did
// its work, and whether the variable holds what was written. Its verdict is the reader's.
#include <cstring>

#include "check.h"

struct Pair {
  char small;
  double big;
};

__device__ int counters[5];

__global__ void add(int *values, Pair pair, short n) {
  __shared__ int held[64];
  held[threadIdx.x] = values[threadIdx.x];
  __syncthreads();
  if (threadIdx.x < n) values[threadIdx.x] = held[threadIdx.x] + int(pair.big) + pair.small;
}

int main() {
  cudaDeviceProp device;
  CHECK(cudaGetDeviceProperties(&device, 0));
  std::printf("marked=%d\n", std::strstr(device.name, "[EMPTY KERNELS]") != nullptr);
  const int n = 64;
  int before[n], after[n];
  for (int i = 0; i < n; ++i) before[i] = 3 * i;
  int *values;
  CHECK(cudaMalloc(&values, sizeof before));
  CHECK(cudaMemcpy(values, before, sizeof before, cudaMemcpyHostToDevice));
  add<<<dim3(1000), n>>>(values, Pair{1, 10.0}, short(n));
  const cudaError_t launched = cudaGetLastError();
  std::printf("launch=%d\n", int(launched));
  if (launched != cudaSuccess) return 0;
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaMemcpy(after, values, sizeof after, cudaMemcpyDeviceToHost));
  std::printf("worked=%d\n", std::memcmp(before, after, sizeof after) != 0);
  cudaFuncAttributes attributes;
  CHECK(cudaFuncGetAttributes(&attributes, add));
  std::printf("shared=%d\n", int(attributes.sharedSizeBytes));
  int written[5] = {5, 4, 3, 2, 1}, read[5] = {};
  CHECK(cudaMemcpyToSymbol(counters, written, sizeof written));
  CHECK(cudaMemcpyFromSymbol(read, counters, sizeof read));
  std::printf("variable=%d\n", std::memcmp(read, written, sizeof read) == 0);
  add<<<1, 2000>>>(values, Pair{}, short(n));
  std::printf("too many threads=%d\n", int(cudaGetLastError()));
  return 0;
}
