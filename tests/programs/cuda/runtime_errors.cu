// What the runtime API reports at the call itself.
#include "check.h"

__global__ void nothing(int* data) { data[threadIdx.x] = 1; }

static int failures = 0;

static void expect(cudaError_t got, cudaError_t expected, const char* what) {
  cudaGetLastError();
  if (got != expected) {
    std::printf("%s: %d instead of %d\n", what, static_cast<int>(got), static_cast<int>(expected));
    ++failures;
  }
}

int main() {
  int* data = nullptr;
  CHECK(cudaMalloc(&data, 4096));
  nothing<<<1, 2048>>>(data);
  expect(cudaGetLastError(), cudaErrorInvalidConfiguration, "block of 2048 threads");
  nothing<<<0, 32>>>(data);
  expect(cudaGetLastError(), cudaErrorInvalidConfiguration, "grid of 0 blocks");
  nothing<<<dim3(1, 70000), 32>>>(data);
  expect(cudaGetLastError(), cudaErrorInvalidConfiguration, "grid of 70000 in y");
  nothing<<<1, 32, 1 << 20>>>(data);
  expect(cudaGetLastError(), cudaErrorInvalidValue, "1 MiB of shared memory");
  expect(cudaSetDevice(64), cudaErrorInvalidDevice, "cudaSetDevice(64)");
  void* pointer = nullptr;
  expect(cudaMalloc(&pointer, 1ull << 46), cudaErrorMemoryAllocation, "64 TiB");
  expect(cudaMemcpy(data, &pointer, 8, static_cast<cudaMemcpyKind>(77)),
         cudaErrorInvalidMemcpyDirection, "a direction that does not exist");
  expect(cudaFree(reinterpret_cast<char*>(data) + 8), cudaErrorInvalidValue,
         "free inside a buffer");
  std::vector<char> host(8192);
  expect(cudaMemcpy(data, host.data(), host.size(), cudaMemcpyHostToDevice), cudaErrorInvalidValue,
         "copy behind a buffer");
  expect(cudaFuncSetAttribute(nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, 1 << 24),
         cudaErrorInvalidValue, "16 MiB of shared memory allowed");
  if (failures != 0) return 1;
  nothing<<<1, 32>>>(data);
  CHECK(cudaGetLastError());
  expect_equal(to_host(data, 32), std::vector<int>(32, 1), "after the errors");
  return verdict_ok();
}
