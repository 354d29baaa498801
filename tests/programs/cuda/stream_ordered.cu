// Memory that is allocated and freed in stream order, between kernels: chains of temporaries on
// several streams and threads, compared with the CPU; and what the pool keeps and gives back.
#include <cstdint>
#include <thread>

#include "check.h"

__global__ void scale(const float* in, float* out, float factor, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = in[i] * factor;
}

__global__ void add(const float* a, const float* b, float* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = a[i] + b[i];
}

// out = ((x * 3) + (x * 0.5)) * 2, all in temporaries of the stream, several times over.
static void chain(cudaStream_t stream, const float* x, std::vector<float>* result, int n) {
  const int blocks = (n + 127) / 128;
  const size_t bytes = static_cast<size_t>(n) * sizeof(float);
  float* out;
  CHECK(cudaMallocAsync(&out, bytes, stream));
  for (int round = 0; round < 10; ++round) {
    float *a, *b, *sum;
    CHECK(cudaMallocAsync(&a, bytes, stream));
    CHECK(cudaMallocAsync(&b, bytes, stream));
    scale<<<blocks, 128, 0, stream>>>(x, a, 3.0f, n);
    scale<<<blocks, 128, 0, stream>>>(x, b, 0.5f, n);
    CHECK(cudaMallocAsync(&sum, bytes, stream));
    add<<<blocks, 128, 0, stream>>>(a, b, sum, n);
    CHECK(cudaFreeAsync(a, stream));
    CHECK(cudaFreeAsync(b, stream));
    scale<<<blocks, 128, 0, stream>>>(sum, out, 2.0f, n);
    CHECK(cudaFreeAsync(sum, stream));
    CHECK(cudaGetLastError());
  }
  result->resize(static_cast<size_t>(n));
  CHECK(cudaMemcpyAsync(result->data(), out, bytes, cudaMemcpyDeviceToHost, stream));
  CHECK(cudaFreeAsync(out, stream));
  CHECK(cudaStreamSynchronize(stream));
}

static uint64_t number(cudaMemPool_t pool, cudaMemPoolAttr attribute) {
  uint64_t value = ~0ull;
  CHECK(cudaMemPoolGetAttribute(pool, attribute, &value));
  return value;
}

int main() {
  constexpr int kN = 10007, kThreads = 4;
  Random random{7};
  std::vector<float> host(kN), expected(kN);
  for (int i = 0; i < kN; ++i) {
    host[i] = static_cast<float>(random.unit());
    expected[i] = (host[i] * 3.0f + host[i] * 0.5f) * 2.0f;
  }
  float* x = to_device(host);

  std::vector<std::thread> threads;
  std::vector<std::vector<float>> results(kThreads);
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      cudaStream_t stream;
      CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
      chain(stream, x, &results[t], kN);
      CHECK(cudaStreamDestroy(stream));
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& result : results) expect_near(result, expected, 1e-6, "a chain");
  std::vector<float> on_default;
  chain(nullptr, x, &on_default, kN);
  expect_near(on_default, expected, 1e-6, "the default stream's chain");

  cudaMemPool_t pool;
  CHECK(cudaDeviceGetDefaultMemPool(&pool, 0));
  CHECK(cudaDeviceSynchronize());
  EXPECT(number(pool, cudaMemPoolAttrUsedMemCurrent) == 0);
  EXPECT(number(pool, cudaMemPoolAttrReservedMemCurrent) == 0);
  EXPECT(number(pool, cudaMemPoolAttrUsedMemHigh) >= 4 * kN * sizeof(float));
  size_t before = 0, after = 0, total = 0;
  CHECK(cudaMemGetInfo(&before, &total));
  float* big;
  CHECK(cudaMallocAsync(&big, 64 << 20, nullptr));
  CHECK(cudaMemGetInfo(&after, &total));
  EXPECT(before - after >= 64 << 20);
  CHECK(cudaFreeAsync(big, nullptr));
  CHECK(cudaMemPoolTrimTo(pool, 0));
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaMemGetInfo(&after, &total));
  EXPECT(after == before);

  void* too_much = nullptr;
  EXPECT(cudaMallocAsync(&too_much, total + 1, nullptr) == cudaErrorMemoryAllocation);
  cudaGetLastError();
  EXPECT(cudaFreeAsync(reinterpret_cast<char*>(x) + 4, nullptr) == cudaErrorInvalidValue);
  cudaGetLastError();
  CHECK(cudaFree(x));
  return verdict_ok();
}
