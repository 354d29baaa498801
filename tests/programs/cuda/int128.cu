// Integers of 128 bits: products, quotients and remainders, which compilers make of carry chains.
#include "check.h"

using Wide = unsigned __int128;

__global__ void compute(const Wide* a, const Wide* b, Wide* product, Wide* quotient, Wide* rest,
                        int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  product[i] = a[i] * b[i];
  quotient[i] = a[i] / b[i];
  rest[i] = a[i] % b[i];
}

// Of any length, so that quotients are short and long.
static Wide random_wide(Random* random) {
  const Wide value = Wide{random->next()} << 64 | random->next();
  return value >> random->next() % 128;
}

int main() {
  const int n = 4000;
  const Wide all = ~Wide{0}, high = Wide{1} << 127;
  std::vector<Wide> a = {all, all, 0, high, high - 1, all, all, high};
  std::vector<Wide> b = {1, all, all, high, high, high, 3, 0xffffffffffffffff};
  std::vector<Wide> products, quotients, rests;
  Random random(7);
  while (a.size() < n) {
    a.push_back(random_wide(&random));
    b.push_back(random_wide(&random) | 1);
  }
  for (int i = 0; i < n; ++i) {
    products.push_back(a[i] * b[i]);
    quotients.push_back(a[i] / b[i]);
    rests.push_back(a[i] % b[i]);
  }
  Wide* out = nullptr;
  CHECK(cudaMalloc(&out, 3 * n * sizeof(Wide)));
  compute<<<(n + 127) / 128, 128>>>(to_device(a), to_device(b), out, out + n, out + 2 * n, n);
  CHECK(cudaGetLastError());
  expect_equal(to_host(out, n), products, "product");
  expect_equal(to_host(out + n, n), quotients, "quotient");
  expect_equal(to_host(out + 2 * n, n), rests, "remainder");
  return verdict_ok();
}
