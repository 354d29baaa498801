// A sparse matrix in CSR form times a vector, one warp a row, for values in double, float and half
// precision. Rows are of very different length, some are empty; the matrix has fewer rows than the
// last block has warps. The longest row is done again with two half2 accumulators at a time.
#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <vector>

#include "expect.h"

namespace cg = cooperative_groups;

struct Random {
  uint32_t state;
  uint32_t next() {
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    return state;
  }
};

template <typename Value>
struct Csr {
  int rows;
  const int *__restrict__ starts;
  const int *__restrict__ columns;
  const Value *__restrict__ values;
};

template <typename Value>
struct Accumulator {
  using type = Value;
};
template <>
struct Accumulator<__half> {
  using type = float;
};
template <>
struct Accumulator<__nv_bfloat16> {
  using type = float;
};

template <typename Value, int kWarps>
__global__ void __launch_bounds__(kWarps * 32)
    multiply(Csr<Value> matrix, const Value *__restrict__ x,
             typename Accumulator<Value>::type *__restrict__ y) {
  using Sum = typename Accumulator<Value>::type;
  const auto warp = cg::tiled_partition<32>(cg::this_thread_block());
  const int row = blockIdx.x * kWarps + warp.meta_group_rank();
  if (row >= matrix.rows) return;
  Sum sum = 0;
  for (int i = __ldg(matrix.starts + row) + warp.thread_rank(); i < __ldg(matrix.starts + row + 1);
       i += 32) {
    sum += static_cast<Sum>(matrix.values[i]) * static_cast<Sum>(x[matrix.columns[i]]);
  }
  for (int distance = 16; distance > 0; distance /= 2) sum += warp.shfl_down(sum, distance);
  if (warp.thread_rank() == 0) y[row] = sum;
}

// One warp; the sum of a[i] * b[i] over pairs, in half precision throughout.
__global__ void dot_half2(const __half2 *a, const __half2 *b, int pairs, __half *out) {
  __half2 sum = __float2half2_rn(0.0f);
  for (int i = threadIdx.x; i < pairs; i += warpSize) sum = __hfma2(a[i], b[i], sum);
  for (int mask = 16; mask > 0; mask /= 2) {
    sum = __hadd2(sum, __shfl_xor_sync(0xffffffffu, sum, mask));
  }
  if (threadIdx.x == 0) *out = __hadd(__low2half(sum), __high2half(sum));
}

template <typename Value>
void check_precision(const std::vector<int> &starts, const std::vector<int> &columns,
                     const std::vector<float> &values, const std::vector<float> &x,
                     double tolerance) {
  using Sum = typename Accumulator<Value>::type;
  constexpr int kWarps = 4;
  const int rows = static_cast<int>(starts.size()) - 1;
  std::vector<Value> rounded_values, rounded_x;
  for (float value : values) rounded_values.push_back(static_cast<Value>(value));
  for (float value : x) rounded_x.push_back(static_cast<Value>(value));

  int *device_starts, *device_columns;
  Value *device_values, *device_x;
  Sum *device_y;
  CUDA(cudaMalloc(&device_starts, starts.size() * sizeof(int)));
  CUDA(cudaMalloc(&device_columns, columns.size() * sizeof(int)));
  CUDA(cudaMalloc(&device_values, values.size() * sizeof(Value)));
  CUDA(cudaMalloc(&device_x, x.size() * sizeof(Value)));
  CUDA(cudaMalloc(&device_y, rows * sizeof(Sum)));
  CUDA(cudaMemcpy(device_starts, starts.data(), starts.size() * sizeof(int),
                  cudaMemcpyHostToDevice));
  CUDA(cudaMemcpy(device_columns, columns.data(), columns.size() * sizeof(int),
                  cudaMemcpyHostToDevice));
  CUDA(cudaMemcpy(device_values, rounded_values.data(), values.size() * sizeof(Value),
                  cudaMemcpyHostToDevice));
  CUDA(cudaMemcpy(device_x, rounded_x.data(), x.size() * sizeof(Value), cudaMemcpyHostToDevice));
  CUDA(cudaMemset(device_y, 0xff, rows * sizeof(Sum)));

  const Csr<Value> matrix{rows, device_starts, device_columns, device_values};
  multiply<Value, kWarps>
      <<<(rows + kWarps - 1) / kWarps, kWarps * 32>>>(matrix, device_x, device_y);
  CUDA(cudaGetLastError());
  std::vector<Sum> y(rows);
  CUDA(cudaMemcpy(y.data(), device_y, rows * sizeof(Sum), cudaMemcpyDeviceToHost));

  for (int row = 0; row < rows; ++row) {
    double expected = 0;
    for (int i = starts[row]; i < starts[row + 1]; ++i) {
      expected += static_cast<double>(static_cast<Sum>(rounded_values[i])) *
                  static_cast<double>(static_cast<Sum>(rounded_x[columns[i]]));
    }
    EXPECT(close(y[row], expected, tolerance), "row %d: %g, expected %g (%zu bytes a value)", row,
           static_cast<double>(y[row]), expected, sizeof(Value));
    if (starts[row] == starts[row + 1]) EXPECT(y[row] == Sum(0), "the empty row %d", row);
  }
  CUDA(cudaFree(device_starts));
  CUDA(cudaFree(device_columns));
  CUDA(cudaFree(device_values));
  CUDA(cudaFree(device_x));
  CUDA(cudaFree(device_y));
}

void check_half2() {
  // Small integers and few pairs: every sum is exact in half precision.
  constexpr int kPairs = 100;
  std::vector<__half2> a(kPairs), b(kPairs);
  int expected = 0;
  for (int i = 0; i < kPairs; ++i) {
    a[i] = __floats2half2_rn(static_cast<float>(i % 5), static_cast<float>(-(i % 3)));
    b[i] = __floats2half2_rn(static_cast<float>(i % 4), static_cast<float>(i % 2));
    expected += (i % 5) * (i % 4) - (i % 3) * (i % 2);
  }
  __half2 *device_a, *device_b;
  __half *device_out;
  CUDA(cudaMalloc(&device_a, kPairs * sizeof(__half2)));
  CUDA(cudaMalloc(&device_b, kPairs * sizeof(__half2)));
  CUDA(cudaMalloc(&device_out, sizeof(__half)));
  CUDA(cudaMemcpy(device_a, a.data(), kPairs * sizeof(__half2), cudaMemcpyHostToDevice));
  CUDA(cudaMemcpy(device_b, b.data(), kPairs * sizeof(__half2), cudaMemcpyHostToDevice));
  dot_half2<<<1, 32>>>(device_a, device_b, kPairs, device_out);
  CUDA(cudaGetLastError());
  __half out;
  CUDA(cudaMemcpy(&out, device_out, sizeof out, cudaMemcpyDeviceToHost));
  EXPECT(__half2float(out) == static_cast<float>(expected), "half2: %g, expected %d",
         static_cast<double>(__half2float(out)), expected);
  CUDA(cudaFree(device_a));
  CUDA(cudaFree(device_b));
  CUDA(cudaFree(device_out));
}

int main() {
  Random random{0x9e3779b9u};
  constexpr int kRows = 501, kColumns = 700;
  std::vector<int> starts{0}, columns;
  std::vector<float> values, x;
  for (int row = 0; row < kRows; ++row) {
    const int length = row % 7 == 3 ? 0 : row == 100 ? kColumns : 1 + random.next() % 70;
    const int step = kColumns / (length > 0 ? length : 1);
    for (int i = 0; i < length; ++i) {
      columns.push_back(i * step + random.next() % step);
      values.push_back(static_cast<float>(random.next() % 2001) / 1000.0f - 1.0f);
    }
    starts.push_back(static_cast<int>(columns.size()));
  }
  for (int i = 0; i < kColumns; ++i) x.push_back(static_cast<float>(random.next() % 1000) / 500.0f);

  check_precision<double>(starts, columns, values, x, 1e-13);
  check_precision<float>(starts, columns, values, x, 1e-4);
  check_precision<__half>(starts, columns, values, x, 1e-4);
  check_precision<__nv_bfloat16>(starts, columns, values, x, 1e-4);
  check_half2();
  std::printf("ok\n");
  return 0;
}
