"""CuPy: reductions, element-wise kernels, fancy indexing and linear algebra put together by hand;
every result against NumPy's."""

import cupy
import numpy as np

norm = cupy.ReductionKernel(
    "T x, T weight", "T y", "weight * x * x", "a + b", "y = sqrt(a)", "0", "weighted_norm"
)
argument = cupy.ReductionKernel(
    "T x",
    "int64 y",
    "Pair(x, _J)",
    "a.value >= b.value ? a : b",
    "y = a.index",
    "Pair()",
    "index_of_largest",
    reduce_type="Pair",
    preamble="""
struct Pair {
  double value;
  long long index;
  __device__ Pair() : value(-1e300), index(-1) {}
  __device__ Pair(double value, long long index) : value(value), index(index) {}
};
""",
)
rotate = cupy.ElementwiseKernel(
    "T x, T y, float64 angle",
    "T u, T v",
    """
    T s, c;
    sincos(angle, &s, &c);
    u = c * x - s * y;
    v = s * x + c * y;
""",
    "rotate",
)
collatz = cupy.ElementwiseKernel(
    "int64 start",
    "int32 steps",
    """
    long long n = start;
    steps = 0;
    while (n != 1) {
      n = n % 2 == 0 ? n / 2 : 3 * n + 1;
      ++steps;
    }
""",
    "collatz",
)


@cupy.fuse()
def logistic(x, growth):
    return growth * x * (1 - x)


def close(result: cupy.ndarray, expected: np.ndarray, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(cupy.asnumpy(result), expected, rtol=tolerance, atol=tolerance)


def check_kernels(generator: np.random.Generator) -> None:
    x = generator.normal(size=(37, 41))
    weights = generator.random((37, 41))
    device_x, device_weights = cupy.asarray(x), cupy.asarray(weights)
    close(norm(device_x, device_weights), np.sqrt((weights * x * x).sum()))
    close(norm(device_x, device_weights, axis=0), np.sqrt((weights * x * x).sum(axis=0)))
    close(norm(device_x.T, device_weights.T, axis=0), np.sqrt((weights * x * x).sum(axis=1)))
    assert int(argument(device_x.ravel())) == x.argmax()
    u, v = rotate(device_x, device_weights, 0.3)
    close(u, np.cos(0.3) * x - np.sin(0.3) * weights)
    close(v, np.sin(0.3) * x + np.cos(0.3) * weights)
    starts = np.arange(1, 400)
    steps = []
    for start in starts.tolist():
        count = 0
        while start != 1:
            start = start // 2 if start % 2 == 0 else 3 * start + 1
            count += 1
        steps.append(count)
    assert collatz(cupy.asarray(starts)).get().tolist() == steps
    close(logistic(device_weights, 3.7), 3.7 * weights * (1 - weights))


def check_indexing(generator: np.random.Generator) -> None:
    x = generator.integers(-100, 100, size=(20, 30))
    device_x = cupy.asarray(x)
    rows, columns = generator.integers(0, 20, 50), generator.integers(0, 30, 50)
    for result, expected in (
        (device_x[cupy.asarray(rows)], x[rows]),
        (device_x[cupy.asarray(rows), cupy.asarray(columns)], x[rows, columns]),
        (device_x[device_x > 50], x[x > 50]),
        (device_x[::-2, 3::5], x[::-2, 3::5]),
        (cupy.where(device_x % 3 == 0, device_x, -1), np.where(x % 3 == 0, x, -1)),
        (cupy.cumsum(device_x, axis=1), x.cumsum(axis=1)),
        (cupy.bincount(device_x.ravel() + 100), np.bincount(x.ravel() + 100)),
        (cupy.take(device_x, cupy.asarray(columns), axis=1), x.take(columns, axis=1)),
        (cupy.roll(device_x, 7), np.roll(x, 7)),
        (
            cupy.concatenate([device_x, device_x.T.reshape(20, 30)]),
            np.concatenate([x, x.T.reshape(20, 30)]),
        ),
        (cupy.nonzero(device_x > 80)[1], np.nonzero(x > 80)[1]),
        (device_x.argmax(axis=1), x.argmax(axis=1)),
        (device_x // 7, x // 7),
        (device_x % 7, x % 7),
    ):
        assert np.array_equal(result.get(), expected)
    device_x[cupy.asarray([1, 4])] = 0
    x[[1, 4]] = 0
    device_x[device_x < -50] *= 2
    x[x < -50] *= 2
    cupy.add.at(device_x, (cupy.asarray(rows), cupy.asarray(columns)), 5)
    np.add.at(x, (rows, columns), 5)
    assert np.array_equal(device_x.get(), x)
    lefts = cupy.asarray(generator.normal(size=9).astype(np.float16))
    assert cupy.isfinite(lefts.astype(np.float32)).all()
    text = cupy.asarray(np.frombuffer(b"the quick brown fox", dtype=np.uint8))
    assert bytes(cupy.where(text >= 97, text - 32, text).get()) == b"THE QUICK BROWN FOX"


def check_linear_algebra(generator: np.random.Generator) -> None:
    """QR by Householder reflections, and the power method, of broadcasts and sums alone."""
    a = generator.normal(size=(16, 9))
    r = cupy.asarray(a)
    q = cupy.eye(16)
    for k in range(9):
        column = r[k:, k].copy()
        alpha = -cupy.sign(column[0]) * cupy.sqrt((column * column).sum())
        column[0] -= alpha
        column /= cupy.sqrt((column * column).sum())
        r[k:] -= 2 * column[:, None] * (column[:, None] * r[k:]).sum(axis=0)
        q[:, k:] -= 2 * (q[:, k:] * column).sum(axis=1)[:, None] * column
    close(cupy.tril(r, -1), np.zeros((16, 9)), 1e-12)
    close((q[:, :, None] * r[None]).sum(axis=1), a, 1e-12)
    close((q.T[:, :, None] * q[None]).sum(axis=1), np.eye(16), 1e-12)

    symmetric = a.T @ a
    device = cupy.asarray(symmetric)
    power = device
    for _ in range(5):  # the 32nd power, by squares
        power = (power[:, :, None] * power[None]).sum(axis=1)
        power /= abs(power).max()
    vector = cupy.ones(9)
    for _ in range(5):
        vector = (power * vector).sum(axis=1)
        vector /= abs(vector).max()
    value = (vector * (device * vector).sum(axis=1)).sum() / (vector * vector).sum()
    close(value, np.linalg.eigvalsh(symmetric)[-1], 1e-6)

    z = generator.normal(size=50) + 1j * generator.normal(size=50)
    device_z = cupy.asarray(z)
    close(
        cupy.exp(device_z) * device_z.conj() / (1 + abs(device_z)),
        np.exp(z) * z.conj() / (1 + abs(z)),
    )


def check_streams(generator: np.random.Generator) -> None:
    values = generator.normal(size=(4, 1000))
    pinned = cupy.cuda.alloc_pinned_memory(values.nbytes)
    host = np.frombuffer(pinned, dtype=np.float64, count=values.size).reshape(values.shape)
    host[...] = values
    results = []
    for row in range(4):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            device = cupy.empty(1000)
            device.set(host[row], stream=stream)
            results.append((stream, cupy.exp(device).sum()))
    for row, (stream, result) in enumerate(results):
        stream.synchronize()
        close(result, np.exp(values[row]).sum())
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    end.record()
    end.synchronize()
    assert cupy.cuda.get_elapsed_time(start, end) >= 0


generator = np.random.default_rng(3)
check_kernels(generator)
check_indexing(generator)
check_linear_algebra(generator)
check_streams(generator)
pool = cupy.get_default_memory_pool()
assert pool.total_bytes() >= pool.used_bytes()
print("ok")
