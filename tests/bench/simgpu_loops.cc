#include "simgpu_loops.h"

namespace gpupool::bench {

void matmul_loop(const float* a, const float* b, float* c, int n, int from, int to) {
  for (int i = from; i < to; ++i)
    for (int j = 0; j < n; ++j) {
      float sum = 0;
      for (int k = 0; k < n; ++k) sum += a[i * n + k] * b[k * n + j];
      c[i * n + j] = sum;
    }
}

void mandelbrot_loop(int* out, int n, int limit, int from, int to) {
  for (int py = from; py < to; ++py)
    for (int px = 0; px < n; ++px) {
      const float cx = -2.0f + 3.0f * static_cast<float>(px) / static_cast<float>(n);
      const float cy = -1.5f + 3.0f * static_cast<float>(py) / static_cast<float>(n);
      float x = 0, y = 0;
      int k = 0;
      while (k < limit && x * x + y * y < 4.0f) {
        const float t = x * x - y * y + cx;
        y = 2 * x * y + cy;
        x = t;
        ++k;
      }
      out[py * n + px] = k;
    }
}

}  // namespace gpupool::bench
