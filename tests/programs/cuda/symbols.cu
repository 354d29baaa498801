// Global and constant variables with initialisers, recursion, a table of functions, a virtual call,
// device properties and function attributes.
#include <cstring>

#include "check.h"

__device__ int counter = 41;
__device__ double table[4] = {0.5, 1.5, 2.5, 3.5};
__constant__ int weights[3] = {2, 3, 5};

__device__ int twice(int x) { return 2 * x; }
__device__ int square(int x) { return x * x; }
typedef int (*Function)(int);
__device__ Function functions[2] = {twice, square};

struct Shape {
  __device__ virtual int area(int n) const = 0;
};
struct Square : Shape {
  __device__ int area(int n) const override { return n * n; }
};
struct Bar : Shape {
  __device__ int area(int n) const override { return 7 * n; }
};

__device__ int fibonacci(int n) { return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2); }

__global__ void work(int* out) {
  int i = threadIdx.x;
  int value = functions[i & 1](i);
  Square square_shape;
  Bar bar;
  const Shape* shape = i % 3 == 0 ? static_cast<const Shape*>(&square_shape) : &bar;
  value += shape->area(i) + weights[i % 3] + static_cast<int>(2 * table[i % 4]);
  out[i] = value + fibonacci(i % 10);
  atomicAdd(&counter, 1);
}

static int host_fibonacci(int n) {
  return n < 2 ? n : host_fibonacci(n - 1) + host_fibonacci(n - 2);
}

int main() {
  const int n = 96;
  const int host_weights[3] = {11, 13, 17};
  CHECK(cudaMemcpyToSymbol(weights, host_weights, sizeof host_weights));
  double host_table[4];
  CHECK(cudaMemcpyFromSymbol(host_table, table, sizeof host_table));
  for (int i = 0; i < 4; ++i) EXPECT(host_table[i] == 0.5 + i);
  void* address = nullptr;
  size_t size = 0;
  CHECK(cudaGetSymbolAddress(&address, counter));
  CHECK(cudaGetSymbolSize(&size, table));
  EXPECT(address != nullptr && size == sizeof host_table);

  int* out = nullptr;
  CHECK(cudaMalloc(&out, n * sizeof(int)));
  work<<<1, n>>>(out);
  CHECK(cudaGetLastError());
  std::vector<int> expected(n);
  for (int i = 0; i < n; ++i) {
    expected[i] = (i & 1 ? i * i : 2 * i) + (i % 3 == 0 ? i * i : 7 * i) + host_weights[i % 3] +
                  static_cast<int>(2 * (0.5 + i % 4)) + host_fibonacci(i % 10);
  }
  expect_equal(to_host(out, n), expected, "work");
  int count = 0;
  CHECK(cudaMemcpyFromSymbol(&count, counter, sizeof count));
  EXPECT(count == 41 + n);

  cudaFuncAttributes attributes;
  CHECK(cudaFuncGetAttributes(&attributes, work));
  EXPECT(attributes.maxThreadsPerBlock > 0 && attributes.ptxVersion > 0);
  int device = -1, warp = 0;
  CHECK(cudaGetDevice(&device));
  CHECK(cudaDeviceGetAttribute(&warp, cudaDevAttrWarpSize, device));
  EXPECT(device == 0 && warp == 32);
  return verdict_ok();
}
