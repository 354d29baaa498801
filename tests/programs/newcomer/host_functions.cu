// Functions of the program that a stream calls between kernels: in order, each after the work
// before it, and with the stream's later work waiting for it.
#include <vector>

#include "expect.h"

struct Stage {
  const int *seen;  // page-locked: what the device had written before
  std::vector<int> *log;
  int *next;  // page-locked: what the device reads afterwards
};

__global__ void twice(const int *in, int *out) { *out = 2 * *in; }

void CUDART_CB advance(void *data) {
  const Stage &stage = *static_cast<Stage *>(data);
  stage.log->push_back(*stage.seen);
  *stage.next = *stage.seen + 1;
}

int main() {
  constexpr int kStages = 8;
  cudaStream_t stream;
  int *in, *out, *host_in, *host_out;
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CUDA(cudaMalloc(&in, sizeof(int)));
  CUDA(cudaMalloc(&out, sizeof(int)));
  CUDA(cudaMallocHost(&host_in, sizeof(int)));
  CUDA(cudaMallocHost(&host_out, sizeof(int)));
  *host_in = 1;
  std::vector<int> log;
  Stage stage{host_out, &log, host_in};
  for (int i = 0; i < kStages; ++i) {
    CUDA(cudaMemcpyAsync(in, host_in, sizeof(int), cudaMemcpyHostToDevice, stream));
    twice<<<1, 1, 0, stream>>>(in, out);
    CUDA(cudaGetLastError());
    CUDA(cudaMemcpyAsync(host_out, out, sizeof(int), cudaMemcpyDeviceToHost, stream));
    CUDA(cudaLaunchHostFunc(stream, advance, &stage));
  }
  CUDA(cudaStreamSynchronize(stream));
  EXPECT(log.size() == kStages, "%zu calls", log.size());
  int expected = 1;
  for (int seen : log) {
    EXPECT(seen == 2 * expected, "%d, expected %d", seen, 2 * expected);
    expected = 2 * expected + 1;
  }
  CUDA(cudaFree(in));
  CUDA(cudaFree(out));
  CUDA(cudaFreeHost(host_in));
  CUDA(cudaFreeHost(host_out));
  CUDA(cudaStreamDestroy(stream));
  std::printf("ok\n");
  return 0;
}
