"""CuPy with its stream-ordered memory pool, against NumPy."""

import os
import sys

os.environ.setdefault("CUPY_COMPILE_WITH_PTX", "1")
os.environ.setdefault("CUPY_ACCELERATORS", "")

import cupy as cp
import numpy as np


def main() -> int:
    pool = cp.cuda.MemoryAsyncPool()
    cp.cuda.set_allocator(pool.malloc)
    rng = np.random.default_rng(11)
    a, b = rng.random((300, 41)), rng.random((300, 41))
    streams = [cp.cuda.Stream(non_blocking=True) for _ in range(3)]
    for _ in range(4):
        for stream in streams:
            with stream:
                x, y = cp.asarray(a), cp.asarray(b)
                result = ((x + y) * 2 - x / (y + 1)).sum(axis=0)
                np.testing.assert_allclose(
                    cp.asnumpy(result), ((a + b) * 2 - a / (b + 1)).sum(axis=0), rtol=1e-12
                )
                del x, y, result
    cp.cuda.runtime.deviceSynchronize()
    assert pool.used_bytes() == 0, pool.used_bytes()
    pool.free_all_blocks()
    assert pool.total_bytes() == 0, pool.total_bytes()
    print("ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
