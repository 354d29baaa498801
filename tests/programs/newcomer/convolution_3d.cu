// 5x5x5 convolution, __constant__ filter, halo in dynamic shared memory, pitched volumes and
// cudaMemcpy3D.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "require.h"

constexpr int R = 2, K = 2 * R + 1;
__constant__ float filter[K * K * K];

__global__ void conv(cudaPitchedPtr in, cudaPitchedPtr out, int nx, int ny, int nz) {
  extern __shared__ float tile[];
  const int tx = blockDim.x + 2 * R, ty = blockDim.y + 2 * R, tz = blockDim.z + 2 * R;
  const int ox = blockIdx.x * blockDim.x - R, oy = blockIdx.y * blockDim.y - R,
            oz = blockIdx.z * blockDim.z - R;
  const int t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const int threads = blockDim.x * blockDim.y * blockDim.z;
  for (int i = t; i < tx * ty * tz; i += threads) {
    int x = min(max(ox + i % tx, 0), nx - 1), y = min(max(oy + i / tx % ty, 0), ny - 1),
        z = min(max(oz + i / (tx * ty), 0), nz - 1);
    tile[i] = ((const float*)((const char*)in.ptr + ((size_t)z * in.ysize + y) * in.pitch))[x];
  }
  __syncthreads();
  int x = ox + R + threadIdx.x, y = oy + R + threadIdx.y, z = oz + R + threadIdx.z;
  if (x >= nx || y >= ny || z >= nz) return;
  float sum = 0;
  for (int c = 0; c < K; ++c)
    for (int b = 0; b < K; ++b)
#pragma unroll
      for (int a = 0; a < K; ++a)
        sum += filter[(c * K + b) * K + a] *
               tile[((threadIdx.z + c) * ty + threadIdx.y + b) * tx + threadIdx.x + a];
  ((float*)((char*)out.ptr + ((size_t)z * out.ysize + y) * out.pitch))[x] = sum;
}

int main() {
  const int nx = 45, ny = 30, nz = 27;
  std::vector<float> in(nx * ny * nz), out(in.size(), -1.f);
  unsigned s = 1;
  for (auto& v : in) {
    s = s * 1664525u + 1013904223u;
    v = (s >> 8) / 16777216.f - 0.5f;
  }
  float f[K * K * K];
  for (int i = 0; i < K * K * K; ++i) f[i] = 0.01f * (float)((i * 37) % 23 - 11);
  CK(cudaMemcpyToSymbol(filter, f, sizeof f));
  float back[K];
  CK(cudaMemcpyFromSymbol(back, filter, sizeof back, 7 * sizeof(float)));
  REQUIRE(!memcmp(back, f + 7, sizeof back), "cudaMemcpyFromSymbol with an offset");

  cudaExtent ext = make_cudaExtent(nx * sizeof(float), ny, nz);
  cudaPitchedPtr din, dout;
  CK(cudaMalloc3D(&din, ext));
  CK(cudaMalloc3D(&dout, ext));
  REQUIRE(din.pitch >= nx * 4 && din.ysize == (size_t)ny, "pitch %zu ysize %zu", din.pitch,
          din.ysize);
  CK(cudaMemset3D(dout, 0xff, ext));
  cudaMemcpy3DParms up = {};
  up.srcPtr = make_cudaPitchedPtr(in.data(), nx * sizeof(float), nx, ny);
  up.dstPtr = din;
  up.extent = ext;
  up.kind = cudaMemcpyHostToDevice;
  CK(cudaMemcpy3D(&up));
  dim3 block(8, 8, 4), grid((nx + 7) / 8, (ny + 7) / 8, (nz + 3) / 4);
  size_t shared = sizeof(float) * (8 + 2 * R) * (8 + 2 * R) * (4 + 2 * R);
  conv<<<grid, block, shared>>>(din, dout, nx, ny, nz);
  CK(cudaGetLastError());
  cudaMemcpy3DParms down = {};
  down.srcPtr = dout;
  down.dstPtr = make_cudaPitchedPtr(out.data(), nx * sizeof(float), nx, ny);
  down.extent = ext;
  down.kind = cudaMemcpyDeviceToHost;
  CK(cudaMemcpy3D(&down));
  auto clampi = [](int v, int n) { return std::min(std::max(v, 0), n - 1); };
  for (int z = 0; z < nz; ++z)
    for (int y = 0; y < ny; ++y)
      for (int x = 0; x < nx; ++x) {
        double sum = 0;
        for (int c = 0; c < K; ++c)
          for (int b = 0; b < K; ++b)
            for (int a = 0; a < K; ++a)
              sum += (double)f[(c * K + b) * K + a] *
                     in[((size_t)clampi(z + c - R, nz) * ny + clampi(y + b - R, ny)) * nx +
                        clampi(x + a - R, nx)];
        float got = out[((size_t)z * ny + y) * nx + x];
        REQUIRE(std::fabs(got - sum) < 1e-4, "(%d,%d,%d) = %g, expected %g", x, y, z, got, sum);
      }
  // A box out of the middle of the device's volume into the middle of the host's.
  std::vector<float> part(nx * ny * nz, 7.f);
  cudaMemcpy3DParms box = {};
  box.srcPtr = dout;
  box.srcPos = make_cudaPos(5 * sizeof(float), 3, 2);
  box.dstPtr = make_cudaPitchedPtr(part.data(), nx * sizeof(float), nx, ny);
  box.dstPos = make_cudaPos(1 * sizeof(float), 4, 6);
  box.extent = make_cudaExtent(11 * sizeof(float), 13, 17);
  box.kind = cudaMemcpyDeviceToHost;
  CK(cudaMemcpy3D(&box));
  for (int z = 0; z < nz; ++z)
    for (int y = 0; y < ny; ++y)
      for (int x = 0; x < nx; ++x) {
        bool inside = x >= 1 && x < 12 && y >= 4 && y < 17 && z >= 6 && z < 23;
        float want = inside ? out[((size_t)(z - 6 + 2) * ny + y - 4 + 3) * nx + x - 1 + 5] : 7.f;
        float got = part[((size_t)z * ny + y) * nx + x];
        REQUIRE(got == want, "box (%d,%d,%d) = %g, expected %g", x, y, z, got, want);
      }
  CK(cudaFree(din.ptr));
  CK(cudaFree(dout.ptr));
  printf("%dx%dx%d, pitch %zu\nok\n", nx, ny, nz, din.pitch);
}
