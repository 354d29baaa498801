// stable LSD radix sort (key, payload) by ballots + unordered warp-aggregated compaction.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "require.h"

constexpr int kBits = 4, kBuckets = 1 << kBits, kBlock = 256, kWarps = kBlock / 32;
constexpr unsigned kFull = 0xffffffffu;

__global__ void count_digits(const uint32_t* keys, int n, int shift, unsigned* counts) {
  __shared__ unsigned hist[kBuckets];
  if (threadIdx.x < kBuckets) hist[threadIdx.x] = 0;
  __syncthreads();
  int i = blockIdx.x * kBlock + threadIdx.x;
  if (i < n) atomicAdd(&hist[(keys[i] >> shift) & (kBuckets - 1)], 1u);
  __syncthreads();
  if (threadIdx.x < kBuckets) counts[threadIdx.x * gridDim.x + blockIdx.x] = hist[threadIdx.x];
}

// One block: exclusive scan of any length, 1024 at a time.
__global__ void scan_exclusive(unsigned* data, int n) {
  __shared__ unsigned warp_sums[32];
  __shared__ unsigned carry;
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (threadIdx.x == 0) carry = 0;
  __syncthreads();
  for (int base = 0; base < n; base += blockDim.x) {
    int i = base + threadIdx.x;
    unsigned v = i < n ? data[i] : 0, inc = v;
    for (int d = 1; d < 32; d <<= 1) {
      unsigned o = __shfl_up_sync(kFull, inc, d);
      if (lane >= d) inc += o;
    }
    if (lane == 31) warp_sums[warp] = inc;
    __syncthreads();
    if (warp == 0) {
      unsigned s = lane < (int)(blockDim.x >> 5) ? warp_sums[lane] : 0;
      for (int d = 1; d < 32; d <<= 1) {
        unsigned o = __shfl_up_sync(kFull, s, d);
        if (lane >= d) s += o;
      }
      warp_sums[lane] = s;
    }
    __syncthreads();
    unsigned before = carry + (warp ? warp_sums[warp - 1] : 0);
    if (i < n) data[i] = before + inc - v;
    __syncthreads();
    if (threadIdx.x == blockDim.x - 1) carry = before + inc;
    __syncthreads();
  }
}

__global__ void scatter(const uint32_t* keys, const uint32_t* vals, int n, int shift,
                        const unsigned* offsets, uint32_t* keys_out, uint32_t* vals_out) {
  __shared__ unsigned per_warp[kWarps][kBuckets];
  for (int i = threadIdx.x; i < kWarps * kBuckets; i += kBlock) (&per_warp[0][0])[i] = 0;
  __syncthreads();
  int i = blockIdx.x * kBlock + threadIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  bool valid = i < n;
  uint32_t key = valid ? keys[i] : 0;
  unsigned digit = (key >> shift) & (kBuckets - 1);
  unsigned peers = __ballot_sync(kFull, valid);
  for (int b = 0; b < kBits; ++b) {
    unsigned m = __ballot_sync(kFull, (digit >> b) & 1);
    peers &= ((digit >> b) & 1) ? m : ~m;
  }
  unsigned rank = __popc(peers & ((1u << lane) - 1));
  if (valid && rank == 0) per_warp[warp][digit] = __popc(peers);
  __syncthreads();
  if (threadIdx.x < kBuckets) {
    unsigned sum = 0;
    for (int w = 0; w < kWarps; ++w) {
      unsigned c = per_warp[w][threadIdx.x];
      per_warp[w][threadIdx.x] = sum;
      sum += c;
    }
  }
  __syncthreads();
  if (valid) {
    unsigned to = offsets[digit * gridDim.x + blockIdx.x] + per_warp[warp][digit] + rank;
    keys_out[to] = key;
    vals_out[to] = vals[i];
  }
}

__global__ void compact(const uint32_t* in, int n, uint32_t divisor, uint32_t* out,
                        unsigned* used) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    uint32_t v = in[i];
    if (v % divisor == 0) {  // divergent on purpose
      unsigned active = __activemask();
      int lane = threadIdx.x & 31, leader = __ffs(active) - 1;
      unsigned base = 0;
      if (lane == leader) base = atomicAdd(used, (unsigned)__popc(active));
      base = __shfl_sync(active, base, leader);
      out[base + __popc(active & ((1u << lane) - 1))] = v;
    }
  }
}

int main() {
  const int n = 60007, blocks = (n + kBlock - 1) / kBlock;
  std::vector<uint32_t> keys(n), vals(n);
  uint32_t s = 12345;
  for (int i = 0; i < n; ++i) {
    s ^= s << 13;
    s ^= s >> 17;
    s ^= s << 5;
    keys[i] = i % 3 ? s : s & 0xffff;  // many equal ones, so that stability matters
    vals[i] = i;
  }
  uint32_t *k0, *k1, *v0, *v1;
  unsigned *counts, *used;
  CK(cudaMalloc(&k0, n * 4));
  CK(cudaMalloc(&k1, n * 4));
  CK(cudaMalloc(&v0, n * 4));
  CK(cudaMalloc(&v1, n * 4));
  CK(cudaMalloc(&counts, sizeof(unsigned) * kBuckets * blocks));
  CK(cudaMalloc(&used, sizeof(unsigned)));
  CK(cudaMemcpy(k0, keys.data(), n * 4, cudaMemcpyHostToDevice));
  CK(cudaMemcpy(v0, vals.data(), n * 4, cudaMemcpyHostToDevice));
  for (int shift = 0; shift < 32; shift += kBits) {
    count_digits<<<blocks, kBlock>>>(k0, n, shift, counts);
    scan_exclusive<<<1, 1024>>>(counts, kBuckets * blocks);
    scatter<<<blocks, kBlock>>>(k0, v0, n, shift, counts, k1, v1);
    CK(cudaGetLastError());
    std::swap(k0, k1);
    std::swap(v0, v1);
  }
  std::vector<uint32_t> ks(n), vs(n), order(n);
  CK(cudaMemcpy(ks.data(), k0, n * 4, cudaMemcpyDeviceToHost));
  CK(cudaMemcpy(vs.data(), v0, n * 4, cudaMemcpyDeviceToHost));
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return keys[a] < keys[b]; });
  for (int i = 0; i < n; ++i)
    REQUIRE(ks[i] == keys[order[i]] && vs[i] == order[i], "sorted[%d] = (%u,%u), expected (%u,%u)",
            i, ks[i], vs[i], keys[order[i]], order[i]);

  CK(cudaMemset(used, 0, sizeof(unsigned)));
  compact<<<20, 192>>>(k0, n, 3, k1, used);
  CK(cudaGetLastError());
  unsigned got;
  CK(cudaMemcpy(&got, used, sizeof got, cudaMemcpyDeviceToHost));
  std::vector<uint32_t> want;
  for (uint32_t k : keys)
    if (k % 3 == 0) want.push_back(k);
  std::sort(want.begin(), want.end());
  REQUIRE(got == want.size(), "compacted %u, expected %zu", got, want.size());
  std::vector<uint32_t> c(got);
  CK(cudaMemcpy(c.data(), k1, got * 4, cudaMemcpyDeviceToHost));
  std::sort(c.begin(), c.end());
  REQUIRE(c == want, "the compacted set differs");
  CK(cudaDeviceSynchronize());
  printf("%d keys sorted, %u kept\nok\n", n, got);
}
