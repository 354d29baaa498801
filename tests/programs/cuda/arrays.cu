// CUDA arrays with the runtime API: made, described, copied from and to host, device and other
// arrays in one, two and three dimensions, also inside a graph; compared with the CPU.
#include <cstdint>

#include "check.h"

constexpr size_t kWidth = 37, kHeight = 19, kDepth = 5;

static std::vector<float> numbers(size_t count, unsigned long long seed) {
  Random random{seed};
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(random.unit());
  return values;
}

static void planes() {
  const cudaChannelFormatDesc format = cudaCreateChannelDesc<float>();
  cudaArray_t array, other;
  CHECK(cudaMallocArray(&array, &format, kWidth, kHeight));
  CHECK(cudaMallocArray(&other, &format, kWidth, kHeight));
  cudaChannelFormatDesc got;
  cudaExtent extent;
  unsigned flags = 77;
  CHECK(cudaArrayGetInfo(&got, &extent, &flags, array));
  EXPECT(got.x == 32 && got.y == 0 && got.f == cudaChannelFormatKindFloat);
  EXPECT(extent.width == kWidth && extent.height == kHeight && extent.depth == 0 && flags == 0);

  // From rows with gaps, to packed rows.
  constexpr size_t kPitch = 50;
  const std::vector<float> in = numbers(kPitch * kHeight, 1);
  CHECK(cudaMemcpy2DToArray(array, 0, 0, in.data(), kPitch * 4, kWidth * 4, kHeight,
                            cudaMemcpyHostToDevice));
  std::vector<float> out(kWidth * kHeight), expected(kWidth * kHeight);
  for (size_t y = 0; y < kHeight; ++y) {
    for (size_t x = 0; x < kWidth; ++x) expected[y * kWidth + x] = in[y * kPitch + x];
  }
  CHECK(cudaMemcpy2DFromArray(out.data(), kWidth * 4, array, 0, 0, kWidth * 4, kHeight,
                              cudaMemcpyDeviceToHost));
  expect_equal(out, expected, "array to host");

  // A part of it from the device, and all of it into another array.
  const std::vector<float> patch = numbers(6 * 4, 2);
  float* device = to_device(patch);
  CHECK(cudaMemcpy2DToArray(array, 3 * 4, 5, device, 6 * 4, 6 * 4, 4, cudaMemcpyDeviceToDevice));
  for (size_t y = 0; y < 4; ++y) {
    for (size_t x = 0; x < 6; ++x) expected[(y + 5) * kWidth + x + 3] = patch[y * 6 + x];
  }
  CHECK(cudaMemcpy2DArrayToArray(other, 0, 0, array, 0, 0, kWidth * 4, kHeight));
  CHECK(cudaMemcpy2DFromArray(out.data(), kWidth * 4, other, 0, 0, kWidth * 4, kHeight,
                              cudaMemcpyDeviceToHost));
  expect_equal(out, expected, "array to array");

  EXPECT(cudaMemcpy2DToArray(array, 4, 0, in.data(), kPitch * 4, kWidth * 4, kHeight,
                             cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
  EXPECT(cudaMemcpy2DToArray(array, 0, 1, in.data(), kPitch * 4, kWidth * 4, kHeight,
                             cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
  cudaGetLastError();
  CHECK(cudaFree(device));
  CHECK(cudaFreeArray(array));
  CHECK(cudaFreeArray(other));
}

static void volumes(cudaStream_t stream) {
  const cudaChannelFormatDesc format = cudaCreateChannelDesc<float2>();
  const cudaExtent extent = make_cudaExtent(kWidth, kHeight, kDepth);
  cudaArray_t array;
  CHECK(cudaMalloc3DArray(&array, &format, extent));
  const std::vector<float> in = numbers(2 * kWidth * kHeight * kDepth, 3);
  cudaMemcpy3DParms copy = {};
  copy.srcPtr = make_cudaPitchedPtr(const_cast<float*>(in.data()), kWidth * 8, kWidth, kHeight);
  copy.dstArray = array;
  copy.extent = extent;
  copy.kind = cudaMemcpyHostToDevice;
  CHECK(cudaMemcpy3D(&copy));
  // A box out of it, by a graph.
  constexpr size_t kX = 7, kY = 3, kZ = 1, kW = 11, kH = 9, kD = 3;
  std::vector<float> out(2 * kW * kH * kD), expected(2 * kW * kH * kD);
  cudaMemcpy3DParms box = {};
  box.srcArray = array;
  box.srcPos = make_cudaPos(kX, kY, kZ);
  box.dstPtr = make_cudaPitchedPtr(out.data(), kW * 8, kW, kH);
  box.extent = make_cudaExtent(kW, kH, kD);
  box.kind = cudaMemcpyDeviceToHost;
  cudaGraph_t graph;
  cudaGraphNode_t node;
  CHECK(cudaGraphCreate(&graph, 0));
  CHECK(cudaGraphAddMemcpyNode(&node, graph, nullptr, 0, &box));
  cudaGraphExec_t exec;
  CHECK(cudaGraphInstantiate(&exec, graph, 0));
  CHECK(cudaGraphLaunch(exec, stream));
  CHECK(cudaStreamSynchronize(stream));
  for (size_t z = 0; z < kD; ++z) {
    for (size_t y = 0; y < kH; ++y) {
      for (size_t x = 0; x < 2 * kW; ++x) {
        expected[(z * kH + y) * 2 * kW + x] =
            in[((z + kZ) * kHeight + y + kY) * 2 * kWidth + 2 * kX + x];
      }
    }
  }
  expect_equal(out, expected, "box of a volume");
  CHECK(cudaGraphExecDestroy(exec));
  CHECK(cudaGraphDestroy(graph));
  CHECK(cudaFreeArray(array));
}

static void limits() {
  const cudaChannelFormatDesc format = cudaCreateChannelDesc<uint8_t>();
  size_t before = 0, during = 0, after = 0, total = 0;
  cudaArray_t array;
  CHECK(cudaMemGetInfo(&before, &total));
  CHECK(cudaMallocArray(&array, &format, 65536, 1024));
  CHECK(cudaMemGetInfo(&during, &total));
  CHECK(cudaFreeArray(array));
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaMemGetInfo(&after, &total));
  EXPECT(before - during >= size_t{64} << 20 && after == before);
  EXPECT(cudaMallocArray(&array, &format, 1u << 20, 1) == cudaErrorInvalidValue);
  EXPECT(cudaMallocArray(&array, &format, 0, 1) == cudaErrorInvalidValue);
  // 4 TiB: more than there is.
  EXPECT(cudaMalloc3DArray(&array, &format, make_cudaExtent(16384, 16384, 16384)) ==
         cudaErrorMemoryAllocation);
  cudaGetLastError();
}

int main() {
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  planes();
  volumes(stream);
  limits();
  return verdict_ok();
}
