// Two streams that wait for each other through an event, pinned memory, asynchronous copies, event
// times and queries.
#include "check.h"

__global__ void scale(int* data, int n, int factor) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) data[i] *= factor;
}

__global__ void add(int* out, const int* in, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] += in[i];
}

int main() {
  const int n = 20000;
  const size_t bytes = n * sizeof(int);
  int *host = nullptr, *a = nullptr, *b = nullptr;
  CHECK(cudaMallocHost(&host, bytes));
  CHECK(cudaMalloc(&a, bytes));
  CHECK(cudaMalloc(&b, bytes));
  cudaStream_t first, second;
  CHECK(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking));
  CHECK(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
  cudaEvent_t begin, scaled, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreateWithFlags(&scaled, cudaEventDisableTiming));
  CHECK(cudaEventCreate(&end));

  for (int i = 0; i < n; ++i) host[i] = i;
  CHECK(cudaEventRecord(begin, first));
  CHECK(cudaMemcpyAsync(a, host, bytes, cudaMemcpyHostToDevice, first));
  scale<<<(n + 127) / 128, 128, 0, first>>>(a, n, 3);
  CHECK(cudaEventRecord(scaled, first));
  CHECK(cudaMemsetAsync(b, 0, bytes, second));
  CHECK(cudaStreamWaitEvent(second, scaled, 0));
  add<<<(n + 127) / 128, 128, 0, second>>>(b, a, n);
  add<<<(n + 127) / 128, 128, 0, second>>>(b, a, n);
  CHECK(cudaEventRecord(end, second));
  CHECK(cudaEventSynchronize(end));
  CHECK(cudaMemcpyAsync(host, b, bytes, cudaMemcpyDeviceToHost, second));
  CHECK(cudaStreamSynchronize(second));
  CHECK(cudaStreamQuery(second));
  CHECK(cudaEventQuery(scaled));
  for (int i = 0; i < n; ++i) EXPECT(host[i] == 6 * i);
  float milliseconds = -1;
  CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
  EXPECT(milliseconds >= 0 && milliseconds < 600000);
  EXPECT(cudaEventElapsedTime(&milliseconds, begin, scaled) == cudaErrorInvalidResourceHandle);
  EXPECT(cudaGetLastError() == cudaErrorInvalidResourceHandle);
  CHECK(cudaEventDestroy(begin));
  CHECK(cudaEventDestroy(scaled));
  CHECK(cudaEventDestroy(end));
  CHECK(cudaStreamDestroy(first));
  CHECK(cudaStreamDestroy(second));
  CHECK(cudaFreeHost(host));
  CHECK(cudaFree(a));
  CHECK(cudaFree(b));
  return verdict_ok();
}
