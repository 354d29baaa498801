"""CuPy: a RawModule with several kernels, a template, a constant and a device variable: Cholesky
factors and solutions in double, on two streams; RawKernel with half precision and structures."""

import cupy
import numpy as np

SOURCE = r"""
#include <cuda_fp16.h>

__constant__ double shift;
__device__ int failures;

// The lower Cholesky factor of a + shift * identity, in place, one block a matrix.
template <typename T, int kSize>
__global__ void cholesky(T *matrices) {
  __shared__ T a[kSize][kSize + 1];
  T *mine = matrices + blockIdx.x * kSize * kSize;
  for (int i = threadIdx.x; i < kSize * kSize; i += blockDim.x) {
    a[i / kSize][i % kSize] = mine[i] + (i / kSize == i % kSize ? static_cast<T>(shift) : T(0));
  }
  __syncthreads();
  for (int k = 0; k < kSize; ++k) {
    if (threadIdx.x == 0) {
      if (!(a[k][k] > T(0))) atomicAdd(&failures, 1);
      a[k][k] = sqrt(a[k][k]);
    }
    __syncthreads();
    for (int row = k + 1 + threadIdx.x; row < kSize; row += blockDim.x) a[row][k] /= a[k][k];
    __syncthreads();
    for (int i = threadIdx.x; i < (kSize - k - 1) * (kSize - k - 1); i += blockDim.x) {
      const int row = k + 1 + i / (kSize - k - 1), column = k + 1 + i % (kSize - k - 1);
      if (column <= row) a[row][column] -= a[row][k] * a[column][k];
    }
    __syncthreads();
  }
  for (int i = threadIdx.x; i < kSize * kSize; i += blockDim.x) {
    mine[i] = i % kSize <= i / kSize ? a[i / kSize][i % kSize] : T(0);
  }
}

extern "C" __global__ void forward_substitution(const double *factor, const double *right,
                                                double *solution, int size) {
  // One warp a right-hand side.
  const double *b = right + blockIdx.x * size;
  double *x = solution + blockIdx.x * size;
  for (int row = 0; row < size; ++row) {
    double sum = 0;
    for (int k = threadIdx.x; k < row; k += 32) sum += factor[row * size + k] * x[k];
    for (int mask = 16; mask > 0; mask >>= 1) sum += __shfl_xor_sync(~0u, sum, mask);
    if (threadIdx.x == 0) x[row] = (b[row] - sum) / factor[row * size + row];
    __syncwarp();
  }
}

struct Affine {
  float scale;
  short offset;
  signed char sign;
};

extern "C" __global__ void affine_half(const __half *in, __half *out, Affine affine, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float value = __half2float(in[i]) * affine.scale + affine.offset;
  out[i] = __float2half_rn(affine.sign < 0 ? -value : value);
}
"""

SIZE = 33
NAMES = [f"cholesky<double, {SIZE}>", f"cholesky<float, {SIZE}>"]
module = cupy.RawModule(code=SOURCE, options=("-std=c++17",), name_expressions=NAMES)


def global_array(name: str, dtype: np.dtype) -> cupy.ndarray:
    return cupy.ndarray((1,), dtype, module.get_global(name))


def check_cholesky() -> None:
    generator = np.random.default_rng(2)
    factors = np.tril(generator.normal(size=(6, SIZE, SIZE)))
    matrices = factors @ factors.transpose(0, 2, 1)
    shift = global_array("shift", np.float64)
    failures = global_array("failures", np.int32)
    shift[0] = 3.5
    failures[0] = 0
    expected = np.linalg.cholesky(matrices + 3.5 * np.eye(SIZE))
    for name, dtype, tolerance in ((NAMES[0], np.float64, 1e-10), (NAMES[1], np.float32, 1e-3)):
        kernel = module.get_function(name)
        result = cupy.asarray(matrices.astype(dtype))
        kernel((6,), (128,), (result,))
        np.testing.assert_allclose(result.get(), expected, rtol=tolerance, atol=tolerance)
    assert int(failures[0]) == 0
    shift[0] = -1000.0
    module.get_function(NAMES[0])((6,), (64,), (cupy.asarray(matrices),))
    assert int(failures[0]) >= 6

    # Two streams, each with half of the right-hand sides, after the factor that a third computed.
    right = generator.normal(size=(10, SIZE))
    factor = cupy.asarray(expected[0])
    device_right = cupy.asarray(right)
    solution = cupy.zeros_like(device_right)
    ready = cupy.cuda.Event()
    ready.record()
    substitute = module.get_function("forward_substitution")
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    for half, stream in zip((slice(0, 5), slice(5, 10)), streams, strict=True):
        with stream:
            stream.wait_event(ready)
            substitute((5,), (32,), (factor, device_right[half], solution[half], np.int32(SIZE)))
    for stream in streams:
        stream.synchronize()
    np.testing.assert_allclose(
        solution.get(), np.linalg.solve(expected[0], right.T).T, rtol=1e-9, atol=1e-12
    )


def check_half() -> None:
    affine = np.array(
        [(1.5, -7, -1)],
        dtype=np.dtype([("scale", "f4"), ("offset", "i2"), ("sign", "i1")], align=True),
    )
    values = np.arange(-300, 300, dtype=np.float16) / np.float16(4)
    out = cupy.empty(values.shape, dtype=np.float16)
    module.get_function("affine_half")(
        (3,), (256,), (cupy.asarray(values), out, affine[0], np.int32(values.size))
    )
    expected = (-(values.astype(np.float32) * np.float32(1.5) - 7)).astype(np.float16)
    assert np.array_equal(out.get(), expected)


check_cholesky()
check_half()
print("ok")
