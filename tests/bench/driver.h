// The driver API as the benchmark uses it: looked up in libcuda.so.1 when the program runs.
#pragma once

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

#define GPUPOOL_CUDA_ABI_EXACT  // names stand for themselves, as dlsym knows them
#include "api/cuda_abi.h"

namespace gpupool::bench {

// clang-format off
#define BENCH_FUNCTIONS(X) \
  X(cuInit) \
  X(cuDeviceGet) \
  X(cuDevicePrimaryCtxRetain) \
  X(cuDevicePrimaryCtxRelease_v2) \
  X(cuCtxSetCurrent) \
  X(cuCtxSynchronize) \
  X(cuModuleLoadData) \
  X(cuModuleUnload) \
  X(cuModuleGetFunction) \
  X(cuLaunchKernel) \
  X(cuMemAlloc_v2) \
  X(cuMemFree_v2) \
  X(cuMemcpyHtoD_v2) \
  X(cuMemcpyDtoH_v2) \
  X(cuMemGetInfo_v2)
// clang-format on

struct Driver {
#define BENCH_MEMBER(name) decltype(&::name) name = nullptr;
  BENCH_FUNCTIONS(BENCH_MEMBER)
#undef BENCH_MEMBER

  // Ends the program with a sentence when there is no driver or it lacks a function.
  void load() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (library == nullptr) {
      std::fprintf(stderr, "bench: %s\n", dlerror());
      std::exit(3);
    }
#define BENCH_LOOKUP(function)                                                \
  function = reinterpret_cast<decltype(function)>(dlsym(library, #function)); \
  if (function == nullptr) {                                                  \
    std::fprintf(stderr, "bench: libcuda.so.1 has no %s\n", #function);       \
    std::exit(3);                                                             \
  }
    BENCH_FUNCTIONS(BENCH_LOOKUP)
#undef BENCH_LOOKUP
  }
};

#define BENCH_CHECK(call)                                                                      \
  do {                                                                                         \
    int status_ = static_cast<int>(call);                                                      \
    if (status_ != 0) {                                                                        \
      std::fprintf(stderr, "bench: %s:%d: %s gave CUDA error %d\n", __FILE__, __LINE__, #call, \
                   status_);                                                                   \
      std::exit(4);                                                                            \
    }                                                                                          \
  } while (0)

}  // namespace gpupool::bench
