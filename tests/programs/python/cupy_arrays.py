"""CuPy element-wise expressions, reductions and a raw kernel, against NumPy.

CUPY_COMPILE_WITH_PTX=1 makes CuPy hand PTX to the driver instead of machine code. An empty
CUPY_ACCELERATORS keeps it from its prebuilt CUB kernels, which have no PTX for this device; CuPy
doesn't look at their errors.
"""

import os
import sys

os.environ.setdefault("CUPY_COMPILE_WITH_PTX", "1")
os.environ.setdefault("CUPY_ACCELERATORS", "")

import cupy as cp
import numpy as np

RAW = r"""
extern "C" __global__ void saxpy(float a, const float* x, const float* y, float* out, int n) {
  int i = blockDim.x * blockIdx.x + threadIdx.x;
  if (i < n) out[i] = a * x[i] + y[i];
}
"""


def main() -> int:
    rng = np.random.default_rng(2)
    a = rng.random(3001)
    b = rng.random(3001) + 0.5
    x, y = cp.asarray(a), cp.asarray(b)
    np.testing.assert_allclose(cp.asnumpy(x * 3 + y / 2 - 1), a * 3 + b / 2 - 1, rtol=1e-14)
    np.testing.assert_allclose(
        cp.asnumpy(cp.sqrt(x) + cp.exp(-y)), np.sqrt(a) + np.exp(-b), rtol=1e-13
    )

    square = cp.ElementwiseKernel(
        "float64 x, float64 y", "float64 z", "z = (x - y) * (x - y)", "squared_difference"
    )
    np.testing.assert_allclose(cp.asnumpy(square(x, y)), (a - b) ** 2, rtol=1e-14)

    np.testing.assert_allclose(float(x.sum()), a.sum(), rtol=1e-12)
    assert float(y.max()) == b.max()
    assert int(x.argmin()) == a.argmin()
    matrix = rng.integers(-1000, 1000, (37, 53))
    np.testing.assert_array_equal(cp.asnumpy(cp.asarray(matrix).sum(axis=0)), matrix.sum(axis=0))
    np.testing.assert_array_equal(cp.asnumpy(cp.asarray(matrix).T.copy()), matrix.T)

    kernel = cp.RawKernel(RAW, "saxpy")
    f = cp.arange(1000, dtype=cp.float32)
    out = cp.zeros_like(f)
    kernel((8,), (128,), (np.float32(2), f, f, out, np.int32(1000)))
    np.testing.assert_array_equal(cp.asnumpy(out), np.arange(1000, dtype=np.float32) * 3)
    print("ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
