// A device-side assertion that fails in one thread: 710, and CUDA's message on standard error.
#include <cassert>
#include <cstdio>

__global__ void check(const int* limit, int* reached) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  assert(i != *limit);
  atomicAdd(reached, 1);
}

int main() {
  int* numbers;
  const int start[2] = {35, 0};
  if (cudaMalloc(&numbers, sizeof start) != cudaSuccess) return 1;
  if (cudaMemcpy(numbers, start, sizeof start, cudaMemcpyHostToDevice) != cudaSuccess) return 1;
  check<<<2, 32>>>(numbers, numbers + 1);
  const cudaError_t result = cudaDeviceSynchronize();
  if (result != cudaErrorAssert) {
    std::printf("the result was %d (%s)\n", result, cudaGetErrorString(result));
    return 1;
  }
  // The context is lost, as CUDA says.
  if (cudaMalloc(&numbers, 4) != cudaErrorAssert) return 2;
  std::puts("ok");
}
