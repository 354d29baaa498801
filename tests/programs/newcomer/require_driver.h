/* Shared by the .c programs: stop with a message at the first CUDA error or wrong result. */
#pragma once
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>

#define CK(x)                                                                       \
  do {                                                                              \
    CUresult r_ = (x);                                                              \
    if (r_ != CUDA_SUCCESS) {                                                       \
      const char* n_ = "?";                                                         \
      cuGetErrorName(r_, &n_);                                                      \
      fprintf(stderr, "%s:%d: %s -> %d %s\n", __FILE__, __LINE__, #x, (int)r_, n_); \
      exit(1);                                                                      \
    }                                                                               \
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
