// What the programs of this folder share: a call that must succeed, a condition that must hold.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>

#define CUDA(call)                                                                              \
  do {                                                                                          \
    const cudaError_t status_ = (call);                                                         \
    if (status_ != cudaSuccess) {                                                               \
      std::printf("%s:%d: %s: %s (%s)\n", __FILE__, __LINE__, #call, cudaGetErrorName(status_), \
                  cudaGetErrorString(status_));                                                 \
      std::exit(1);                                                                             \
    }                                                                                           \
  } while (0)

#define EXPECT(condition, ...)                                            \
  do {                                                                    \
    if (!(condition)) {                                                   \
      std::printf("%s:%d: not so: %s: ", __FILE__, __LINE__, #condition); \
      std::printf(__VA_ARGS__);                                           \
      std::printf("\n");                                                  \
      std::exit(1);                                                       \
    }                                                                     \
  } while (0)

inline bool close(double value, double expected, double relative) {
  return std::fabs(value - expected) <= relative * (std::fabs(expected) + 1);
}
