// PageRank of a sparse graph in one cooperative launch: sums over rows by tiles of 16 threads,
// dangling mass, convergence decided on the device; a launch of one block too many is refused.
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "require.h"

namespace cg = cooperative_groups;

struct Graph {
  const int *row, *column, *out;
  int n;
};

__global__ void __launch_bounds__(128) pagerank(Graph g, double* rank, double* next, double* sums,
                                                double tolerance, int limit, int* rounds) {
  cg::grid_group grid = cg::this_grid();
  cg::thread_block block = cg::this_thread_block();
  auto tile = cg::tiled_partition<16>(block);
  int tiles = grid.size() / 16, mine = grid.thread_rank() / 16;
  int round = 0;
  for (; round < limit; ++round) {
    if (grid.thread_rank() == 0) sums[0] = sums[1] = 0;
    grid.sync();
    double dangling = 0;
    for (int v = grid.thread_rank(); v < g.n; v += grid.size())
      if (g.out[v] == 0) dangling += rank[v];
    dangling = cg::reduce(tile, dangling, cg::plus<double>());
    if (tile.thread_rank() == 0) atomicAdd(&sums[0], dangling);
    grid.sync();
    double lost = sums[0], change = 0;
    for (int v = mine; v < g.n; v += tiles) {  // a tile of 16 threads per row
      double s = 0;
      for (int e = g.row[v] + tile.thread_rank(); e < g.row[v + 1]; e += 16)
        s += rank[g.column[e]] / g.out[g.column[e]];
      s = cg::reduce(tile, s, cg::plus<double>());
      if (tile.thread_rank() == 0) {
        next[v] = 0.15 / g.n + 0.85 * (s + lost / g.n);
        change += fabs(next[v] - rank[v]);
      }
    }
    if (tile.thread_rank() == 0) atomicAdd(&sums[1], change);
    grid.sync();
    double total = sums[1];
    grid.sync();  // nobody resets the sums before everybody has read them
    double* t = rank;
    rank = next;
    next = t;
    if (total < tolerance) {
      ++round;
      break;
    }
  }
  if (grid.thread_rank() == 0) *rounds = round;
}

int main() {
  constexpr int kN = 701;
  unsigned state = 99;
  auto random = [&] { return state = state * 1103515245u + 12345u, (state >> 8) & 0xffff; };
  std::vector<std::vector<int>> in(kN);
  std::vector<int> out(kN, 0);
  for (int v = 0; v < kN; ++v) {
    if (v % 50 == 7) continue;  // dangling
    int degree = 1 + random() % 9;
    for (int e = 0; e < degree; ++e) {
      int to =
          static_cast<int>(static_cast<long long>(random()) * random() % kN) / (1 + random() % 5);
      in[to].push_back(v);
      ++out[v];
    }
  }
  std::vector<int> row{0}, column;
  for (auto& list : in)
    column.insert(column.end(), list.begin(), list.end()), row.push_back(column.size());

  int device = 0, cooperative = 0, perSm = 0, sms = 0;
  CK(cudaGetDevice(&device));
  CK(cudaDeviceGetAttribute(&cooperative, cudaDevAttrCooperativeLaunch, device));
  CK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  REQUIRE(cooperative, "no cooperative launch");
  CK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&perSm, pagerank, 128, 0));
  REQUIRE(perSm >= 1, "occupancy");

  int *drow, *dcolumn, *dout, *rounds;
  double *rank, *next, *sums;
  CK(cudaMalloc(&drow, row.size() * 4));
  CK(cudaMalloc(&dcolumn, column.size() * 4));
  CK(cudaMalloc(&dout, kN * 4));
  CK(cudaMalloc(&rounds, 4));
  CK(cudaMalloc(&rank, kN * 8));
  CK(cudaMalloc(&next, kN * 8));
  CK(cudaMalloc(&sums, 16));
  CK(cudaMemcpy(drow, row.data(), row.size() * 4, cudaMemcpyHostToDevice));
  CK(cudaMemcpy(dcolumn, column.data(), column.size() * 4, cudaMemcpyHostToDevice));
  CK(cudaMemcpy(dout, out.data(), kN * 4, cudaMemcpyHostToDevice));
  std::vector<double> start(kN, 1.0 / kN);
  CK(cudaMemcpy(rank, start.data(), kN * 8, cudaMemcpyHostToDevice));

  Graph g{drow, dcolumn, dout, kN};
  double tolerance = 1e-6;
  int limit = 200;
  void* args[] = {&g, &rank, &next, &sums, &tolerance, &limit, &rounds};
  // One block more than fit at once must be refused at the call (and the error must not stick).
  cudaError_t e = cudaLaunchCooperativeKernel(reinterpret_cast<void*>(pagerank), perSm * sms + 1,
                                              128, args, 0, 0);
  REQUIRE(e == cudaErrorCooperativeLaunchTooLarge, "too large: %s", cudaGetErrorName(e));
  REQUIRE(
      cudaGetLastError() == cudaErrorCooperativeLaunchTooLarge && cudaGetLastError() == cudaSuccess,
      "last error");
  CK(cudaLaunchCooperativeKernel(reinterpret_cast<void*>(pagerank), std::min(5, perSm * sms), 128,
                                 args, 0, 0));
  CK(cudaDeviceSynchronize());

  int used = 0;
  CK(cudaMemcpy(&used, rounds, 4, cudaMemcpyDeviceToHost));
  std::vector<double> got(kN), a(start), b(kN);
  CK(cudaMemcpy(got.data(), used % 2 ? next : rank, kN * 8, cudaMemcpyDeviceToHost));
  int want = 0;
  for (; want < limit;) {
    double lost = 0, change = 0;
    for (int v = 0; v < kN; ++v)
      if (!out[v]) lost += a[v];
    for (int v = 0; v < kN; ++v) {
      double s = 0;
      for (int u : in[v]) s += a[u] / out[u];
      b[v] = 0.15 / kN + 0.85 * (s + lost / kN);
      change += std::fabs(b[v] - a[v]);
    }
    a.swap(b);
    ++want;
    if (change < tolerance) break;
  }
  double sum = 0;
  REQUIRE(used == want, "%d rounds, not %d", used, want);
  for (int v = 0; v < kN; ++v) {
    sum += got[v];
    REQUIRE(std::fabs(got[v] - a[v]) <= 1e-12, "rank of %d: %.15g, not %.15g", v, got[v], a[v]);
  }
  REQUIRE(std::fabs(sum - 1) <= 1e-9, "ranks don't add up to 1");
  puts("ok");
}
