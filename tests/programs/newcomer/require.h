// Shared by the .cu programs: stop with a message at the first CUDA error or wrong result.
#pragma once
#include <cstdio>
#include <cstdlib>
#define CK(x)                                                                      \
  do {                                                                             \
    cudaError_t e_ = (x);                                                          \
    if (e_ != cudaSuccess) {                                                       \
      fprintf(stderr, "%s:%d: %s -> %d %s: %s\n", __FILE__, __LINE__, #x, (int)e_, \
              cudaGetErrorName(e_), cudaGetErrorString(e_));                       \
      exit(1);                                                                     \
    }                                                                              \
  } while (0)
#define REQUIRE(c, ...)                                      \
  do {                                                       \
    if (!(c)) {                                              \
      fprintf(stderr, "%s:%d: WRONG: ", __FILE__, __LINE__); \
      fprintf(stderr, __VA_ARGS__);                          \
      fputc('\n', stderr);                                   \
      exit(1);                                               \
    }                                                        \
  } while (0)
