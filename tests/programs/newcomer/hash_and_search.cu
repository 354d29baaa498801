// word count in an open-addressing hash table (64-bit atomicCAS) and pattern search over byte
// strings.
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "require.h"
typedef unsigned long long ull;

struct Slot {
  ull key;
  unsigned count, first;
};

__host__ __device__ inline bool letter(char c) { return c >= 'a' && c <= 'z'; }
__host__ __device__ inline ull step(ull h, char c) {
  return (h ^ (unsigned char)c) * 1099511628211ull;
}

__global__ void insert(const char* text, int n, Slot* table, unsigned mask, unsigned* failed) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n || !letter(text[i]) || (i > 0 && letter(text[i - 1]))) return;
  ull h = 14695981039346656037ull;
  for (int j = i; j < n && letter(text[j]); ++j) h = step(h, text[j]);
  unsigned at = (unsigned)(h ^ (h >> 32)) & mask;
  for (unsigned probe = 0; probe <= mask; ++probe, at = (at + 1) & mask) {
    ull old = atomicCAS(&table[at].key, 0ull, h);
    if (old == 0 || old == h) {
      atomicAdd(&table[at].count, 1u);
      atomicMin(&table[at].first, (unsigned)i);
      return;
    }
  }
  atomicExch(failed, 1u);
}

__constant__ char pattern[32];

// Bytes of the block and of the halo behind it are staged as 32-bit words; matches as a bit map.
__global__ void search(const uint32_t* text, int words, int n, int len, unsigned* bits,
                       unsigned* matches) {
  __shared__ uint32_t stage[64 + 8];
  const int base = blockIdx.x * 64;  // in words; 256 threads: one byte each
  if (threadIdx.x < 72)
    stage[threadIdx.x] = base + (int)threadIdx.x < words ? text[base + threadIdx.x] : 0;
  __syncthreads();
  const char* s = (const char*)stage + threadIdx.x;
  int at = base * 4 + threadIdx.x;
  bool hit = at + len <= n;
  for (int j = 0; hit && j < len; ++j) hit = s[j] == pattern[j];
  unsigned b = __ballot_sync(0xffffffffu, hit);
  if ((threadIdx.x & 31) == 0) bits[at / 32] = b;
  int in_block = __syncthreads_count(hit);
  if (threadIdx.x == 0) atomicAdd(matches, (unsigned)in_block);
}

int main() {
  std::vector<std::string> words;
  uint32_t s = 99;
  auto rnd = [&] {
    s = s * 1664525u + 1013904223u;
    return s >> 10;
  };
  for (int i = 0; i < 900; ++i) {
    std::string w;
    for (int j = 0, l = 2 + rnd() % 9; j < l; ++j) w += 'a' + rnd() % 6;
    words.push_back(w);
  }
  std::string text;
  while (text.size() < 60000) {
    text += words[(rnd() % 900) * (rnd() % 900) / 900];
    text += rnd() % 7 ? " " : ",\n";
  }
  const int n = (int)text.size(), padded = (n + 255) / 256 * 256;
  text.resize(padded, '\0');
  const unsigned slots = 4096;
  char* dtext;
  Slot* dtable;
  unsigned* dflags;
  unsigned* dbits;
  CK(cudaMalloc(&dtext, padded));
  CK(cudaMalloc(&dtable, slots * sizeof(Slot)));
  CK(cudaMalloc(&dflags, 8));
  CK(cudaMalloc(&dbits, padded / 8));
  CK(cudaMemcpy(dtext, text.data(), padded, cudaMemcpyHostToDevice));
  std::vector<Slot> table(slots, Slot{0, 0, 0xffffffffu});
  CK(cudaMemcpy(dtable, table.data(), slots * sizeof(Slot), cudaMemcpyHostToDevice));
  CK(cudaMemset(dflags, 0, 8));
  insert<<<(n + 127) / 128, 128>>>(dtext, n, dtable, slots - 1, dflags);
  CK(cudaGetLastError());
  CK(cudaMemcpy(table.data(), dtable, slots * sizeof(Slot), cudaMemcpyDeviceToHost));
  std::map<ull, Slot> want;
  for (int i = 0; i < n;) {
    if (!letter(text[i])) {
      ++i;
      continue;
    }
    ull h = 14695981039346656037ull;
    int j = i;
    for (; j < n && letter(text[j]); ++j) h = step(h, text[j]);
    auto it = want.emplace(h, Slot{h, 0, (unsigned)i}).first;
    it->second.count++;
    i = j;
  }
  size_t found = 0;
  for (auto& e : table)
    if (e.key) {
      auto it = want.find(e.key);
      REQUIRE(it != want.end(), "unknown key %llx", e.key);
      REQUIRE(it->second.count == e.count && it->second.first == e.first,
              "key %llx: %u,%u, expected %u,%u", e.key, e.count, e.first, it->second.count,
              it->second.first);
      ++found;
    }
  REQUIRE(found == want.size(), "%zu words, expected %zu", found, want.size());

  const std::string pat = words[3].substr(0, 3);
  CK(cudaMemcpyToSymbol(pattern, pat.data(), pat.size()));
  search<<<padded / 256, 256>>>((const uint32_t*)dtext, padded / 4, n, (int)pat.size(), dbits,
                                dflags + 1);
  CK(cudaGetLastError());
  std::vector<unsigned> bits(padded / 32);
  unsigned flags[2];
  CK(cudaMemcpy(bits.data(), dbits, padded / 8, cudaMemcpyDeviceToHost));
  CK(cudaMemcpy(flags, dflags, 8, cudaMemcpyDeviceToHost));
  unsigned expected = 0;
  for (int i = 0; i < padded; ++i) {
    bool w = i + (int)pat.size() <= n && !memcmp(text.data() + i, pat.data(), pat.size());
    expected += w;
    REQUIRE(w == (bool)(bits[i / 32] >> (i % 32) & 1), "match at %d: expected %d", i, w);
  }
  REQUIRE(flags[0] == 0 && flags[1] == expected && expected > 0,
          "%u matches, expected %u, failed %u", flags[1], expected, flags[0]);
  printf("%zu distinct words, '%s' %u times\nok\n", found, pat.c_str(), expected);
}
