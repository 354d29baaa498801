// A bilateral filter over the slices of a volume of odd sizes, equal to the CPU's in every bit:
// pitched and 3D memory, weights in constant memory (one table set by copies from the device),
// copies of boxes, columns and slices with offsets.
#include <algorithm>
#include <cmath>
#include <vector>

#include "require.h"

constexpr int kR = 3, kW = 53, kH = 37, kD = 5;
__constant__ float space[(2 * kR + 1) * (2 * kR + 1)];
__constant__ float range[256];

__global__ void bilateral(cudaPitchedPtr in, cudaPitchedPtr out, int w, int h) {
  int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y,
      z = blockIdx.z;
  if (x >= w || y >= h) return;
  auto pixel = [&](int px, int py) {
    return static_cast<const unsigned char*>(in.ptr)[(z * in.ysize + py) * in.pitch + px];
  };
  int centre = pixel(x, y);
  float sum = 0, weight = 0;
#pragma unroll 1
  for (int dy = -kR; dy <= kR; ++dy)
    for (int dx = -kR; dx <= kR; ++dx) {
      int p = pixel(min(max(x + dx, 0), w - 1), min(max(y + dy, 0), h - 1));
      float f = space[(dy + kR) * (2 * kR + 1) + dx + kR] * range[abs(p - centre)];
      sum = __fmaf_rn(f, static_cast<float>(p), sum);
      weight = __fadd_rn(weight, f);
    }
  auto* row =
      reinterpret_cast<float*>(static_cast<char*>(out.ptr) + (z * out.ysize + y) * out.pitch);
  row[x] = __fdiv_rn(sum, weight);
}

int main() {
  std::vector<unsigned char> volume(kW * kH * kD);
  unsigned state = 5;
  for (size_t i = 0; i < volume.size(); ++i)
    state = state * 1664525u + 1013904223u,
    volume[i] = ((i % kW) / 9 % 2 ? 180 : 60) + (state >> 27);
  std::vector<float> hspace, hrange;
  for (int y = -kR; y <= kR; ++y)
    for (int x = -kR; x <= kR; ++x) hspace.push_back(std::exp(-(x * x + y * y) / 8.f));
  for (int i = 0; i < 256; ++i) hrange.push_back(std::exp(-i * i / 450.f));

  cudaExtent bytes = make_cudaExtent(kW, kH, kD),
             floats = make_cudaExtent(kW * sizeof(float), kH, kD);
  cudaPitchedPtr in, out;
  CK(cudaMalloc3D(&in, bytes));
  CK(cudaMalloc3D(&out, floats));
  REQUIRE(in.pitch >= kW && in.pitch % 32 == 0 && out.pitch >= kW * 4 && in.ysize == kH, "pitch");
  CK(cudaMemset3D(out, 0xff, floats));  // NaNs
  cudaStream_t s;
  CK(cudaStreamCreate(&s));
  size_t size = 0;
  CK(cudaGetSymbolSize(&size, range));
  REQUIRE(size == 1024, "symbol size");
  CK(cudaMemcpyToSymbol(space, hspace.data(), hspace.size() * 4));
  float* table;
  CK(cudaMalloc(&table, 1024));
  CK(cudaMemcpy(table, hrange.data(), 1024, cudaMemcpyHostToDevice));
  CK(cudaMemcpyToSymbolAsync(range, table, 512, 0, cudaMemcpyDeviceToDevice, s));
  CK(cudaMemcpyToSymbolAsync(range, table + 128, 512, 512, cudaMemcpyDeviceToDevice, s));

  // The volume goes up in two boxes, cut at x = 20.
  for (int part = 0; part < 2; ++part) {
    cudaMemcpy3DParms p{};
    int from = part ? 20 : 0, width = part ? kW - 20 : 20;
    p.srcPtr = make_cudaPitchedPtr(volume.data(), kW, kW, kH);
    p.srcPos = p.dstPos = make_cudaPos(from, 0, 0);
    p.dstPtr = in;
    p.extent = make_cudaExtent(width, kH, kD);
    p.kind = cudaMemcpyHostToDevice;
    CK(cudaMemcpy3DAsync(&p, s));
  }
  bilateral<<<dim3((kW + 15) / 16, (kH + 3) / 4, kD), dim3(16, 4), 0, s>>>(in, out, kW, kH);
  CK(cudaGetLastError());
  CK(cudaStreamSynchronize(s));

  std::vector<float> got(kW * kH * kD, -1), want(got);
  cudaMemcpy3DParms down{};
  down.srcPtr = out;
  down.dstPtr = make_cudaPitchedPtr(got.data(), kW * 4, kW, kH);
  down.extent = floats;
  down.kind = cudaMemcpyDeviceToHost;
  CK(cudaMemcpy3D(&down));
  for (int z = 0; z < kD; ++z)
    for (int y = 0; y < kH; ++y)
      for (int x = 0; x < kW; ++x) {
        auto pixel = [&](int px, int py) { return volume[(z * kH + py) * kW + px]; };
        int centre = pixel(x, y), at = (z * kH + y) * kW + x;
        float sum = 0, weight = 0;
        for (int dy = -kR; dy <= kR; ++dy)
          for (int dx = -kR; dx <= kR; ++dx) {
            int px = std::min(std::max(x + dx, 0), kW - 1),
                py = std::min(std::max(y + dy, 0), kH - 1);
            int p = pixel(px, py);
            float f = hspace[(dy + kR) * (2 * kR + 1) + dx + kR] * hrange[std::abs(p - centre)];
            sum = std::fmaf(f, static_cast<float>(p), sum);
            volatile float w = weight + f;
            weight = w;
          }
        volatile float q = sum / weight;
        want[at] = q;
        REQUIRE(got[at] == want[at], "(%d,%d,%d): %.9g, not %.9g", x, y, z, got[at], want[at]);
      }

  // A column of bytes out of one slice, to a strided place on the host; and a slice into pitched
  // memory of its own.
  std::vector<unsigned char> column(kH * 3, 0xaa);
  CK(cudaMemcpy2D(column.data() + 1, 3, static_cast<char*>(in.ptr) + 2 * kH * in.pitch + 11,
                  in.pitch, 1, kH, cudaMemcpyDeviceToHost));
  for (int y = 0; y < kH; ++y)
    REQUIRE(column[3 * y + 1] == volume[(2 * kH + y) * kW + 11] && column[3 * y] == 0xaa &&
                column[3 * y + 2] == 0xaa,
            "column, row %d", y);
  unsigned char* slice;
  size_t pitch;
  CK(cudaMallocPitch(&slice, &pitch, kW, kH));
  CK(cudaMemset2D(slice, pitch, 0x11, kW, kH));
  CK(cudaMemcpy2D(slice + 3 * pitch + 5, pitch, static_cast<char*>(in.ptr) + 4 * kH * in.pitch,
                  in.pitch, kW - 5, kH - 3, cudaMemcpyDeviceToDevice));
  std::vector<unsigned char> flat(kW * kH);
  CK(cudaMemcpy2D(flat.data(), kW, slice, pitch, kW, kH, cudaMemcpyDeviceToHost));
  for (int y = 0; y < kH; ++y)
    for (int x = 0; x < kW; ++x) {
      int expected = y < 3 || x < 5 ? 0x11 : volume[(4 * kH + y - 3) * kW + x - 5];
      REQUIRE(flat[y * kW + x] == expected, "slice (%d,%d)", x, y);
    }
  REQUIRE(cudaMemcpy2D(flat.data(), kW, slice, pitch, kW + 1, 2, cudaMemcpyDeviceToHost) ==
              cudaErrorInvalidPitchValue,
          "wider than its pitch");
  puts("ok");
}
