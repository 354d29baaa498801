// Batches of radix-2 FFTs, one block a transform, in dynamic shared memory that is larger than what
// a kernel gets without asking; cuda::std::complex in double, and float2 by hand. Checked against
// the sum that defines the transform, and by transforming back.
#include <complex>
#include <cuda/std/complex>
#include <vector>

#include "expect.h"

using Complex = cuda::std::complex<double>;

template <int kLog2>
__global__ void fft_double(Complex *data, double direction) {
  constexpr unsigned int kSize = 1u << kLog2;
  extern __shared__ unsigned char raw[];
  Complex *work = reinterpret_cast<Complex *>(raw);
  Complex *mine = data + static_cast<size_t>(blockIdx.x) * kSize;
  for (unsigned int i = threadIdx.x; i < kSize; i += blockDim.x) {
    work[__brev(i) >> (32 - kLog2)] = mine[i];
  }
  __syncthreads();
  for (unsigned int half = 1; half < kSize; half *= 2) {
    for (unsigned int i = threadIdx.x; i < kSize / 2; i += blockDim.x) {
      const unsigned int position = i % half, low = (i / half) * 2 * half + position;
      double sine, cosine;
      sincospi(direction * position / half, &sine, &cosine);
      const Complex a = work[low], b = work[low + half] * Complex(cosine, sine);
      work[low] = a + b;
      work[low + half] = a - b;
    }
    __syncthreads();
  }
  for (unsigned int i = threadIdx.x; i < kSize; i += blockDim.x) mine[i] = work[i];
}

// Stockham's form: no bit reversal, two halves of shared memory.
__global__ void fft_float(const float2 *in, float2 *out, int size) {
  extern __shared__ float2 halves[];
  float2 *from = halves, *to = halves + size;
  const int i = threadIdx.x;
  from[i] = in[blockIdx.x * size + i];
  from[i + size / 2] = in[blockIdx.x * size + i + size / 2];
  __syncthreads();
  for (int span = 1; span < size; span *= 2) {
    const int position = i & (span - 1);
    const float angle = -3.14159265358979f * position / span;
    const float2 twiddle = make_float2(cosf(angle), sinf(angle));
    const float2 a = from[i], b = from[i + size / 2];
    const float2 turned =
        make_float2(fmaf(b.x, twiddle.x, -b.y * twiddle.y), fmaf(b.x, twiddle.y, b.y * twiddle.x));
    const int target = ((i - position) << 1) + position;
    to[target] = make_float2(a.x + turned.x, a.y + turned.y);
    to[target + span] = make_float2(a.x - turned.x, a.y - turned.y);
    __syncthreads();
    float2 *other = from;
    from = to;
    to = other;
  }
  out[blockIdx.x * size + i] = from[i];
  out[blockIdx.x * size + i + size / 2] = from[i + size / 2];
}

std::vector<std::complex<double>> reference(const std::complex<double> *in, int size) {
  const double pi = std::acos(-1.0);
  std::vector<std::complex<double>> roots(size), out(size);
  for (int i = 0; i < size; ++i) roots[i] = std::polar(1.0, -2 * pi * i / size);
  for (int k = 0; k < size; ++k) {
    for (int n = 0; n < size; ++n) {
      out[k] += in[n] * roots[static_cast<size_t>(k) * n % size];
    }
  }
  return out;
}

void check_double() {
  constexpr int kLog2 = 12, kSize = 1 << kLog2, kBatch = 2;
  constexpr size_t kShared = kSize * sizeof(Complex);
  static_assert(kShared > 48 * 1024, "more than a kernel gets without asking");
  static_assert(sizeof(Complex) == sizeof(std::complex<double>), "the same layout");
  std::vector<std::complex<double>> signal(kSize * kBatch);
  for (int i = 0; i < kSize * kBatch; ++i) {
    signal[i] = {std::sin(i * 0.37) + (i % 17) * 0.1, std::cos(i * 0.11)};
  }
  int device = 0, largest = 0;
  CUDA(cudaGetDevice(&device));
  CUDA(cudaDeviceGetAttribute(&largest, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  EXPECT(largest >= static_cast<int>(kShared), "%d bytes of shared memory", largest);

  Complex *data;
  CUDA(cudaMalloc(&data, signal.size() * sizeof(Complex)));
  CUDA(cudaMemcpy(data, signal.data(), signal.size() * sizeof(Complex), cudaMemcpyHostToDevice));
  fft_double<kLog2><<<kBatch, 256, kShared>>>(data, -1.0);
  EXPECT(cudaGetLastError() == cudaErrorInvalidValue, "64 KiB of shared memory without asking");
  CUDA(cudaFuncSetAttribute(fft_double<kLog2>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                            static_cast<int>(kShared)));
  int blocks = 0;
  CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, fft_double<kLog2>, 256, kShared));
  EXPECT(blocks >= 1, "%d blocks fit", blocks);
  fft_double<kLog2><<<kBatch, 256, kShared>>>(data, -1.0);
  CUDA(cudaGetLastError());
  std::vector<std::complex<double>> result(signal.size());
  CUDA(cudaMemcpy(result.data(), data, signal.size() * sizeof(Complex), cudaMemcpyDeviceToHost));
  for (int batch = 0; batch < kBatch; ++batch) {
    const auto expected = reference(signal.data() + batch * kSize, kSize);
    for (int k = 0; k < kSize; ++k) {
      EXPECT(std::abs(result[batch * kSize + k] - expected[k]) < 1e-8, "batch %d, frequency %d",
             batch, k);
    }
  }
  fft_double<kLog2><<<kBatch, 512, kShared>>>(data, 1.0);
  CUDA(cudaGetLastError());
  CUDA(cudaMemcpy(result.data(), data, signal.size() * sizeof(Complex), cudaMemcpyDeviceToHost));
  for (size_t i = 0; i < signal.size(); ++i) {
    EXPECT(std::abs(result[i] / static_cast<double>(kSize) - signal[i]) < 1e-12, "back at %zu", i);
  }
  CUDA(cudaFree(data));
}

void check_float() {
  constexpr int kSize = 256, kBatch = 5;
  std::vector<float2> signal(kSize * kBatch), result(signal.size());
  std::vector<std::complex<double>> exact(signal.size());
  for (size_t i = 0; i < signal.size(); ++i) {
    signal[i] = make_float2(static_cast<float>(i * 7 % 13) - 6, static_cast<float>(i * 5 % 11) - 5);
    exact[i] = {signal[i].x, signal[i].y};
  }
  float2 *in, *out;
  CUDA(cudaMalloc(&in, signal.size() * sizeof(float2)));
  CUDA(cudaMalloc(&out, signal.size() * sizeof(float2)));
  CUDA(cudaMemcpy(in, signal.data(), signal.size() * sizeof(float2), cudaMemcpyHostToDevice));
  fft_float<<<kBatch, kSize / 2, 2 * kSize * sizeof(float2)>>>(in, out, kSize);
  CUDA(cudaGetLastError());
  CUDA(cudaMemcpy(result.data(), out, signal.size() * sizeof(float2), cudaMemcpyDeviceToHost));
  for (int batch = 0; batch < kBatch; ++batch) {
    const auto expected = reference(exact.data() + batch * kSize, kSize);
    for (int k = 0; k < kSize; ++k) {
      const float2 value = result[batch * kSize + k];
      EXPECT(std::abs(std::complex<double>(value.x, value.y) - expected[k]) < 2e-3,
             "batch %d, frequency %d", batch, k);
    }
  }
  CUDA(cudaFree(in));
  CUDA(cudaFree(out));
}

int main() {
  check_double();
  check_float();
  std::printf("ok\n");
  return 0;
}
