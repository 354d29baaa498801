// Stream compaction: the elements that satisfy a predicate, in their order, in one pass over many
// blocks (each block looks back at its predecessors' totals), on several streams at once that wait
// for each other's events; memory of the stream-ordered allocator where the device has it.
#include <cub/block/block_scan.cuh>
#include <vector>

#include "expect.h"

constexpr int kThreads = 128, kItems = 3, kTile = kThreads * kItems;

struct Above {
  int threshold;
  __device__ bool operator()(int value) const { return value > threshold; }
};

enum : unsigned long long { kNothing = 0, kBlockOnly = 1ull << 62, kInclusive = 2ull << 62 };
constexpr unsigned long long kCountMask = (1ull << 62) - 1;

// `states`: per block, zero at first: a flag in the two top bits and a count. `ticket`: zero at
// first; blocks take their place in the order in which they start, so that looking back ends.
template <typename Predicate>
__global__ void compact(const int *__restrict__ in, int count, Predicate keep, int *out, int *kept,
                        volatile unsigned long long *states, unsigned int *ticket) {
  using Scan = cub::BlockScan<int, kThreads>;
  __shared__ typename Scan::TempStorage storage;
  __shared__ unsigned int shared_tile;
  __shared__ unsigned long long shared_before;
  if (threadIdx.x == 0) shared_tile = atomicAdd(ticket, 1u);
  __syncthreads();
  const unsigned int tile = shared_tile;

  int values[kItems], ranks[kItems];
  bool selected[kItems];
  int mine = 0;
  for (int item = 0; item < kItems; ++item) {
    const int index = tile * kTile + threadIdx.x * kItems + item;
    selected[item] = false;
    if (index < count) {
      values[item] = in[index];
      selected[item] = keep(values[item]);
    }
    ranks[item] = mine;
    mine += selected[item];
  }
  int before_me, total;
  Scan(storage).ExclusiveSum(mine, before_me, total);

  if (threadIdx.x == 0) {
    unsigned long long before = 0;
    if (tile > 0) {
      states[tile] = kBlockOnly | static_cast<unsigned long long>(total);
      __threadfence();
      for (int look = static_cast<int>(tile) - 1; look >= 0;) {
        const unsigned long long state = states[look];
        if ((state & ~kCountMask) == kNothing) continue;
        before += state & kCountMask;
        if ((state & ~kCountMask) == kInclusive) break;
        --look;
      }
    }
    states[tile] = kInclusive | (before + total);
    __threadfence();
    shared_before = before;
    if (tile == gridDim.x - 1) *kept = static_cast<int>(before + total);
  }
  __syncthreads();
  for (int item = 0; item < kItems; ++item) {
    if (selected[item]) out[shared_before + before_me + ranks[item]] = values[item];
  }
}

__global__ void fill(int *out, int count, unsigned int seed) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    out[i] = static_cast<int>((seed + i) * 2654435761u >> 8) % 1000;
  }
}

int reference_value(unsigned int seed, int i) {
  return static_cast<int>((seed + i) * 2654435761u >> 8) % 1000;
}

bool stream_ordered = false;

template <typename T>
void allocate(T **pointer, size_t bytes, cudaStream_t stream) {
  CUDA(stream_ordered ? cudaMallocAsync(pointer, bytes, stream) : cudaMalloc(pointer, bytes));
}

void release(void *pointer, cudaStream_t stream) {
  CUDA(stream_ordered ? cudaFreeAsync(pointer, stream) : cudaFree(pointer));
}

int main() {
  int pools = 0;
  CUDA(cudaDeviceGetAttribute(&pools, cudaDevAttrMemoryPoolsSupported, 0));
  stream_ordered = pools != 0;
  constexpr int kStreams = 3;
  const int counts[kStreams] = {1, kTile * 20, 30011};
  const int thresholds[kStreams] = {-1, 499, 900};
  cudaStream_t producer, streams[kStreams];
  cudaEvent_t filled[kStreams], begin, end;
  CUDA(cudaStreamCreateWithFlags(&producer, cudaStreamNonBlocking));
  CUDA(cudaEventCreate(&begin));
  CUDA(cudaEventCreate(&end));

  int *out[kStreams], *kept[kStreams];
  int *host_out[kStreams], *host_kept[kStreams];
  CUDA(cudaEventRecord(begin, producer));
  for (int s = 0; s < kStreams; ++s) {
    CUDA(cudaStreamCreateWithPriority(&streams[s], cudaStreamNonBlocking, 0));
    CUDA(cudaEventCreateWithFlags(&filled[s], cudaEventDisableTiming));
    const int blocks = (counts[s] + kTile - 1) / kTile;
    const size_t states_bytes = blocks * sizeof(unsigned long long);
    int *in;
    unsigned long long *states;
    unsigned int *ticket;
    allocate(&in, counts[s] * sizeof(int), producer);
    fill<<<8, 64, 0, producer>>>(in, counts[s], 17u * s);
    CUDA(cudaGetLastError());
    CUDA(cudaEventRecord(filled[s], producer));

    allocate(&out[s], counts[s] * sizeof(int), streams[s]);
    allocate(&kept[s], sizeof(int), streams[s]);
    allocate(&states, states_bytes, streams[s]);
    allocate(&ticket, sizeof(unsigned int), streams[s]);
    CUDA(cudaMemsetAsync(states, 0, states_bytes, streams[s]));
    CUDA(cudaMemsetAsync(ticket, 0, sizeof(unsigned int), streams[s]));
    CUDA(cudaStreamWaitEvent(streams[s], filled[s], 0));
    compact<<<blocks, kThreads, 0, streams[s]>>>(in, counts[s], Above{thresholds[s]}, out[s],
                                                 kept[s], states, ticket);
    CUDA(cudaGetLastError());
    release(in, streams[s]);
    release(states, streams[s]);
    release(ticket, streams[s]);

    CUDA(cudaMallocHost(&host_out[s], counts[s] * sizeof(int)));
    CUDA(cudaHostAlloc(&host_kept[s], sizeof(int), cudaHostAllocDefault));
    CUDA(cudaMemcpyAsync(host_out[s], out[s], counts[s] * sizeof(int), cudaMemcpyDeviceToHost,
                         streams[s]));
    CUDA(cudaMemcpyAsync(host_kept[s], kept[s], sizeof(int), cudaMemcpyDeviceToHost, streams[s]));
  }
  CUDA(cudaEventRecord(end, producer));
  for (int s = 0; s < kStreams; ++s) CUDA(cudaStreamSynchronize(streams[s]));
  CUDA(cudaEventSynchronize(end));
  CUDA(cudaEventQuery(end));
  float milliseconds = -1;
  CUDA(cudaEventElapsedTime(&milliseconds, begin, end));
  EXPECT(milliseconds >= 0, "%g ms", static_cast<double>(milliseconds));

  for (int s = 0; s < kStreams; ++s) {
    int position = 0;
    for (int i = 0; i < counts[s]; ++i) {
      const int value = reference_value(17u * s, i);
      if (value <= thresholds[s]) continue;
      EXPECT(host_out[s][position] == value, "stream %d, element %d: %d, expected %d", s, position,
             host_out[s][position], value);
      ++position;
    }
    EXPECT(*host_kept[s] == position, "stream %d kept %d, expected %d", s, *host_kept[s], position);
    release(out[s], streams[s]);
    release(kept[s], streams[s]);
    CUDA(cudaStreamSynchronize(streams[s]));
    CUDA(cudaFreeHost(host_out[s]));
    CUDA(cudaFreeHost(host_kept[s]));
    CUDA(cudaEventDestroy(filled[s]));
    CUDA(cudaStreamDestroy(streams[s]));
  }
  CUDA(cudaEventDestroy(begin));
  CUDA(cudaEventDestroy(end));
  CUDA(cudaStreamDestroy(producer));
  CUDA(cudaDeviceReset());
  std::printf("ok\n");
  return 0;
}
