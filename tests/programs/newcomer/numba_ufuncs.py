"""Numba @vectorize (Black-Scholes with erf/log/exp, integer bit tricks), @guvectorize (LU solve of
small systems), device functions with tuples and complex numbers."""

import math
import sys

import numpy as np
from numba import cuda, guvectorize, vectorize


def need(ok, what):
    if not ok:
        sys.exit("WRONG: " + what)


@vectorize(["float64(float64, float64, float64, float64, float64)"], target="cuda")
def call_price(s, k, t, r, v):
    d1 = (math.log(s / k) + (r + 0.5 * v * v) * t) / (v * math.sqrt(t))
    d2 = d1 - v * math.sqrt(t)
    n1 = 0.5 * (1.0 + math.erf(d1 / math.sqrt(2.0)))
    n2 = 0.5 * (1.0 + math.erf(d2 / math.sqrt(2.0)))
    return s * n1 - k * math.exp(-r * t) * n2


@vectorize(["uint32(uint32, int32)", "int64(int64, int32)"], target="cuda")
def gray_rotate(x, by):
    g = x ^ (x >> 1)
    return g * 3 + by


@guvectorize(["void(float64[:,:], float64[:], float64[:])"], "(n,n),(n)->(n)", target="cuda")
def lu_solve(a, b, x):
    n = b.shape[0]
    # Gaussian elimination without pivoting in a private copy
    for i in range(n):
        x[i] = b[i]
    for k in range(n):
        for i in range(k + 1, n):
            f = a[i, k] / a[k, k]
            for j in range(k, n):
                a[i, j] -= f * a[k, j]
            x[i] -= f * x[k]
    for q in range(n):
        i = n - 1 - q
        s = x[i]
        for j in range(i + 1, n):
            s -= a[i, j] * x[j]
        x[i] = s / a[i, i]


@cuda.jit(device=True)
def roots(a, b, c):
    d = complex(b * b - 4 * a * c, 0.0)
    m = abs(d)
    r = complex(math.sqrt(m), 0.0) if d.real >= 0 else complex(0.0, math.sqrt(m))
    return (-b + r) / (2 * a), (-b - r) / (2 * a)


@cuda.jit(device=True)
def newton(z):
    steps = 0
    while steps < 40:
        p = z * z * z - 1
        if abs(p) < 1e-12:
            break
        z = z - p / (3 * z * z)
        steps += 1
    return z, steps


@cuda.jit
def quadratics(abc, out):
    i = cuda.grid(1)
    if i < out.shape[0]:
        out[i, 0], out[i, 1] = roots(abc[i, 0], abc[i, 1], abc[i, 2])


@cuda.jit
def basins(start, which, count):
    y, x = cuda.grid(2)
    if y < start.shape[0] and x < start.shape[1]:
        z, n = newton(start[y, x])
        count[y, x] = n
        best = 0
        for k in range(3):
            w = complex(math.cos(2 * math.pi * k / 3), math.sin(2 * math.pi * k / 3))
            if abs(z - w) < 1e-6:
                best = k + 1
        which[y, x] = best


def main():
    rng = np.random.default_rng(11)
    n = 10_007
    s, k = rng.uniform(10, 100, n), rng.uniform(10, 100, n)
    t, v = rng.uniform(0.1, 3, n), rng.uniform(0.1, 0.6, n)
    got = call_price(s, k, t, 0.03, v)
    erf = np.vectorize(math.erf)
    d1 = (np.log(s / k) + (0.03 + 0.5 * v * v) * t) / (v * np.sqrt(t))
    d2 = d1 - v * np.sqrt(t)
    want = s * 0.5 * (1 + erf(d1 / math.sqrt(2))) - k * np.exp(-0.03 * t) * 0.5 * (
        1 + erf(d2 / math.sqrt(2))
    )
    need(np.allclose(got, want, rtol=1e-9, atol=1e-9), f"Black-Scholes, {np.abs(got - want).max()}")

    for dtype in (np.uint32, np.int64):
        x = rng.integers(0, min(np.iinfo(dtype).max, 2**60), 3001, dtype=dtype)
        got = gray_rotate(x, np.int32(7))
        need(got.dtype == dtype, f"dtype {got.dtype}")
        need(
            np.array_equal(got, (x ^ (x >> dtype(1))) * dtype(3) + dtype(7)),
            f"gray code {dtype.__name__}",
        )

    m = 5
    a = rng.uniform(-1, 1, (700, m, m)) + m * np.eye(m)
    b = rng.uniform(-1, 1, (700, m))
    x = lu_solve(a.copy(), b)
    need(np.allclose(np.einsum("nij,nj->ni", a, x), b, rtol=1e-9, atol=1e-10), "guvectorize LU")

    abc = rng.uniform(-3, 3, (5000, 3))
    abc[:, 0] += np.where(abc[:, 0] < 0, -0.5, 0.5)
    out = np.zeros((5000, 2), np.complex128)
    quadratics[(5000 + 63) // 64, 64](abc, out)
    need(np.allclose(out.sum(axis=1), -abc[:, 1] / abc[:, 0]), "sum of roots")
    need(np.allclose(out.prod(axis=1), abc[:, 2] / abc[:, 0]), "product of roots")

    g = np.linspace(-1.5, 1.5, 50)
    start = (g[None, :] + 1j * g[:, None] + (0.013 + 0.007j)).astype(np.complex128)
    which, count = np.zeros(start.shape, np.int32), np.zeros(start.shape, np.int32)
    basins[(4, 7), (16, 8)](start, which, count)
    z = start.copy()
    for _ in range(40):
        p = z**3 - 1
        go = np.abs(p) >= 1e-12
        z = np.where(go, z - p / (3 * z * z), z)
    ws = np.exp(2j * np.pi * np.arange(3) / 3)
    near = np.abs(z[..., None] - ws) < 1e-6
    want = np.where(near.any(axis=-1), near.argmax(axis=-1) + 1, 0)
    need(
        (which != want).mean() < 0.005,
        f"Newton basins: {(which != want).sum()} of {want.size} differ",
    )
    need(which.min() > 0 and count.max() <= 40 and count.min() > 0, "Newton steps")
    print("ok")


main()
