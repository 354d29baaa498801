// Gravity of every body on every other, three steps, with rsqrtf and tiles of positions.
#include "check.h"

constexpr int kBlock = 128;
constexpr float kSoftening = 1e-2f, kStep = 1e-3f;

__global__ void accelerate(const float4* positions, float4* velocities, int n) {
  __shared__ float4 tile[kBlock];
  int i = blockIdx.x * kBlock + threadIdx.x;
  float4 own = i < n ? positions[i] : make_float4(0, 0, 0, 0);
  float ax = 0, ay = 0, az = 0;
  for (int start = 0; start < n; start += kBlock) {
    int j = start + threadIdx.x;
    tile[threadIdx.x] = j < n ? positions[j] : make_float4(0, 0, 0, 0);
    __syncthreads();
    for (int k = 0; k < kBlock; ++k) {
      float4 other = tile[k];
      float dx = other.x - own.x, dy = other.y - own.y, dz = other.z - own.z;
      float inverse = rsqrtf(dx * dx + dy * dy + dz * dz + kSoftening);
      float factor = other.w * inverse * inverse * inverse;
      ax += dx * factor;
      ay += dy * factor;
      az += dz * factor;
    }
    __syncthreads();
  }
  if (i < n) {
    velocities[i].x += ax * kStep;
    velocities[i].y += ay * kStep;
    velocities[i].z += az * kStep;
  }
}

__global__ void move(float4* positions, const float4* velocities, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  positions[i].x += velocities[i].x * kStep;
  positions[i].y += velocities[i].y * kStep;
  positions[i].z += velocities[i].z * kStep;
}

int main() {
  const int n = 400, steps = 3;
  Random random(7);
  std::vector<float4> positions(n), velocities(n, make_float4(0, 0, 0, 0));
  std::vector<double> p(3 * n), v(3 * n, 0.0);
  for (int i = 0; i < n; ++i) {
    positions[i] =
        make_float4(static_cast<float>(random.unit()), static_cast<float>(random.unit()),
                    static_cast<float>(random.unit()), static_cast<float>(random.unit() + 0.5));
    p[3 * i] = positions[i].x;
    p[3 * i + 1] = positions[i].y;
    p[3 * i + 2] = positions[i].z;
  }
  for (int step = 0; step < steps; ++step) {
    for (int i = 0; i < n; ++i) {
      double a[3] = {0, 0, 0};
      for (int j = 0; j < n; ++j) {
        double d[3], r2 = kSoftening;
        for (int k = 0; k < 3; ++k) {
          d[k] = p[3 * j + k] - p[3 * i + k];
          r2 += d[k] * d[k];
        }
        for (int k = 0; k < 3; ++k) a[k] += positions[j].w * d[k] / (r2 * std::sqrt(r2));
      }
      for (int k = 0; k < 3; ++k) v[3 * i + k] += a[k] * kStep;
    }
    for (int i = 0; i < 3 * n; ++i) p[i] += v[i] * kStep;
  }
  float4* dp = to_device(positions);
  float4* dv = to_device(velocities);
  for (int step = 0; step < steps; ++step) {
    accelerate<<<(n + kBlock - 1) / kBlock, kBlock>>>(dp, dv, n);
    move<<<(n + 63) / 64, 64>>>(dp, dv, n);
  }
  CHECK(cudaGetLastError());
  std::vector<double> got_p, got_v;
  for (const float4& value : to_host(dp, n)) got_p.insert(got_p.end(), {value.x, value.y, value.z});
  for (const float4& value : to_host(dv, n)) got_v.insert(got_v.end(), {value.x, value.y, value.z});
  expect_near(got_p, p, 1e-5, "positions");
  expect_near(got_v, v, 2e-4, "velocities");
  return verdict_ok();
}
