// Local alignment (Smith-Waterman, linear gaps): a kernel launch for each anti-diagonal, the best
// cell by warp shuffles and a 64-bit atomic, and the way back by one thread.
#include <algorithm>
#include <vector>

#include "require.h"

constexpr int kMatch = 3, kMismatch = -2, kGap = -4;

// Cells of diagonal d (i + j = d) from the two diagonals before; the best cell packed score<<32 |
// ~index, so that of equal scores the first in row-major order wins, in any order of execution.
__global__ void diagonal(const char* a, int n, const char* b, int m, int d, int* score,
                         unsigned char* from, unsigned long long* best) {
  int low = max(1, d - m), high = min(n, d - 1);
  int i = low + blockIdx.x * blockDim.x + threadIdx.x;
  unsigned long long mine = 0;
  if (i <= high) {
    int j = d - i, w = m + 1;
    int s = a[i - 1] == b[j - 1] ? kMatch : kMismatch;
    int diag = score[(i - 1) * w + j - 1] + s, up = score[(i - 1) * w + j] + kGap,
        left = score[i * w + j - 1] + kGap;
    int v = 0;
    unsigned char f = 0;
    if (diag > v) v = diag, f = 1;
    if (up > v) v = up, f = 2;
    if (left > v) v = left, f = 3;
    score[i * w + j] = v;
    from[i * w + j] = f;
    mine = (static_cast<unsigned long long>(v) << 32) | static_cast<unsigned>(~(i * w + j));
  }
  for (int o = 16; o; o >>= 1) mine = max(mine, __shfl_xor_sync(0xffffffffu, mine, o));
  if (threadIdx.x % 32 == 0 && mine) atomicMax(best, mine);
}

// One thread walks back from the best cell and writes the operations in reverse.
__global__ void walk(const unsigned char* from, int m, const unsigned long long* best, char* ops,
                     int* count) {
  int at = static_cast<int>(~static_cast<unsigned>(*best)), w = m + 1, k = 0;
  while (from[at]) {
    switch (from[at]) {
      case 1:
        ops[k++] = 'M';
        at -= w + 1;
        break;
      case 2:
        ops[k++] = 'D';
        at -= w;
        break;
      default:
        ops[k++] = 'I';
        at -= 1;
        break;
    }
  }
  *count = k;
}

int main() {
  unsigned state = 12345;
  auto next = [&] { return state = state * 1664525u + 1013904223u, state >> 16; };
  std::vector<char> a(301), b(277);
  for (auto& c : a) c = "ACGT"[next() & 3];
  // b is a mutated part of a, so that the alignment is long.
  for (size_t i = 0; i < b.size(); ++i)
    b[i] = next() % 7 == 0 ? "ACGT"[next() & 3] : a[(i + 13) % a.size()];
  b.erase(b.begin() + 100, b.begin() + 103);
  int n = a.size(), m = b.size(), cells = (n + 1) * (m + 1);

  char *da, *db, *ops;
  int *score, *count;
  unsigned char* from;
  unsigned long long* best;
  CK(cudaMalloc(&da, n));
  CK(cudaMalloc(&db, m));
  CK(cudaMalloc(&ops, n + m));
  CK(cudaMalloc(&count, sizeof(int)));
  CK(cudaMalloc(&score, cells * sizeof(int)));
  CK(cudaMalloc(&from, cells));
  CK(cudaMalloc(&best, sizeof *best));
  CK(cudaMemcpy(da, a.data(), n, cudaMemcpyHostToDevice));
  CK(cudaMemcpy(db, b.data(), m, cudaMemcpyHostToDevice));
  CK(cudaMemset(score, 0, cells * sizeof(int)));
  CK(cudaMemset(from, 0, cells));
  CK(cudaMemset(best, 0, sizeof *best));
  for (int d = 2; d <= n + m; ++d) {
    int length = std::min(n, d - 1) - std::max(1, d - m) + 1;
    diagonal<<<(length + 95) / 96, 96>>>(da, n, db, m, d, score, from, best);
  }
  CK(cudaGetLastError());
  walk<<<1, 1>>>(from, m, best, ops, count);
  CK(cudaGetLastError());

  std::vector<int> got(cells), want(cells, 0);
  std::vector<unsigned char> path(cells, 0);
  CK(cudaMemcpy(got.data(), score, cells * sizeof(int), cudaMemcpyDeviceToHost));
  int top = 0, where = 0, w = m + 1;
  for (int i = 1; i <= n; ++i)
    for (int j = 1; j <= m; ++j) {
      int s = a[i - 1] == b[j - 1] ? kMatch : kMismatch;
      int v[4] = {0, want[(i - 1) * w + j - 1] + s, want[(i - 1) * w + j] + kGap,
                  want[i * w + j - 1] + kGap};
      int p = std::max_element(v, v + 4) - v;  // the first of equals
      want[i * w + j] = v[p];
      path[i * w + j] = p;
      if (v[p] > top) top = v[p], where = i * w + j;
    }
  REQUIRE(got == want, "scores differ");
  std::vector<char> trace, device(n + m);
  for (int at = where; path[at];) {
    trace.push_back(" MDI"[path[at]]);
    at -= path[at] == 1 ? w + 1 : path[at] == 2 ? w : 1;
  }
  int k = 0;
  CK(cudaMemcpy(&k, count, sizeof k, cudaMemcpyDeviceToHost));
  CK(cudaMemcpy(device.data(), ops, n + m, cudaMemcpyDeviceToHost));
  device.resize(k);
  REQUIRE(device == trace, "tracebacks differ");
  REQUIRE(k >= 200, "alignment too short");
  puts("ok");
}
