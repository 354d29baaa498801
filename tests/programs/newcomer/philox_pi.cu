// Philox4x32-10 by hand: Random123's known answers, the same words as on the CPU, and pi and an
// integral from them.
#include <cmath>
#include <cstdint>
#include <vector>

#include "require.h"

__host__ __device__ inline uint32_t high(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  return __umulhi(a, b);
#else
  return static_cast<uint64_t>(a) * b >> 32;
#endif
}

__host__ __device__ inline void philox(uint32_t c[4], uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
    uint32_t h0 = high(0xD2511F53u, c[0]), l0 = 0xD2511F53u * c[0];
    uint32_t h1 = high(0xCD9E8D57u, c[2]), l1 = 0xCD9E8D57u * c[2];
    uint32_t t[4] = {h1 ^ c[1] ^ k0, l1, h0 ^ c[3] ^ k1, l0};
    for (int i = 0; i < 4; ++i) c[i] = t[i];
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

__global__ void known(const uint32_t* counter, const uint32_t* key, uint32_t* out) {
  uint32_t c[4];
  for (int i = 0; i < 4; ++i) c[i] = counter[threadIdx.x * 4 + i];
  philox(c, key[threadIdx.x * 2], key[threadIdx.x * 2 + 1]);
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = c[i];
}

// Two points in the unit square per counter. Hits are counted by ballot, the checksum is a sum of
// words, so that both are exact; the integral of exp(-x*x) is in floating point.
__global__ void simulate(int per_thread, uint64_t seed, unsigned long long* hits,
                         unsigned long long* checksum, double* integral) {
  uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned long long in = 0, sum = 0;
  double part = 0;
  for (int k = 0; k < per_thread; ++k) {
    uint32_t c[4] = {static_cast<uint32_t>(k), thread, 0xfeedu, 0};
    philox(c, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
    for (int p = 0; p < 4; p += 2) {
      uint64_t x = c[p] >> 1, y = c[p + 1] >> 1;
      unsigned vote = __ballot_sync(0xffffffffu, x * x + y * y < (1ull << 62));
      if (threadIdx.x % 32 == 0) in += __popc(vote);
      sum += static_cast<unsigned long long>(c[p]) + c[p + 1];
    }
    double u = c[0] * (1.0 / 4294967296.0);
    part += exp(-u * u);
  }
  __shared__ double parts[128];
  parts[threadIdx.x] = part;
  __syncthreads();
  for (int s = 64; s; s >>= 1) {
    if (threadIdx.x < s) parts[threadIdx.x] += parts[threadIdx.x + s];
    __syncthreads();
  }
  if (threadIdx.x == 0) integral[blockIdx.x] = parts[0];
  if (in) atomicAdd(hits, in);
  atomicAdd(checksum, sum);
}

int main() {
  // Known answers of Random123 (kat_vectors, philox4x32 10).
  const uint32_t counter[12] = {0,   0,   0,          0,          ~0u,        ~0u,
                                ~0u, ~0u, 0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344};
  const uint32_t key[6] = {0, 0, ~0u, ~0u, 0xa4093822, 0x299f31d0};
  const uint32_t answer[12] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8,
                               0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd,
                               0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1};
  uint32_t *dc, *dk, *out, got[12];
  CK(cudaMalloc(&dc, sizeof counter));
  CK(cudaMalloc(&dk, sizeof key));
  CK(cudaMalloc(&out, sizeof answer));
  CK(cudaMemcpy(dc, counter, sizeof counter, cudaMemcpyHostToDevice));
  CK(cudaMemcpy(dk, key, sizeof key, cudaMemcpyHostToDevice));
  known<<<1, 3>>>(dc, dk, out);
  CK(cudaMemcpy(got, out, sizeof got, cudaMemcpyDeviceToHost));
  for (int i = 0; i < 12; ++i)
    REQUIRE(got[i] == answer[i], "known answer %d: %08x, not %08x", i, got[i], answer[i]);

  constexpr int kBlocks = 9, kThreads = 128, kEach = 40;
  constexpr uint64_t kSeed = 0x1234567890abcdefull;
  unsigned long long* totals;
  double* integral;
  CK(cudaMalloc(&totals, 16));
  CK(cudaMalloc(&integral, kBlocks * sizeof(double)));
  CK(cudaMemset(totals, 0, 16));
  simulate<<<kBlocks, kThreads>>>(kEach, kSeed, totals, totals + 1, integral);
  CK(cudaGetLastError());
  unsigned long long t[2];
  double parts[kBlocks], sum = 0;
  CK(cudaMemcpy(t, totals, 16, cudaMemcpyDeviceToHost));
  CK(cudaMemcpy(parts, integral, sizeof parts, cudaMemcpyDeviceToHost));
  for (double p : parts) sum += p;

  unsigned long long hits = 0, check = 0;
  double want = 0;
  for (uint32_t thread = 0; thread < kBlocks * kThreads; ++thread)
    for (int k = 0; k < kEach; ++k) {
      uint32_t c[4] = {static_cast<uint32_t>(k), thread, 0xfeedu, 0};
      philox(c, static_cast<uint32_t>(kSeed), static_cast<uint32_t>(kSeed >> 32));
      for (int p = 0; p < 4; p += 2) {
        uint64_t x = c[p] >> 1, y = c[p + 1] >> 1;
        hits += x * x + y * y < (1ull << 62);
        check += static_cast<unsigned long long>(c[p]) + c[p + 1];
      }
      double u = c[0] * (1.0 / 4294967296.0);
      want += std::exp(-u * u);
    }
  const double samples = kBlocks * kThreads * kEach;
  REQUIRE(t[0] == hits && t[1] == check, "hits %llu, not %llu", t[0], hits);
  REQUIRE(std::fabs(sum - want) <= 1e-9 * want, "integral %.15g, not %.15g", sum, want);
  double pi = 4.0 * hits / (2 * samples), value = sum / samples;
  REQUIRE(std::fabs(pi - M_PI) < 0.03 && std::fabs(value - 0.7468241328) < 0.006, "biased");
  puts("ok");
}
