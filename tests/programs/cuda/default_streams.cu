// Built with per-thread default streams: four threads work at once, each on its own stream.
#include <thread>

#include "check.h"

__global__ void fill(int* data, int n, int value) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) data[i] = value + i;
}

int main() {
  const int threads = 4, n = 3000, rounds = 5;
  int wrong[threads] = {0};
  std::vector<std::thread> workers;
  for (int t = 0; t < threads; ++t) {
    workers.emplace_back([&wrong, t] {
      int* data = nullptr;
      CHECK(cudaMalloc(&data, n * sizeof(int)));
      for (int round = 0; round < rounds; ++round) {
        fill<<<(n + 255) / 256, 256>>>(data, n, 1000 * t + round);
        CHECK(cudaGetLastError());
        std::vector<int> got(n);
        CHECK(cudaMemcpyAsync(got.data(), data, n * sizeof(int), cudaMemcpyDeviceToHost, 0));
        CHECK(cudaStreamSynchronize(0));
        for (int i = 0; i < n; ++i) wrong[t] += got[i] != 1000 * t + round + i;
      }
      CHECK(cudaFree(data));
    });
  }
  for (std::thread& worker : workers) worker.join();
  for (int t = 0; t < threads; ++t) EXPECT(wrong[t] == 0);
  return verdict_ok();
}
