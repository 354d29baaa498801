"""CuPy's graphs: elementwise kernels, a reduction and a RawKernel captured from a stream and
launched with changing input, against NumPy."""

import cupy
import numpy

SOURCE = r"""
extern "C" __global__ void saxpy(float a, const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = a * x[i] + y[i];
}
"""


def main() -> None:
    n = 5000
    rng = numpy.random.default_rng(3)
    kernel = cupy.RawKernel(SOURCE, "saxpy")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = cupy.zeros(n, dtype=cupy.float32)
        y = cupy.empty_like(x)
        total = cupy.empty((), dtype=cupy.float32)

        def step() -> None:
            y[...] = x
            y[...] *= 2
            kernel(((n + 255) // 256,), (256,), (cupy.float32(0.5), x, y, cupy.int32(n)))
            y.sum(out=total)

        step()  # compiles, and fills the memory pool
        stream.synchronize()
        assert not stream.is_capturing()
        stream.begin_capture()
        assert stream.is_capturing()
        step()
        graph = stream.end_capture()
        assert not stream.is_capturing()
        graph.upload(stream)
        for _ in range(4):
            values = rng.integers(-50, 50, n).astype(numpy.float32)
            x.set(values, stream=stream)
            graph.launch(stream)
            stream.synchronize()
            expected = values * 2 + values * numpy.float32(0.5)
            numpy.testing.assert_array_equal(y.get(stream=stream), expected)
            # Multiples of 0.5 whose sum stays far below 2**23: exact in any order.
            assert float(total.get(stream=stream)) == float(expected.sum(dtype=numpy.float64))
    print("ok")


main()
