"""Numba kernels: element-wise, a shared-memory reduction, a 2-D grid and atomics, against NumPy."""

import sys

import numpy as np
from numba import cuda, float32


@cuda.jit
def axpy(a, x, y, out):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = a * x[i] + y[i]


@cuda.jit
def block_sum(values, sums):
    shared = cuda.shared.array(128, dtype=float32)
    thread = cuda.threadIdx.x
    i = cuda.grid(1)
    shared[thread] = values[i] if i < values.size else 0.0
    cuda.syncthreads()
    step = 64
    while step > 0:
        if thread < step:
            shared[thread] += shared[thread + step]
        cuda.syncthreads()
        step //= 2
    if thread == 0:
        sums[cuda.blockIdx.x] = shared[0]


@cuda.jit
def outer(a, b, out, counts):
    i, j = cuda.grid(2)
    if i < out.shape[0] and j < out.shape[1]:
        out[i, j] = a[i] * b[j]
        cuda.atomic.add(counts, (i + j) % counts.size, 1)


def main() -> int:
    rng = np.random.default_rng(1)
    x = rng.random(5000, dtype=np.float32)
    y = rng.random(5000, dtype=np.float32)
    out = np.zeros_like(x)
    axpy[(x.size + 127) // 128, 128](np.float32(2.0), x, y, out)
    np.testing.assert_allclose(out, np.float32(2.0) * x + y, rtol=1e-6)

    values = rng.integers(0, 100, 3000).astype(np.float32)  # sums of small integers are exact
    blocks = (values.size + 127) // 128
    sums = np.zeros(blocks, dtype=np.float32)
    block_sum[blocks, 128](values, sums)
    expected = np.pad(values, (0, blocks * 128 - values.size)).reshape(blocks, 128).sum(axis=1)
    np.testing.assert_array_equal(sums, expected)

    a, b = rng.random(45), rng.random(70)
    product = cuda.device_array((45, 70), dtype=np.float64)
    counts = cuda.to_device(np.zeros(7, dtype=np.int64))
    outer[(4, 6), (16, 16)](a, b, product, counts)
    np.testing.assert_array_equal(product.copy_to_host(), np.outer(a, b))
    i, j = np.indices((45, 70))
    np.testing.assert_array_equal(counts.copy_to_host(), np.bincount((i + j).ravel() % 7))
    print("ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
