// cuda::barrier and cuda::pipeline of a block: split arrivals, threads that leave, parity waits,
// asynchronous copies with each, and a pipeline of producer and consumer warps.
#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>

#include <cuda/barrier>
#include <cuda/pipeline>

#include "check.h"

namespace cg = cooperative_groups;
using Barrier = cuda::barrier<cuda::thread_scope_block>;

constexpr int kThreads = 128, kBlocks = 6, kRounds = 7;
constexpr int kTile = 4 * kThreads, kTiles = 9;

// Between arriving and waiting each thread does something else; then it reads its neighbour's
// value.
__global__ void split_arrivals(const int* in, int* out) {
  __shared__ Barrier barrier;
  __shared__ int values[2][kThreads];
  const int t = threadIdx.x;
  if (t == 0) init(&barrier, kThreads);
  __syncthreads();
  int value = in[blockIdx.x * kThreads + t];
  for (int round = 0; round < kRounds; ++round) {
    values[round % 2][t] = value;
    auto token = barrier.arrive();
    const int mine = value * 3 + round;
    barrier.wait(std::move(token));
    value = mine + values[round % 2][(t + 1 + round) % kThreads];
  }
  out[blockIdx.x * kThreads + t] = value;
}

// A quarter of the threads leaves after each round; the others see each phase's parity.
__global__ void leaving(int* out) {
  __shared__ Barrier barrier;
  __shared__ int arrived;
  const int t = threadIdx.x;
  if (t == 0) {
    init(&barrier, kThreads);
    arrived = 0;
  }
  __syncthreads();
  for (int round = 0; round < 4; ++round) {
    atomicAdd(&arrived, 1);
    if (t / (kThreads / 4) == round) {
      barrier.arrive_and_drop();
      return;
    }
    if (t % 2) {
      barrier.arrive_and_wait();
    } else {
      (void)barrier.arrive();
      barrier.wait_parity(false);  // two phases a round
    }
    if (t == kThreads - 1) out[blockIdx.x * 4 + round] = arrived;
    barrier.arrive_and_wait();
  }
}

// One thread arrives for all of its warp; another gives up waiting after some time.
__global__ void arrivals_for_others(int* out) {
  __shared__ Barrier barrier;
  __shared__ int sum;
  const int t = threadIdx.x;
  if (t == 0) {
    init(&barrier, kThreads);
    sum = 0;
  }
  __syncthreads();
  if (t == 5) {  // without an arrival of its own: the phase can't have ended
    const bool over = barrier.try_wait_parity_for(false, cuda::std::chrono::nanoseconds(2000));
    out[2 * blockIdx.x + 1] = over ? 1 : 2;
  }
  __syncwarp();
  atomicAdd(&sum, t);
  __syncwarp();
  if (t % 32 == 0) {
    auto token = barrier.arrive(32);
    barrier.wait(std::move(token));
    if (t == 0) out[2 * blockIdx.x] = sum;
  }
}

// Copies to shared memory that a barrier or a group waits for.
__global__ void copies(const int* in, int* out) {
  __shared__ alignas(16) int tile[3][kTile];
  __shared__ Barrier barrier;
  const cg::thread_block block = cg::this_thread_block();
  const int t = threadIdx.x;
  if (t == 0) init(&barrier, kThreads);
  block.sync();
  const int* from = in + blockIdx.x * kTile;
  cuda::memcpy_async(block, tile[0], from, cuda::aligned_size_t<16>(sizeof tile[0]), barrier);
  barrier.arrive_and_wait();
  for (int k = 0; k < 4; ++k)  // each thread its own piece
    cuda::memcpy_async(tile[1] + 4 * t + k, from + (4 * t + k + 17) % kTile, sizeof(int), barrier);
  barrier.arrive_and_wait();
  cg::memcpy_async(block, tile[2], from, sizeof tile[2]);
  cg::wait(block);
  for (int k = t; k < kTile; k += kThreads)
    out[blockIdx.x * kTile + k] =
        tile[0][kTile - 1 - k] + 2 * tile[1][(k + 5) % kTile] + 3 * tile[2][(k + 1) % kTile];
}

// Two stages: while one tile is worked on, the next is copied.
__global__ void two_stages(const int* in, long long* out) {
  __shared__ alignas(16) int tile[2][kTile];
  __shared__ cuda::pipeline_shared_state<cuda::thread_scope_block, 2> state;
  const cg::thread_block block = cg::this_thread_block();
  auto pipeline = cuda::make_pipeline(block, &state);
  const int* from = in + blockIdx.x * kTile * kTiles;
  long long sum = 0;
  int fetched = 0;
  for (int k = 0; k < kTiles; ++k) {
    for (; fetched < kTiles && fetched < k + 2; ++fetched) {
      pipeline.producer_acquire();
      cuda::memcpy_async(block, tile[fetched % 2], from + fetched * kTile,
                         cuda::aligned_size_t<16>(sizeof tile[0]), pipeline);
      pipeline.producer_commit();
    }
    pipeline.consumer_wait();
    for (int j = 0; j < 4; ++j) sum += (k + 1) * tile[k % 2][(4 * threadIdx.x + j + 64) % kTile];
    pipeline.consumer_release();
  }
  out[blockIdx.x * kThreads + threadIdx.x] = sum;
}

// A warp that only copies, and three that only add.
__global__ void producer_and_consumers(const int* in, long long* out) {
  __shared__ alignas(16) int tile[3][kTile];
  __shared__ cuda::pipeline_shared_state<cuda::thread_scope_block, 3> state;
  const cg::thread_block block = cg::this_thread_block();
  const bool producer = threadIdx.x < 32;
  auto pipeline = cuda::make_pipeline(
      block, &state, producer ? cuda::pipeline_role::producer : cuda::pipeline_role::consumer);
  const int* from = in + blockIdx.x * kTile * kTiles;
  if (producer) {
    for (int k = 0; k < kTiles; ++k) {
      pipeline.producer_acquire();
      for (int j = threadIdx.x; j < kTile; j += 32)
        cuda::memcpy_async(tile[k % 3] + j, from + k * kTile + j, sizeof(int), pipeline);
      pipeline.producer_commit();
    }
    out[blockIdx.x * kThreads + threadIdx.x] = 0;
    return;
  }
  long long sum = 0;
  for (int k = 0; k < kTiles; ++k) {
    pipeline.consumer_wait();
    for (int j = threadIdx.x - 32; j < kTile; j += kThreads - 32) sum += (k + 1) * tile[k % 3][j];
    pipeline.consumer_release();
  }
  out[blockIdx.x * kThreads + threadIdx.x] = sum;
}

int main() {
  Random random(11);
  std::vector<int> in(kBlocks * kTile * kTiles);
  for (int& v : in) v = static_cast<int>(random.next() % 2001) - 1000;
  int* d_in = to_device(in);
  int* d_out = to_device(std::vector<int>(kBlocks * kTile));
  long long* d_sums = to_device(std::vector<long long>(kBlocks * kThreads));

  split_arrivals<<<kBlocks, kThreads>>>(d_in, d_out);
  CHECK(cudaGetLastError());
  std::vector<int> expected(kBlocks * kThreads);
  for (int b = 0; b < kBlocks; ++b) {
    std::vector<int> values(in.begin() + b * kThreads, in.begin() + (b + 1) * kThreads);
    for (int round = 0; round < kRounds; ++round) {
      const std::vector<int> before = values;
      for (int t = 0; t < kThreads; ++t)
        values[t] = before[t] * 3 + round + before[(t + 1 + round) % kThreads];
    }
    for (int t = 0; t < kThreads; ++t) expected[b * kThreads + t] = values[t];
  }
  expect_equal(to_host(d_out, expected.size()), expected, "split arrivals");

  leaving<<<kBlocks, kThreads>>>(d_out);
  CHECK(cudaGetLastError());
  expected.clear();
  for (int b = 0; b < kBlocks; ++b)
    for (int round = 0, arrived = 0; round < 3; ++round) {
      arrived += kThreads - round * kThreads / 4;
      expected.push_back(arrived);
    }
  std::vector<int> got = to_host(d_out, kBlocks * 4), kept;
  for (int k = 0; k < kBlocks * 4; ++k)
    if (k % 4 < 3) kept.push_back(got[k]);  // the last quarter leaves without a word
  expect_equal(kept, expected, "threads that leave");

  arrivals_for_others<<<kBlocks, kThreads>>>(d_out);
  CHECK(cudaGetLastError());
  expected.clear();
  for (int b = 0; b < kBlocks; ++b) {
    expected.push_back(kThreads * (kThreads - 1) / 2);
    expected.push_back(2);
  }
  expect_equal(to_host(d_out, expected.size()), expected, "arrivals for others");

  copies<<<kBlocks, kThreads>>>(d_in, d_out);
  CHECK(cudaGetLastError());
  expected.assign(kBlocks * kTile, 0);
  for (int b = 0; b < kBlocks; ++b)
    for (int k = 0; k < kTile; ++k) {
      const int* from = in.data() + b * kTile;
      expected[b * kTile + k] =
          from[kTile - 1 - k] + 2 * from[(k + 5 + 17) % kTile] + 3 * from[(k + 1) % kTile];
    }
  expect_equal(to_host(d_out, expected.size()), expected, "copies");

  std::vector<long long> sums(kBlocks * kThreads);
  for (int b = 0; b < kBlocks; ++b)
    for (int t = 0; t < kThreads; ++t)
      for (int k = 0; k < kTiles; ++k)
        for (int j = 0; j < 4; ++j)
          sums[b * kThreads + t] +=
              (k + 1) * in[(b * kTiles + k) * kTile + (4 * t + j + 64) % kTile];
  two_stages<<<kBlocks, kThreads>>>(d_in, d_sums);
  CHECK(cudaGetLastError());
  expect_equal(to_host(d_sums, sums.size()), sums, "two stages");

  sums.assign(sums.size(), 0);
  for (int b = 0; b < kBlocks; ++b)
    for (int k = 0; k < kTiles; ++k)
      for (int j = 0; j < kTile; ++j)
        sums[b * kThreads + 32 + j % (kThreads - 32)] += (k + 1) * in[(b * kTiles + k) * kTile + j];
  producer_and_consumers<<<kBlocks, kThreads>>>(d_in, d_sums);
  CHECK(cudaGetLastError());
  expect_equal(to_host(d_sums, sums.size()), sums, "producer and consumers");
  CHECK(cudaDeviceSynchronize());
  std::puts("ok");
  return 0;
}
