"""Numba: all shortest paths by the blocked Floyd-Warshall algorithm in shared memory, with the next
vertex of each path, in three kernels per block; against NumPy."""

import numpy as np
from numba import cuda, int32

B = 16
FAR = 1 << 28


@cuda.jit(device=True)
def relax(c, a, b, next_c, next_a, tx, ty, together):
    for k in range(B):
        if together:
            cuda.syncthreads()
        d = a[ty, k] + b[k, tx]
        if d < c[ty, tx]:
            c[ty, tx] = d
            next_c[ty, tx] = next_a[ty, k]
        if together:
            cuda.syncthreads()


@cuda.jit
def diagonal(dist, succ, k):
    c = cuda.shared.array((B, B), int32)
    s = cuda.shared.array((B, B), int32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    i, j = k * B + ty, k * B + tx
    c[ty, tx] = dist[i, j]
    s[ty, tx] = succ[i, j]
    cuda.syncthreads()
    relax(c, c, c, s, s, tx, ty, True)
    dist[i, j] = c[ty, tx]
    succ[i, j] = s[ty, tx]


@cuda.jit
def cross(dist, succ, k):
    c = cuda.shared.array((B, B), int32)
    s = cuda.shared.array((B, B), int32)
    p = cuda.shared.array((B, B), int32)
    ps = cuda.shared.array((B, B), int32)
    tx, ty, o = cuda.threadIdx.x, cuda.threadIdx.y, cuda.blockIdx.x
    if o == k:
        return
    p[ty, tx] = dist[k * B + ty, k * B + tx]
    ps[ty, tx] = succ[k * B + ty, k * B + tx]
    row = cuda.blockIdx.y == 0
    i = k * B + ty if row else o * B + ty
    j = o * B + tx if row else k * B + tx
    c[ty, tx] = dist[i, j]
    s[ty, tx] = succ[i, j]
    cuda.syncthreads()
    if row:
        relax(c, p, c, s, ps, tx, ty, True)
    else:
        relax(c, c, p, s, s, tx, ty, True)
    dist[i, j] = c[ty, tx]
    succ[i, j] = s[ty, tx]


@cuda.jit
def rest(dist, succ, k):
    a = cuda.shared.array((B, B), int32)
    b = cuda.shared.array((B, B), int32)
    sa = cuda.shared.array((B, B), int32)
    tx, ty, bi, bj = cuda.threadIdx.x, cuda.threadIdx.y, cuda.blockIdx.y, cuda.blockIdx.x
    if bi == k or bj == k:
        return
    i, j = bi * B + ty, bj * B + tx
    a[ty, tx] = dist[i, k * B + tx]
    sa[ty, tx] = succ[i, k * B + tx]
    b[ty, tx] = dist[k * B + ty, j]
    cuda.syncthreads()
    d, s = dist[i, j], succ[i, j]
    for q in range(B):
        t = a[ty, q] + b[q, tx]
        if t < d:
            d = t
            s = sa[ty, q]
    dist[i, j] = d
    succ[i, j] = s


rng = np.random.default_rng(4)
n = 80
weights = np.full((n, n), FAR, np.int32)
for _ in range(n * 4):
    u, v = rng.integers(0, n, 2)
    weights[u, v] = rng.integers(1, 1000)
weights[:, 17] = FAR  # cannot be reached
np.fill_diagonal(weights, 0)
successor = np.where(weights < FAR, np.arange(n, dtype=np.int32)[None, :], -1).astype(np.int32)

stream = cuda.stream()
dist = cuda.to_device(weights, stream=stream)
succ = cuda.to_device(successor, stream=stream)
for k in range(n // B):
    diagonal[1, (B, B), stream](dist, succ, k)
    cross[(n // B, 2), (B, B), stream](dist, succ, k)
    rest[(n // B, n // B), (B, B), stream](dist, succ, k)
got = dist.copy_to_host(stream=stream)
path = succ.copy_to_host(stream=stream)
stream.synchronize()

want = weights.astype(np.int64)
for k in range(n):
    want = np.minimum(want, want[:, k : k + 1] + want[k : k + 1, :])
reached = want < FAR
np.testing.assert_array_equal(np.where(got < FAR, got, -1), np.where(reached, want, -1))
assert not reached[:, 17].sum() - 1 and reached.sum() > n * n // 2
for u in range(n):
    for v in range(n):
        if u == v or not reached[u, v]:
            continue
        length, at, steps = 0, u, 0
        while at != v:
            following = path[at, v]
            length += int(weights[at, following])
            at = following
            steps += 1
            assert steps <= n, (u, v)
        assert length == want[u, v], (u, v)
print("ok")
