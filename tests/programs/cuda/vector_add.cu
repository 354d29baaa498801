// c = a + b; the sums of two floats are exact to the bit on both sides.
#include "check.h"

__global__ void vector_add(const float* a, const float* b, float* c, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) c[i] = a[i] + b[i];
}

int main() {
  const int n = 100003;
  Random random(1);
  std::vector<float> a(n), b(n), expected(n);
  for (int i = 0; i < n; ++i) {
    a[i] = static_cast<float>(random.unit() * 200 - 100);
    b[i] = static_cast<float>(random.unit());
    expected[i] = a[i] + b[i];
  }
  float* da = to_device(a);
  float* db = to_device(b);
  float* dc = nullptr;
  CHECK(cudaMalloc(&dc, n * sizeof(float)));
  vector_add<<<(n + 255) / 256, 256>>>(da, db, dc, n);
  CHECK(cudaGetLastError());
  expect_equal(to_host(dc, n), expected, "vector_add");
  CHECK(cudaFree(da));
  CHECK(cudaFree(db));
  CHECK(cudaFree(dc));
  return verdict_ok();
}
