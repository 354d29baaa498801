// The program behind the recordings in golden/: a little of everything, whose results
// replay_test.cc works out by itself. Changing it means recording anew.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include <vector>

#define GPUPOOL_CUDA_ABI_EXACT 1
#include "api/cuda_abi.h"
#include "recorded.h"

namespace {

void* library;

template <typename F>
F function(const char* name) {
  void* found = dlsym(library, name);
  if (found == nullptr) {
    fprintf(stderr, "there is no %s\n", name);
    exit(3);
  }
  return reinterpret_cast<F>(found);
}

}  // namespace

#define CALL(name, ...)                                                       \
  do {                                                                        \
    const CUresult result_ = function<decltype(&::name)>(#name)(__VA_ARGS__); \
    if (result_ != CUDA_SUCCESS) {                                            \
      fprintf(stderr, #name ": error %d\n", static_cast<int>(result_));       \
      return 1;                                                               \
    }                                                                         \
  } while (0)

int main() {
  using namespace gpupool::test;  // NOLINT
  library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library == nullptr) {
    fprintf(stderr, "%s\n", dlerror());
    return 3;
  }
  CALL(cuInit, 0);
  CUcontext context;
  CALL(cuDevicePrimaryCtxRetain, &context, 0);
  CALL(cuCtxSetCurrent, context);
  CUmodule module;
  CALL(cuModuleLoadData, &module, kRecordedPtx);
  CUfunction kernel;
  CALL(cuModuleGetFunction, &kernel, module, "nothing");
  CUdeviceptr first, second;
  CALL(cuMemAlloc_v2, &first, kRecordedBytes);
  CALL(cuMemAlloc_v2, &second, kRecordedBytes);
  std::vector<uint32_t> data(kRecordedBytes / 4);
  for (uint32_t i = 0; i < data.size(); i++) data[i] = recorded_value(i);
  CALL(cuMemcpyHtoD_v2, first, data.data(), kRecordedBytes);
  const uint32_t small[3] = {7, 8, 9};
  CALL(cuMemcpyHtoD_v2, first + 40, small, sizeof small);
  CALL(cuMemsetD32_v2, first + 400, 0xabcdef01, 25);
  CUstream stream;
  CALL(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
  CUevent begin, end;
  CALL(cuEventCreate, &begin, 0);
  CALL(cuEventCreate, &end, 0);
  CALL(cuEventRecord, begin, stream);
  CALL(cuMemcpyDtoDAsync_v2, second, first, kRecordedBytes, stream);
  int argument = 5;
  void* parameters[] = {&second, &argument};
  CALL(cuLaunchKernel, kernel, 2, 1, 1, 32, 1, 1, 0, stream, parameters, nullptr);
  CALL(cuEventRecord, end, stream);
  CALL(cuStreamWaitEvent, stream, end, 0);
  CALL(cuEventSynchronize, end);
  CALL(cuStreamSynchronize, stream);
  float milliseconds;
  CALL(cuEventElapsedTime_v2, &milliseconds, begin, end);
  std::vector<uint32_t> got(kRecordedBytes / 4);
  CALL(cuMemcpyDtoH_v2, got.data(), second, kRecordedBytes);
  for (uint32_t i = 0; i < got.size(); i++) {
    if (got[i] != recorded_result(i)) {
      fprintf(stderr, "word %u is %x, not %x\n", i, got[i], recorded_result(i));
      return 1;
    }
  }
  size_t free_bytes, total_bytes;
  CALL(cuMemGetInfo_v2, &free_bytes, &total_bytes);
  CALL(cuCtxSynchronize);
  CALL(cuEventDestroy_v2, begin);
  CALL(cuEventDestroy_v2, end);
  CALL(cuStreamDestroy_v2, stream);
  CALL(cuModuleUnload, module);
  CALL(cuMemFree_v2, first);
  CALL(cuMemFree_v2, second);
  CALL(cuCtxSynchronize);
  return 0;
}
