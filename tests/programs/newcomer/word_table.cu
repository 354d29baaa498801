// Bytes: finds a pattern in a text, and counts the text's words in an open-addressing hash table
// that all threads fill at once. Threads of a warp that hold the same word are merged first, with
// __match_any_sync; the words found are collected with one atomic addition a warp.
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "expect.h"

constexpr int kSlots = 1024;
constexpr unsigned long long kFree = ~0ull;

struct Slot {
  unsigned long long key;
  unsigned int count;
  unsigned int first;  // where the word occurs first
};

__constant__ char pattern[32];
__device__ Slot table[kSlots];

__device__ __host__ inline bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

__device__ __host__ inline char lower(char c) {
  return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
}

__global__ void find(const char *text, int length, int pattern_length, unsigned int *found,
                     unsigned int *positions) {
  const int start = blockIdx.x * blockDim.x + threadIdx.x;
  bool match = start + pattern_length <= length;
  for (int i = 0; match && i < pattern_length; ++i) match = text[start + i] == pattern[i];
  const unsigned int votes = __ballot_sync(0xffffffffu, match);
  if (!match) return;
  // Only the threads that matched are here; the first of them reserves room for all.
  const int leader = __ffs(votes) - 1, lane = threadIdx.x % warpSize;
  unsigned int base = 0;
  if (lane == leader) base = atomicAdd(found, __popc(votes));
  base = __shfl_sync(votes, base, leader);
  positions[base + __popc(votes & ((1u << lane) - 1))] = start;
}

__global__ void clear_table() {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < kSlots) table[i] = Slot{kFree, 0, 0xffffffffu};
}

__global__ void count_words(const char *text, int length) {
  const int start = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned long long key = kFree;
  if (start < length && is_letter(text[start]) && (start == 0 || !is_letter(text[start - 1]))) {
    key = 0xcbf29ce484222325ull;  // FNV-1a
    for (int i = start; i < length && is_letter(text[i]); ++i) {
      key = (key ^ static_cast<unsigned char>(lower(text[i]))) * 0x100000001b3ull;
    }
  }
  const unsigned int same = __match_any_sync(0xffffffffu, key);
  const unsigned int lane = threadIdx.x % warpSize;
  if (key == kFree || __ffs(same) - 1 != static_cast<int>(lane)) return;
  for (unsigned int i = static_cast<unsigned int>(key % kSlots);; i = (i + 1) % kSlots) {
    const unsigned long long held = atomicCAS(&table[i].key, kFree, key);
    if (held != kFree && held != key) continue;
    atomicAdd(&table[i].count, __popc(same));
    atomicMin(&table[i].first, static_cast<unsigned int>(start));
    return;
  }
}

// Byte-wise instructions on four bytes at once: how many bytes of a and b are equal, and their sum
// of absolute differences.
__global__ void compare_bytes(const uint32_t *a, const uint32_t *b, int words, unsigned int *out) {
  unsigned int equal = 0, difference = 0;
  for (int i = threadIdx.x; i < words; i += blockDim.x) {
    equal += __popc(__vcmpeq4(a[i], b[i])) / 8;
    difference += __vsadu4(a[i], b[i]);
    const uint32_t swapped = __byte_perm(a[i], 0, 0x0123);
    difference += __byte_perm(swapped, 0, 0x0123) != a[i];
  }
  atomicAdd(out, equal);
  atomicAdd(out + 1, difference);
}

int main() {
  std::string text;
  const char *const vocabulary[] = {"The", "quick",  "brown", "fox", "jumps", "over",
                                    "the", "lazy",   "dog",   "GPU", "warp",  "Warp",
                                    "a",   "kernel", "of",    "an",  "banana"};
  uint32_t state = 7;
  while (text.size() < 20000) {
    state = state * 1103515245u + 12345u;
    text += vocabulary[(state >> 16) % 17];
    text += (state >> 8) % 9 == 0 ? ", " : (state >> 8) % 9 == 1 ? "\n" : " ";
  }
  text += "banana";
  const int length = static_cast<int>(text.size());
  char *device_text;
  unsigned int *device_found, *device_positions;
  CUDA(cudaMalloc(&device_text, text.size()));
  CUDA(cudaMalloc(&device_found, sizeof(unsigned int)));
  CUDA(cudaMalloc(&device_positions, text.size() * sizeof(unsigned int)));
  CUDA(cudaMemcpy(device_text, text.data(), text.size(), cudaMemcpyHostToDevice));

  const std::string wanted = "an";  // overlaps with itself in no way, but twice in "banana"
  CUDA(cudaMemcpyToSymbol(pattern, wanted.data(), wanted.size()));
  CUDA(cudaMemset(device_found, 0, sizeof(unsigned int)));
  find<<<(length + 255) / 256, 256>>>(device_text, length, static_cast<int>(wanted.size()),
                                      device_found, device_positions);
  CUDA(cudaGetLastError());
  unsigned int found;
  CUDA(cudaMemcpy(&found, device_found, sizeof found, cudaMemcpyDeviceToHost));
  std::vector<unsigned int> positions(found);
  CUDA(cudaMemcpy(positions.data(), device_positions, found * sizeof(unsigned int),
                  cudaMemcpyDeviceToHost));
  std::vector<bool> seen(text.size());
  for (unsigned int position : positions) {
    EXPECT(position < text.size() && !seen[position], "position %u twice or outside", position);
    seen[position] = true;
  }
  for (size_t i = 0; i < text.size(); ++i) {
    const bool here = text.compare(i, wanted.size(), wanted) == 0;
    EXPECT(seen[i] == here, "position %zu", i);
  }

  clear_table<<<kSlots / 128, 128>>>();
  count_words<<<(length + 127) / 128, 128>>>(device_text, length);
  CUDA(cudaGetLastError());
  std::vector<Slot> slots(kSlots);
  CUDA(cudaMemcpyFromSymbol(slots.data(), table, sizeof(Slot) * kSlots));
  std::map<std::string, std::pair<unsigned int, unsigned int>> expected, counted;
  for (int i = 0; i < length;) {
    std::string word;
    const int start = i;
    while (i < length && is_letter(text[i])) word += lower(text[i++]);
    if (word.empty()) {
      ++i;
      continue;
    }
    auto &entry = expected.emplace(word, std::pair{0u, static_cast<unsigned>(start)}).first->second;
    ++entry.first;
  }
  for (const Slot &slot : slots) {
    if (slot.key == kFree) continue;
    std::string word;
    for (int i = slot.first; i < length && is_letter(text[i]); ++i) word += lower(text[i]);
    EXPECT(counted.count(word) == 0, "two slots for '%s'", word.c_str());
    counted[word] = {slot.count, slot.first};
  }
  EXPECT(counted == expected, "%zu words, expected %zu", counted.size(), expected.size());

  std::string other = text.substr(0, 8000);
  for (size_t i = 0; i < other.size(); i += 3) other[i] = static_cast<char>(other[i] ^ 0x85);
  unsigned int equal = 0, difference = 0;
  for (size_t i = 0; i < other.size(); ++i) {
    const int a = static_cast<unsigned char>(text[i]), b = static_cast<unsigned char>(other[i]);
    equal += a == b;
    difference += std::abs(a - b);
  }
  uint32_t *device_other;
  unsigned int *device_sums, sums[2];
  CUDA(cudaMalloc(&device_other, other.size()));
  CUDA(cudaMalloc(&device_sums, sizeof sums));
  CUDA(cudaMemcpy(device_other, other.data(), other.size(), cudaMemcpyHostToDevice));
  CUDA(cudaMemset(device_sums, 0, sizeof sums));
  compare_bytes<<<1, 96>>>(reinterpret_cast<const uint32_t *>(device_text), device_other,
                           static_cast<int>(other.size() / 4), device_sums);
  CUDA(cudaGetLastError());
  CUDA(cudaMemcpy(sums, device_sums, sizeof sums, cudaMemcpyDeviceToHost));
  EXPECT(sums[0] == equal && sums[1] == difference, "%u equal, difference %u; expected %u, %u",
         sums[0], sums[1], equal, difference);

  CUDA(cudaFree(device_text));
  CUDA(cudaFree(device_found));
  CUDA(cudaFree(device_positions));
  CUDA(cudaFree(device_other));
  CUDA(cudaFree(device_sums));
  std::printf("ok\n");
  return 0;
}
