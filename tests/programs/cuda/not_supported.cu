// What a slice does not have says so: in the device's attributes, and with cudaErrorNotSupported at
// the call. (The simulated GPU itself has some of it.)
#include "check.h"

static int failures = 0;

static void refused(cudaError_t got, const char* what) {
  cudaGetLastError();
  if (got == cudaErrorNotSupported) return;
  std::printf("%s: %s\n", what, cudaGetErrorName(got));
  ++failures;
}

static void expect_attribute(cudaDeviceAttr attribute, int expected, const char* what) {
  int value = -1;
  CHECK(cudaDeviceGetAttribute(&value, attribute, 0));
  if (value == expected) return;
  std::printf("%s is %d\n", what, value);
  ++failures;
}

int main() {
  expect_attribute(cudaDevAttrManagedMemory, 0, "managed memory");
  expect_attribute(cudaDevAttrConcurrentManagedAccess, 0, "concurrent managed access");
  expect_attribute(cudaDevAttrCanMapHostMemory, 0, "mapped host memory");
  expect_attribute(cudaDevAttrMemoryPoolsSupported, 1, "memory pools");
  expect_attribute(cudaDevAttrMemoryPoolSupportedHandleTypes, 0, "shared memory pools");
  void* pointer = nullptr;
  refused(cudaMallocManaged(&pointer, 4096), "cudaMallocManaged");
  CHECK(cudaHostAlloc(&pointer, 4096, cudaHostAllocMapped));
  void* mapped = nullptr;
  refused(cudaHostGetDevicePointer(&mapped, pointer, 0), "cudaHostGetDevicePointer");
  CHECK(cudaFreeHost(pointer));
  void* memory = nullptr;
  CHECK(cudaMalloc(&memory, 4096));
  cudaIpcMemHandle_t handle;
  refused(cudaIpcGetMemHandle(&handle, memory), "cudaIpcGetMemHandle");
  CHECK(cudaFree(memory));
  return failures != 0 ? 1 : verdict_ok();
}
