// What every program here shares: error checks, repeatable random numbers, comparing with the CPU,
// and the verdict (prints "ok" or what is wrong; exit status 0, 1 wrong results, 2 a CUDA error).
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(call)                                                                               \
  do {                                                                                            \
    cudaError_t status_ = (call);                                                                 \
    if (status_ != cudaSuccess) {                                                                 \
      std::printf("%s:%d: %s: %s (%d)\n", __FILE__, __LINE__, #call, cudaGetErrorString(status_), \
                  static_cast<int>(status_));                                                     \
      std::exit(2);                                                                               \
    }                                                                                             \
  } while (0)

// splitmix64: the same numbers everywhere.
struct Random {
  unsigned long long state;
  explicit Random(unsigned long long seed) : state(seed) {}
  unsigned long long next() {
    unsigned long long z = (state += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  double unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }  // [0, 1)
};

template <typename T>
T* to_device(const std::vector<T>& host) {
  T* device = nullptr;
  CHECK(cudaMalloc(&device, host.size() * sizeof(T)));
  CHECK(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  return device;
}

template <typename T>
std::vector<T> to_host(const T* device, size_t count) {
  std::vector<T> host(count);
  CHECK(cudaMemcpy(host.data(), device, count * sizeof(T), cudaMemcpyDeviceToHost));
  return host;
}

template <typename T>
void expect_equal(const std::vector<T>& got, const std::vector<T>& expected, const char* what) {
  for (size_t i = 0; i < expected.size(); ++i) {
    if (!(got[i] == expected[i])) {
      std::printf("%s: element %zu is %.17g instead of %.17g\n", what, i,
                  static_cast<double>(got[i]), static_cast<double>(expected[i]));
      std::exit(1);
    }
  }
}

// |got - expected| <= tolerance * (1 + |expected|)
template <typename T>
void expect_near(const std::vector<T>& got, const std::vector<T>& expected, double tolerance,
                 const char* what) {
  for (size_t i = 0; i < expected.size(); ++i) {
    double difference = std::fabs(static_cast<double>(got[i]) - static_cast<double>(expected[i]));
    if (!(difference <= tolerance * (1 + std::fabs(static_cast<double>(expected[i]))))) {
      std::printf("%s: element %zu is %.17g instead of %.17g\n", what, i,
                  static_cast<double>(got[i]), static_cast<double>(expected[i]));
      std::exit(1);
    }
  }
}

#define EXPECT(condition)                                                 \
  do {                                                                    \
    if (!(condition)) {                                                   \
      std::printf("%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                       \
    }                                                                     \
  } while (0)

inline int verdict_ok() {
  CHECK(cudaDeviceSynchronize());
  std::printf("ok\n");
  return 0;
}
