"""k-means with Numba: centroids in shared memory, float64 and int32 atomics in both memories."""

import sys

import numpy as np
from numba import cuda, float64, int32

K, D, TPB = 6, 3, 128


@cuda.jit
def assign_and_sum(points, centroids, labels, sums, counts, changed):
    cent = cuda.shared.array((K, D), float64)
    local_sum = cuda.shared.array((K, D), float64)
    local_count = cuda.shared.array(K, int32)
    t = cuda.threadIdx.x
    for i in range(t, K * D, cuda.blockDim.x):
        cent[i // D, i % D] = centroids[i // D, i % D]
        local_sum[i // D, i % D] = 0.0
    if t < K:
        local_count[t] = 0
    cuda.syncthreads()
    i = cuda.grid(1)
    moved = False
    if i < points.shape[0]:
        best, best_d = -1, 1e300
        for k in range(K):
            d = 0.0
            for c in range(D):
                x = points[i, c] - cent[k, c]
                d += x * x
            if d < best_d:
                best, best_d = k, d
        moved = labels[i] != best
        labels[i] = best
        for c in range(D):
            cuda.atomic.add(local_sum, (best, c), points[i, c])
        cuda.atomic.add(local_count, best, 1)
    n = cuda.syncthreads_count(int32(1) if moved else int32(0))
    if t == 0:
        cuda.atomic.add(changed, 0, n)
    for j in range(t, K * D, cuda.blockDim.x):
        cuda.atomic.add(sums, (j // D, j % D), local_sum[j // D, j % D])
    if t < K:
        cuda.atomic.add(counts, t, local_count[t])


def cpu(points, centroids, iterations):
    labels = None
    for _ in range(iterations):
        d = ((points[:, None, :] - centroids[None]) ** 2).sum(axis=2)
        labels = d.argmin(axis=1)
        counts = np.bincount(labels, minlength=K)
        sums = np.stack(
            [np.bincount(labels, weights=points[:, c], minlength=K) for c in range(D)], axis=1
        )
        centroids = sums / counts[:, None]
    return labels, centroids, counts


def main():
    rng = np.random.default_rng(3)
    centres = rng.uniform(-10, 10, (K, D))
    n = 20_001
    points = centres[rng.integers(0, K, n)] + rng.normal(size=(n, D))
    start = centres + 0.5  # near enough that no cluster gets empty
    d_points, d_labels = cuda.to_device(points), cuda.to_device(np.full(n, -1, np.int32))
    d_cent = cuda.to_device(start)
    grid = (n + TPB - 1) // TPB
    history = []
    for it in range(8):
        d_sums = cuda.to_device(np.zeros((K, D)))
        d_counts = cuda.to_device(np.zeros(K, np.int32))
        d_changed = cuda.to_device(np.zeros(1, np.int32))
        assign_and_sum[grid, TPB](d_points, d_cent, d_labels, d_sums, d_counts, d_changed)
        sums, counts = d_sums.copy_to_host(), d_counts.copy_to_host()
        history.append(int(d_changed.copy_to_host()[0]))
        if counts.sum() != n:
            sys.exit(f"WRONG: iteration {it}: counts {counts} sum to {counts.sum()}, expected {n}")
        d_cent.copy_to_device(sums / counts[:, None])
    labels, centroids, counts_cpu = cpu(points, start, 8)
    if history[0] != n:
        sys.exit(f"WRONG: {history[0]} labels changed at first, expected {n}")
    if not np.array_equal(counts, counts_cpu):
        sys.exit(f"WRONG: counts {counts}, expected {counts_cpu}")
    if not np.array_equal(d_labels.copy_to_host(), labels):
        sys.exit("WRONG: labels differ")
    if not np.allclose(d_cent.copy_to_host(), centroids, rtol=1e-10, atol=1e-12):
        sys.exit("WRONG: centroids differ")
    print("", counts.tolist(), "changed", history)
    print("ok")


main()
