// Functions of the program in streams: order, what they see and what the device sees of them, while
// they wait for other threads of the program, and very many of them. Copies between page-locked
// memory and the device happen in stream order, also when the program only looks at the memory.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "check.h"

__global__ void add_one(int* data, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) data[i] += 1;
}

struct Door {
  std::mutex lock;
  std::condition_variable changed;
  bool open = false, entered = false;
};

static void CUDART_CB wait_at(void* argument) {
  auto* door = static_cast<Door*>(argument);
  std::unique_lock<std::mutex> guard(door->lock);
  door->entered = true;
  door->changed.notify_all();
  door->changed.wait(guard, [&] { return door->open; });
}

struct Sum {
  const int* data;
  int n;
  long long result;
};

static void CUDART_CB add_up(void* argument) {
  auto* sum = static_cast<Sum*>(argument);
  sum->result = 0;
  for (int i = 0; i < sum->n; ++i) sum->result += sum->data[i];
}

struct Set {
  int* data;
  int n, value;
};

static void CUDART_CB set_all(void* argument) {
  auto* set = static_cast<Set*>(argument);
  for (int i = 0; i < set->n; ++i) set->data[i] = set->value;
}

// A function waits for this thread, which meanwhile submits everything else.
static void function_that_waits(int n) {
  const size_t bytes = static_cast<size_t>(n) * sizeof(int);
  cudaStream_t stream, other;
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  int *device, *elsewhere, *in, *out, *aside;
  CHECK(cudaMalloc(&device, bytes));
  CHECK(cudaMalloc(&elsewhere, bytes));
  CHECK(cudaMallocHost(&in, bytes));
  CHECK(cudaMallocHost(&out, bytes));
  CHECK(cudaMallocHost(&aside, bytes));
  for (int i = 0; i < n; ++i) in[i] = -1, out[i] = -1, aside[i] = -1;
  CHECK(cudaMemset(elsewhere, 0, bytes));
  CHECK(cudaDeviceSynchronize());
  Door door;
  Set set{in, n, 41};
  Sum sum{out, n, -1};
  CHECK(cudaLaunchHostFunc(stream, wait_at, &door));
  CHECK(cudaLaunchHostFunc(stream, set_all, &set));
  CHECK(cudaMemcpyAsync(device, in, bytes, cudaMemcpyHostToDevice, stream));
  add_one<<<(n + 127) / 128, 128, 0, stream>>>(device, n);
  CHECK(cudaMemcpyAsync(out, device, bytes, cudaMemcpyDeviceToHost, stream));
  CHECK(cudaLaunchHostFunc(stream, add_up, &sum));
  // The other stream's work comes to its end meanwhile.
  add_one<<<(n + 127) / 128, 128, 0, other>>>(elsewhere, n);
  CHECK(cudaMemcpyAsync(aside, elsewhere, bytes, cudaMemcpyDeviceToHost, other));
  CHECK(cudaStreamSynchronize(other));
  for (int i = 0; i < n; ++i) EXPECT(aside[i] == 1);
  {
    std::unique_lock<std::mutex> guard(door.lock);
    door.changed.wait(guard, [&] { return door.entered; });
    EXPECT(cudaStreamQuery(stream) == cudaErrorNotReady);
    EXPECT(sum.result == -1);
    door.open = true;
    door.changed.notify_all();
  }
  CHECK(cudaStreamSynchronize(stream));
  EXPECT(sum.result == 42ll * n);
  for (int i = 0; i < n; ++i) EXPECT(out[i] == 42);
  CHECK(cudaFreeHost(in));
  CHECK(cudaFreeHost(out));
  CHECK(cudaFreeHost(aside));
  CHECK(cudaFree(device));
  CHECK(cudaFree(elsewhere));
  CHECK(cudaStreamDestroy(stream));
  CHECK(cudaStreamDestroy(other));
}

struct Order {
  std::vector<int>* seen;
  int number;
};

static void CUDART_CB note(cudaStream_t, cudaError_t status, void* argument) {
  auto* order = static_cast<Order*>(argument);
  order->seen->push_back(status == cudaSuccess ? order->number : -1);
}

static void CUDART_CB count(void* argument) {
  static_cast<std::atomic<int>*>(argument)->fetch_add(1);
}

static void many(int streams, int each) {
  std::vector<cudaStream_t> all(streams);
  std::vector<std::vector<int>> seen(streams);
  std::vector<Order> orders;
  orders.reserve(static_cast<size_t>(streams * each));
  std::atomic<int> counted{0};
  for (cudaStream_t& stream : all) {
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }
  for (int i = 0; i < each; ++i) {
    for (int s = 0; s < streams; ++s) {
      orders.push_back({&seen[s], i});
      CHECK(cudaStreamAddCallback(all[s], note, &orders.back(), 0));
      CHECK(cudaLaunchHostFunc(all[s], count, &counted));
    }
  }
  CHECK(cudaDeviceSynchronize());
  EXPECT(counted == streams * each);
  for (int s = 0; s < streams; ++s) {
    EXPECT(seen[s].size() == static_cast<size_t>(each));
    for (int i = 0; i < each; ++i) EXPECT(seen[s][i] == i);
    CHECK(cudaStreamDestroy(all[s]));
  }
}

// The same page-locked memory as target and as source, without ever waiting in between.
static void there_and_back(int n, int rounds) {
  const size_t bytes = static_cast<size_t>(n) * sizeof(int);
  cudaStream_t stream;
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  int *device, *host;
  CHECK(cudaMalloc(&device, bytes));
  CHECK(cudaMallocHost(&host, bytes));
  for (int i = 0; i < n; ++i) host[i] = i;
  for (int round = 0; round < rounds; ++round) {
    CHECK(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream));
    add_one<<<(n + 127) / 128, 128, 0, stream>>>(device, n);
    CHECK(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream));
  }
  cudaEvent_t event;
  CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  CHECK(cudaEventRecord(event, stream));
  while (cudaEventQuery(event) == cudaErrorNotReady) std::this_thread::yield();
  for (int i = 0; i < n; ++i) EXPECT(host[i] == i + rounds);

  // Without another call of CUDA: the data come all the same.
  CHECK(cudaMemsetAsync(device, 0, bytes, stream));
  CHECK(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream));
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  const volatile int* last = host + n - 1;
  while (*last != 0) {
    EXPECT(std::chrono::steady_clock::now() < limit);
    std::this_thread::yield();
  }
  CHECK(cudaStreamSynchronize(stream));
  CHECK(cudaEventDestroy(event));
  CHECK(cudaFreeHost(host));
  CHECK(cudaFree(device));
  CHECK(cudaStreamDestroy(stream));
}

int main() {
  std::setvbuf(stdout, nullptr, _IONBF, 0);  // a program that fails may not come to its end
  function_that_waits(1000);
  function_that_waits(3 << 20);  // 12 MiB
  many(4, 300);
  there_and_back(5000, 20);
  there_and_back(1 << 20, 3);
  return verdict_ok();
}
