// p13 (extra): thrust sort_by_key, reduce_by_key, scan, transform_reduce, copy_if; cub DeviceSelect
// and DeviceSegmentedReduce.
#include <thrust/copy.h>
#include <thrust/device_vector.h>
#include <thrust/iterator/counting_iterator.h>
#include <thrust/reduce.h>
#include <thrust/scan.h>
#include <thrust/sort.h>
#include <thrust/transform_reduce.h>

#include <algorithm>
#include <cmath>
#include <cub/cub.cuh>
#include <map>
#include <numeric>
#include <vector>

#include "require.h"

struct Odd {
  __host__ __device__ bool operator()(int v) const { return v & 1; }
};
struct Square {
  __host__ __device__ double operator()(int v) const { return (double)v * v; }
};

int main() {
  const int n = 20011;
  std::vector<int> k(n), v(n);
  unsigned s = 5;
  for (int i = 0; i < n; ++i) {
    s = s * 1664525u + 1013904223u;
    k[i] = (int)(s >> 20) - 2000;
    v[i] = i % 101;
  }
  thrust::device_vector<int> dk(k), dv(v);
  thrust::sort_by_key(dk.begin(), dk.end(), dv.begin());
  std::vector<int> hk(n);
  thrust::copy(dk.begin(), dk.end(), hk.begin());
  std::vector<int> sk(k);
  std::sort(sk.begin(), sk.end());
  REQUIRE(hk == sk, "sort_by_key: keys");
  thrust::device_vector<int> uk(n), us(n);
  auto end = thrust::reduce_by_key(dk.begin(), dk.end(), dv.begin(), uk.begin(), us.begin());
  int groups = (int)(end.first - uk.begin());
  std::map<int, int> want;
  for (int i = 0; i < n; ++i) want[k[i]] += v[i];
  REQUIRE(groups == (int)want.size(), "%d groups, expected %zu", groups, want.size());
  std::vector<int> gk(groups), gs(groups);
  thrust::copy(uk.begin(), uk.begin() + groups, gk.begin());
  thrust::copy(us.begin(), us.begin() + groups, gs.begin());
  int i = 0;
  for (auto& e : want) {
    REQUIRE(gk[i] == e.first && gs[i] == e.second, "group %d", i);
    ++i;
  }
  thrust::device_vector<int> dv2(v), sc(n);
  thrust::exclusive_scan(dv2.begin(), dv2.end(), sc.begin(), 10);
  std::vector<int> hs(n), ws(n);
  thrust::copy(sc.begin(), sc.end(), hs.begin());
  for (int j = 0, a = 10; j < n; ++j) {
    ws[j] = a;
    a += v[j];
  }
  REQUIRE(hs == ws, "exclusive_scan");
  double sq = thrust::transform_reduce(dv2.begin(), dv2.end(), Square(), 0.0,
                                       thrust::plus<double>()),
         wq = 0;
  for (int x : v) wq += (double)x * x;
  REQUIRE(std::fabs(sq - wq) < 1e-6, "transform_reduce %g, expected %g", sq, wq);

  int* out = thrust::raw_pointer_cast(uk.data());
  int* num = thrust::raw_pointer_cast(us.data());
  size_t bytes = 0;
  CK(cub::DeviceSelect::If(nullptr, bytes, thrust::raw_pointer_cast(dv2.data()), out, num, n,
                           Odd()));
  void* tmp;
  CK(cudaMalloc(&tmp, bytes));
  CK(cub::DeviceSelect::If(tmp, bytes, thrust::raw_pointer_cast(dv2.data()), out, num, n, Odd()));
  int kept;
  CK(cudaMemcpy(&kept, num, 4, cudaMemcpyDeviceToHost));
  std::vector<int> wo;
  for (int x : v)
    if (x & 1) wo.push_back(x);
  REQUIRE(kept == (int)wo.size(), "DeviceSelect kept %d, expected %zu", kept, wo.size());
  std::vector<int> ho(kept);
  CK(cudaMemcpy(ho.data(), out, kept * 4, cudaMemcpyDeviceToHost));
  REQUIRE(ho == wo, "DeviceSelect");
  CK(cudaFree(tmp));
  printf("%d groups, %d kept\nok\n", groups, kept);
}
