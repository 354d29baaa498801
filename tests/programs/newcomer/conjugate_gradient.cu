// conjugate gradient in double on a random SPD CSR matrix, one cooperative kernel with grid.sync().
#include <cooperative_groups.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <vector>

#include "require.h"
namespace cg = cooperative_groups;

// Adds the grid's sum of v to *where (zeroed before the kernel).
__device__ void grid_add(double v, double* where) {
  __shared__ double part[32];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  for (int d = 16; d; d >>= 1) v += __shfl_down_sync(0xffffffffu, v, d);
  if (lane == 0) part[warp] = v;
  __syncthreads();
  if (warp == 0) {
    v = lane < warps ? part[lane] : 0.0;
    for (int d = 16; d; d >>= 1) v += __shfl_down_sync(0xffffffffu, v, d);
    if (lane == 0) atomicAdd(where, v);
  }
  __syncthreads();
}

__global__ void solve(int n, const int* row, const int* col, const double* val, const double* b,
                      double* x, double* r, double* p, double* ap, double* dots, int max_it,
                      double tol2, int* its) {
  cg::grid_group grid = cg::this_grid();
  int first = (int)grid.thread_rank(), step = (int)grid.size();
  double s = 0;
  for (int i = first; i < n; i += step) {
    double v = b[i];
    x[i] = 0;
    r[i] = v;
    p[i] = v;
    s += v * v;
  }
  grid_add(s, &dots[0]);
  grid.sync();
  double rr = *(volatile double*)&dots[0];
  const double stop = tol2 * rr;
  int k = 0;
  for (; k < max_it && rr > stop; ++k) {
    s = 0;
    for (int i = first; i < n; i += step) {
      double a = 0;
      for (int j = row[i]; j < row[i + 1]; ++j) a += val[j] * *(volatile double*)&p[col[j]];
      ap[i] = a;
      s += a * p[i];
    }
    grid_add(s, &dots[1 + 2 * k]);
    grid.sync();
    double alpha = rr / *(volatile double*)&dots[1 + 2 * k];
    s = 0;
    for (int i = first; i < n; i += step) {
      x[i] += alpha * p[i];
      double v = r[i] - alpha * ap[i];
      r[i] = v;
      s += v * v;
    }
    grid_add(s, &dots[2 + 2 * k]);
    grid.sync();
    double next = *(volatile double*)&dots[2 + 2 * k], beta = next / rr;
    for (int i = first; i < n; i += step) p[i] = r[i] + beta * p[i];
    rr = next;
    grid.sync();
  }
  if (first == 0) *its = k;
}

int main() {
  int coop = 0, sms = 0, per_sm = 0;
  CK(cudaDeviceGetAttribute(&coop, cudaDevAttrCooperativeLaunch, 0));
  REQUIRE(coop, "no cooperative launch");
  CK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  const int n = 4096, block = 128, max_it = 200;
  CK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, solve, block, 0));
  REQUIRE(per_sm >= 1, "occupancy %d", per_sm);
  int blocks = std::min(sms * per_sm, n / block);

  std::mt19937 gen(7);
  std::uniform_real_distribution<double> u(-1, 1);
  std::vector<std::map<int, double>> m(n);
  for (int i = 0; i < n; ++i)
    for (int t = 0; t < 3; ++t) {
      int j = gen() % n;
      if (j == i) continue;
      double v = u(gen);
      m[i][j] = v;
      m[j][i] = v;
    }
  std::vector<int> row{0}, col;
  std::vector<double> val;
  for (int i = 0; i < n; ++i) {
    double d = 0.5;
    for (auto& e : m[i]) d += std::fabs(e.second);
    m[i][i] = d;
    for (auto& e : m[i]) {
      col.push_back(e.first);
      val.push_back(e.second);
    }
    row.push_back((int)col.size());
  }
  std::vector<double> want(n), b(n, 0.0), x(n);
  for (auto& v : want) v = u(gen);
  for (int i = 0; i < n; ++i)
    for (int j = row[i]; j < row[i + 1]; ++j) b[i] += val[j] * want[col[j]];

  int *drow, *dcol, *dits;
  double *dval, *db, *dx, *dr, *dp, *dap, *ddots;
  CK(cudaMalloc(&drow, row.size() * 4));
  CK(cudaMalloc(&dcol, col.size() * 4));
  CK(cudaMalloc(&dits, 4));
  CK(cudaMalloc(&dval, val.size() * 8));
  for (double** q : {&db, &dx, &dr, &dp, &dap}) CK(cudaMalloc(q, n * 8));
  CK(cudaMalloc(&ddots, (2 * max_it + 1) * 8));
  CK(cudaMemset(ddots, 0, (2 * max_it + 1) * 8));
  CK(cudaMemcpy(drow, row.data(), row.size() * 4, cudaMemcpyHostToDevice));
  CK(cudaMemcpy(dcol, col.data(), col.size() * 4, cudaMemcpyHostToDevice));
  CK(cudaMemcpy(dval, val.data(), val.size() * 8, cudaMemcpyHostToDevice));
  CK(cudaMemcpy(db, b.data(), n * 8, cudaMemcpyHostToDevice));
  int nn = n, mi = max_it;
  double tol2 = 1e-22;
  void* args[] = {&nn, &drow, &dcol, &dval, &db, &dx, &dr, &dp, &dap, &ddots, &mi, &tol2, &dits};
  CK(cudaLaunchCooperativeKernel((void*)solve, dim3(blocks), dim3(block), args, 0, nullptr));
  CK(cudaDeviceSynchronize());
  int its;
  CK(cudaMemcpy(&its, dits, 4, cudaMemcpyDeviceToHost));
  CK(cudaMemcpy(x.data(), dx, n * 8, cudaMemcpyDeviceToHost));
  REQUIRE(its > 3 && its < max_it, "%d iterations", its);
  double worst = 0, res = 0, bb = 0;
  for (int i = 0; i < n; ++i) {
    double a = b[i];
    for (int j = row[i]; j < row[i + 1]; ++j) a -= val[j] * x[col[j]];
    res += a * a;
    bb += b[i] * b[i];
    worst = std::max(worst, std::fabs(x[i] - want[i]));
  }
  REQUIRE(std::sqrt(res / bb) < 1e-10, "relative residual %g", std::sqrt(res / bb));
  REQUIRE(worst < 1e-8, "largest error of x %g", worst);
  printf("%d iterations, %d blocks, residual %.2e, error %.2e\nok\n", its, blocks,
         std::sqrt(res / bb), worst);
}
