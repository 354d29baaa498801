// Blocked LU without pivoting, captured from three streams that events join; the executable graph
// is updated to factor other matrices, and refuses a graph of another shape.
#include <cmath>
#include <vector>

#include "require.h"

constexpr int kB = 16;

// The factors of one diagonal block, in place.
__global__ void factor(double* a, int n, int k) {
  __shared__ double t[kB][kB + 1];
  int x = threadIdx.x, y = threadIdx.y;
  t[y][x] = a[(k + y) * n + k + x];
  for (int p = 0; p < kB - 1; ++p) {
    __syncthreads();
    if (x == p && y > p) t[y][p] /= t[p][p];
    __syncthreads();
    if (y > p && x > p) t[y][x] -= t[y][p] * t[p][x];
  }
  a[(k + y) * n + k + x] = t[y][x];
}
// Right of the diagonal block: U = L^-1 A, one thread a column.
__global__ void row_panel(double* a, int n, int k) {
  int j = k + kB + blockIdx.x * kB + threadIdx.x;
  double u[kB];
  for (int i = 0; i < kB; ++i) {
    double s = a[(k + i) * n + j];
    for (int p = 0; p < i; ++p) s -= a[(k + i) * n + k + p] * u[p];
    u[i] = s;
  }
  for (int i = 0; i < kB; ++i) a[(k + i) * n + j] = u[i];
}
// Below it: L = A U^-1, one thread a row.
__global__ void column_panel(double* a, int n, int k) {
  int i = k + kB + blockIdx.x * kB + threadIdx.x;
  double l[kB];
  for (int j = 0; j < kB; ++j) {
    double s = a[i * n + k + j];
    for (int p = 0; p < j; ++p) s -= l[p] * a[(k + p) * n + k + j];
    l[j] = s / a[(k + j) * n + k + j];
  }
  for (int j = 0; j < kB; ++j) a[i * n + k + j] = l[j];
}
__global__ void trailing(double* a, int n, int k) {
  __shared__ double l[kB][kB + 1], u[kB][kB];
  int x = threadIdx.x, y = threadIdx.y, i = k + kB * (1 + blockIdx.y) + y,
      j = k + kB * (1 + blockIdx.x) + x;
  l[y][x] = a[i * n + k + x];
  u[y][x] = a[(k + y) * n + j];
  __syncthreads();
  double s = 0;
  for (int p = 0; p < kB; ++p) s += l[y][p] * u[p][x];
  a[i * n + j] -= s;
}

struct Streams {
  cudaStream_t s, left, right;
  cudaEvent_t diagonal, rows, columns;
};

cudaGraph_t capture(Streams& t, double* a, int n, int skip) {
  cudaGraph_t graph;
  CK(cudaStreamBeginCapture(t.s, cudaStreamCaptureModeThreadLocal));
  for (int k = 0; k + skip < n; k += kB) {
    factor<<<1, dim3(kB, kB), 0, t.s>>>(a, n, k);
    int rest = n / kB - k / kB - 1;
    if (!rest) break;
    CK(cudaEventRecord(t.diagonal, t.s));
    CK(cudaStreamWaitEvent(t.left, t.diagonal, 0));
    CK(cudaStreamWaitEvent(t.right, t.diagonal, 0));
    row_panel<<<rest, kB, 0, t.right>>>(a, n, k);
    column_panel<<<rest, kB, 0, t.left>>>(a, n, k);
    CK(cudaEventRecord(t.rows, t.right));
    CK(cudaEventRecord(t.columns, t.left));
    CK(cudaStreamWaitEvent(t.s, t.rows, 0));
    CK(cudaStreamWaitEvent(t.s, t.columns, 0));
    trailing<<<dim3(rest, rest), dim3(kB, kB), 0, t.s>>>(a, n, k);
  }
  CK(cudaStreamEndCapture(t.s, &graph));
  return graph;
}

double residual(const std::vector<double>& a, const std::vector<double>& f, int n) {
  double worst = 0;
  for (int i = 0; i < n; ++i)
    for (int j = 0; j < n; ++j) {
      double s = 0;
      for (int p = 0; p <= i && p <= j; ++p) s += (p == i ? 1.0 : f[i * n + p]) * f[p * n + j];
      worst = std::fmax(worst, std::fabs(s - a[i * n + j]));
    }
  return worst;
}

int main() {
  constexpr int kN = 96;
  std::vector<std::vector<double>> inputs;
  unsigned state = 7;
  for (int m = 0; m < 3; ++m) {
    std::vector<double> a(kN * kN);
    for (auto& v : a)
      state = state * 1664525u + 1013904223u, v = (state >> 8) * (2.0 / 16777216) - 1;
    for (int i = 0; i < kN; ++i) a[i * kN + i] += kN;  // needs no pivots
    inputs.push_back(a);
  }
  Streams t;
  CK(cudaStreamCreateWithFlags(&t.s, cudaStreamNonBlocking));
  CK(cudaStreamCreateWithPriority(&t.left, cudaStreamNonBlocking, 0));
  CK(cudaStreamCreate(&t.right));
  for (auto* e : {&t.diagonal, &t.rows, &t.columns})
    CK(cudaEventCreateWithFlags(e, cudaEventDisableTiming));
  cudaEvent_t before, after;
  CK(cudaEventCreate(&before));
  CK(cudaEventCreate(&after));
  std::vector<double*> device(3);
  for (int m = 0; m < 3; ++m) {
    CK(cudaMalloc(&device[m], kN * kN * 8));
    CK(cudaMemcpyAsync(device[m], inputs[m].data(), kN * kN * 8, cudaMemcpyHostToDevice, t.s));
  }
  cudaGraph_t graph = capture(t, device[0], kN, 0);
  size_t nodes = 0, roots = 0;
  CK(cudaGraphGetNodes(graph, nullptr, &nodes));
  CK(cudaGraphGetRootNodes(graph, nullptr, &roots));
  size_t steps = kN / kB;
  REQUIRE(nodes == steps + 3 * (steps - 1) && roots == 1, "%zu nodes, %zu roots", nodes, roots);
  cudaGraphExec_t exec;
  CK(cudaGraphInstantiate(&exec, graph, 0));
  CK(cudaGraphDestroy(graph));
  CK(cudaEventRecord(before, t.s));
  for (int m = 0; m < 3; ++m) {
    if (m) {
      cudaGraph_t other = capture(t, device[m], kN, 0);
      cudaGraphExecUpdateResultInfo info{};
      CK(cudaGraphExecUpdate(exec, other, &info));
      REQUIRE(info.result == cudaGraphExecUpdateSuccess, "update result");
      CK(cudaGraphDestroy(other));
    }
    CK(cudaGraphLaunch(exec, t.s));
  }
  CK(cudaEventRecord(after, t.s));
  // A graph with a step less has another topology: refused, and the executable stays as it was.
  cudaGraph_t smaller = capture(t, device[0], kN, kB);
  cudaGraphExecUpdateResultInfo info{};
  cudaError_t e = cudaGraphExecUpdate(exec, smaller, &info);
  REQUIRE(e == cudaErrorGraphExecUpdateFailure &&
              info.result == cudaGraphExecUpdateErrorTopologyChanged,
          "update: %s, %d", cudaGetErrorName(e), (int)info.result);
  REQUIRE(cudaGetLastError() == cudaErrorGraphExecUpdateFailure, "last error");
  CK(cudaEventSynchronize(after));
  float ms = -1;
  CK(cudaEventElapsedTime(&ms, before, after));
  REQUIRE(ms > 0, "time");
  for (int m = 0; m < 3; ++m) {
    std::vector<double> f(kN * kN);
    CK(cudaMemcpy(f.data(), device[m], kN * kN * 8, cudaMemcpyDeviceToHost));
    double r = residual(inputs[m], f, kN);
    REQUIRE(r < 1e-11, "matrix %d: residual %g", m, r);
  }
  // The refused update left matrix 2 in the executable: factor its restored input once more.
  CK(cudaMemcpyAsync(device[2], inputs[1].data(), kN * kN * 8, cudaMemcpyHostToDevice, t.s));
  CK(cudaGraphLaunch(exec, t.s));
  CK(cudaStreamSynchronize(t.s));
  std::vector<double> f(kN * kN);
  CK(cudaMemcpy(f.data(), device[2], kN * kN * 8, cudaMemcpyDeviceToHost));
  REQUIRE(residual(inputs[1], f, kN) < 1e-11, "after the refused update");
  puts("ok");
}
