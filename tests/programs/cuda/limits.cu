// The limits of a context: the device's heap ends where cudaLimitMallocHeapSize says, printf's
// buffer keeps the newest output, recursion goes as deep as the stack allows, and what is in use
// stays.
#include "check.h"

constexpr size_t kKib = 1024, kMib = 1024 * kKib;

__global__ void take_all(size_t bytes, int most, int* count) {
  void* last = nullptr;
  int n = 0;
  while (n < most) {
    void** block = static_cast<void**>(malloc(bytes));
    if (block == nullptr) break;
    *block = last;
    last = block;
    n++;
  }
  *count = n;
  while (last != nullptr) {
    void* next = *static_cast<void**>(last);
    free(last);
    last = next;
  }
}

__global__ void count_up(int lines) {
  for (int i = 0; i < lines; i++) printf("line %d of the output of one kernel\n", i);
}

__device__ __noinline__ int depth_sum(int depth, const int* numbers) {
  volatile int kept[32];
  kept[depth % 32] = numbers[depth % 8];
  if (depth == 0) return kept[0];
  const int below = depth_sum(depth - 1, numbers);
  return below + kept[depth % 32];
}

__global__ void recurse(int depth, const int* numbers, int* sum) {
  *sum = depth_sum(depth, numbers);
}

size_t limit_of(cudaLimit limit) {
  size_t value = 0;
  CHECK(cudaDeviceGetLimit(&value, limit));
  return value;
}

int blocks_of(size_t bytes, int* place) {
  int count = -1;
  take_all<<<1, 1>>>(bytes, 1'000'000, place);
  CHECK(cudaMemcpy(&count, place, sizeof count, cudaMemcpyDeviceToHost));
  return count;
}

int main() {
  int* place;
  CHECK(cudaMalloc(&place, 64));
  EXPECT(limit_of(cudaLimitMallocHeapSize) == 8 * kMib);
  EXPECT(limit_of(cudaLimitPrintfFifoSize) >= kMib);
  EXPECT(limit_of(cudaLimitStackSize) >= kKib);

  // A heap of 1 MiB: blocks of 16 KiB come from it until it is full, and again when they are freed.
  CHECK(cudaDeviceSetLimit(cudaLimitMallocHeapSize, kMib));
  EXPECT(limit_of(cudaLimitMallocHeapSize) >= kMib);
  const int blocks = blocks_of(16 * kKib, place);
  EXPECT(blocks >= 32 &&
         blocks <= static_cast<int>(limit_of(cudaLimitMallocHeapSize) / (16 * kKib)));
  EXPECT(blocks_of(16 * kKib, place) == blocks);
  // It is in use.
  EXPECT(cudaDeviceSetLimit(cudaLimitMallocHeapSize, 64 * kMib) == cudaErrorInvalidValue);
  EXPECT(cudaGetLastError() == cudaErrorInvalidValue);
  EXPECT(limit_of(cudaLimitMallocHeapSize) < 64 * kMib);

  // 8 levels fit into the usual stack, 400 need more.
  const int numbers[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  CHECK(cudaMemcpy(place + 8, numbers, sizeof numbers, cudaMemcpyHostToDevice));
  for (int depth : {8, 400}) {
    if (depth == 400) CHECK(cudaDeviceSetLimit(cudaLimitStackSize, 128 * kKib));
    int sum = 0, expected = 0;
    for (int d = 0; d <= depth; d++) expected += numbers[d % 8];
    recurse<<<1, 1>>>(depth, place + 8, place);
    CHECK(cudaMemcpy(&sum, place, sizeof sum, cudaMemcpyDeviceToHost));
    EXPECT(sum == expected);
  }
  EXPECT(limit_of(cudaLimitStackSize) >= 128 * kKib);

  EXPECT(cudaDeviceSetLimit(static_cast<cudaLimit>(99), 1) != cudaSuccess);
  cudaGetLastError();

  // A new context has the usual limits, and a heap that holds more.
  CHECK(cudaDeviceReset());
  CHECK(cudaMalloc(&place, 64));
  EXPECT(limit_of(cudaLimitMallocHeapSize) == 8 * kMib);
  CHECK(cudaDeviceSetLimit(cudaLimitMallocHeapSize, 64 * kMib));
  EXPECT(blocks_of(48 * kMib, place) == 1);

  // Of more output than the buffer holds the newest is kept.
  CHECK(cudaDeviceSetLimit(cudaLimitPrintfFifoSize, 16 * kKib));
  std::fflush(stdout);
  count_up<<<1, 1>>>(2000);
  CHECK(cudaDeviceSynchronize());
  EXPECT(cudaDeviceSetLimit(cudaLimitPrintfFifoSize, 4 * kMib) == cudaErrorInvalidValue);
  cudaGetLastError();
  return verdict_ok();
}
