// Ten steps of a five-point stencil in double precision, fused the same way on both sides: equal
// to the bit. The coefficients lie in constant memory.
#include <utility>

#include "check.h"

__constant__ double coefficients[2];  // centre, neighbours

__global__ void stencil(const double* in, double* out, int width, int height) {
  int x = blockIdx.x * blockDim.x + threadIdx.x;
  int y = blockIdx.y * blockDim.y + threadIdx.y;
  if (x >= width || y >= height) return;
  int i = y * width + x;
  if (x == 0 || y == 0 || x == width - 1 || y == height - 1) {
    out[i] = in[i];
    return;
  }
  double around =
      __dadd_rn(__dadd_rn(in[i - 1], in[i + 1]), __dadd_rn(in[i - width], in[i + width]));
  out[i] = __fma_rn(coefficients[1], around, __dmul_rn(coefficients[0], in[i]));
}

int main() {
  const int width = 97, height = 65, steps = 10;
  const std::vector<double> c = {0.4, 0.15};
  Random random(8);
  std::vector<double> current(width * height), next(width * height);
  for (double& value : current) value = random.unit() * 2 - 1;
  double* da = to_device(current);
  double* db = to_device(current);
  CHECK(cudaMemcpyToSymbol(coefficients, c.data(), sizeof(double) * 2));
  for (int step = 0; step < steps; ++step) {
    stencil<<<dim3((width + 15) / 16, (height + 7) / 8), dim3(16, 8)>>>(da, db, width, height);
    std::swap(da, db);
    for (int y = 0; y < height; ++y) {
      for (int x = 0; x < width; ++x) {
        int i = y * width + x;
        if (x == 0 || y == 0 || x == width - 1 || y == height - 1) {
          next[i] = current[i];
          continue;
        }
        volatile double horizontal = current[i - 1] + current[i + 1];
        volatile double vertical = current[i - width] + current[i + width];
        volatile double centre = c[0] * current[i];
        volatile double around = horizontal + vertical;
        next[i] = std::fma(c[1], around, centre);
      }
    }
    std::swap(current, next);
  }
  CHECK(cudaGetLastError());
  expect_equal(to_host(da, width * height), current, "stencil");
  return verdict_ok();
}
