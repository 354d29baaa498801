"""Numba: k-means with atomics, random numbers on the device, @vectorize, @guvectorize, reduce, warp
intrinsics, structured arrays, strided views."""

import math

import numpy as np
from numba import cuda, float32, float64, guvectorize, int64, vectorize
from numba.cuda.random import create_xoroshiro128p_states, xoroshiro128p_uniform_float64

CLUSTERS = 4


@cuda.jit
def assign(points, centres, labels, sums, counts):
    shared_sums = cuda.shared.array((CLUSTERS, 2), float32)
    shared_counts = cuda.shared.array(CLUSTERS, int64)
    thread = cuda.threadIdx.x
    if thread < CLUSTERS:
        shared_sums[thread, 0] = 0
        shared_sums[thread, 1] = 0
        shared_counts[thread] = 0
    cuda.syncthreads()
    for i in range(cuda.grid(1), points.shape[0], cuda.gridsize(1)):
        best, best_distance = 0, float32(math.inf)
        for c in range(CLUSTERS):
            dx = points[i, 0] - centres[c, 0]
            dy = points[i, 1] - centres[c, 1]
            distance = dx * dx + dy * dy
            if distance < best_distance:
                best, best_distance = c, distance
        labels[i] = best
        cuda.atomic.add(shared_sums, (best, 0), points[i, 0])
        cuda.atomic.add(shared_sums, (best, 1), points[i, 1])
        cuda.atomic.add(shared_counts, best, 1)
    cuda.syncthreads()
    if thread < CLUSTERS:
        cuda.atomic.add(sums, (thread, 0), shared_sums[thread, 0])
        cuda.atomic.add(sums, (thread, 1), shared_sums[thread, 1])
        cuda.atomic.add(counts, thread, shared_counts[thread])


@vectorize([float32(float32, float32), float64(float64, float64)], target="cuda")
def smooth_step(x, width):
    t = min(max(x / width, 0), 1)
    return t * t * (3 - 2 * t)


@guvectorize([(float64[:, :], float64[:], float64[:])], "(m,n),(n)->(m)", target="cuda")
def matrix_vector(matrix, vector, result):
    for row in range(matrix.shape[0]):
        total = 0.0
        for column in range(matrix.shape[1]):
            total += matrix[row, column] * vector[column]
        result[row] = total


@cuda.reduce
def largest(a, b):
    return a if a > b else b


@cuda.jit
def estimate_pi(states, draws, out):
    i = cuda.grid(1)
    if i < out.size:
        inside = 0
        for _ in range(draws):
            x = xoroshiro128p_uniform_float64(states, i)
            y = xoroshiro128p_uniform_float64(states, i)
            if x * x + y * y <= 1.0:
                inside += 1
        out[i] = 4.0 * inside / draws


@cuda.jit
def warp_sums(values, sums, votes):
    i = cuda.grid(1)
    value = values[i]
    votes[i] = cuda.ballot_sync(0xFFFFFFFF, value > 0.5)
    offset = 16
    while offset > 0:
        value += cuda.shfl_down_sync(0xFFFFFFFF, value, offset)
        offset //= 2
    if cuda.laneid == 0:
        sums[i // cuda.warpsize] = value


PARTICLE = np.dtype(
    [("mass", np.float64), ("position", np.float32, (3,)), ("kind", np.int8)], align=True
)


@cuda.jit
def advance(particles, energy):
    i = cuda.grid(1)
    if i < particles.size:
        particle = particles[i]
        for axis in range(3):
            particle.position[axis] *= 2
        cuda.atomic.add(energy, particle.kind, particle.mass * 0.5)
        cuda.atomic.max(energy, 3, particle.mass)


def check_kmeans() -> None:
    generator = np.random.default_rng(4)
    true_centres = np.array([[0, 0], [5, 5], [-5, 5], [5, -5]], dtype=np.float32)
    points = (
        true_centres[generator.integers(0, 4, 3000)] + generator.normal(size=(3000, 2))
    ).astype(np.float32)
    centres = points[:CLUSTERS] * 0.5 + true_centres * 0.5
    for _ in range(6):
        labels = cuda.device_array(len(points), dtype=np.int32)
        sums = cuda.to_device(np.zeros((CLUSTERS, 2), dtype=np.float32))
        counts = cuda.to_device(np.zeros(CLUSTERS, dtype=np.int64))
        assign[4, 128](points, centres, labels, sums, counts)
        distances = ((points[:, None, :] - centres[None]) ** 2).sum(axis=2)
        near = np.sort(distances, axis=1)
        clear = near[:, 1] - near[:, 0] > 1e-3
        got = labels.copy_to_host()
        assert np.array_equal(got[clear], distances.argmin(axis=1)[clear])
        assert np.array_equal(counts.copy_to_host(), np.bincount(got, minlength=CLUSTERS))
        means = np.array(
            [points[got == c].astype(np.float64).mean(axis=0) for c in range(CLUSTERS)]
        )
        centres = (sums.copy_to_host() / counts.copy_to_host()[:, None]).astype(np.float32)
        np.testing.assert_allclose(centres, means, rtol=1e-3, atol=1e-3)
    order = np.argsort(((centres[:, None] - true_centres[None]) ** 2).sum(axis=2).argmin(axis=1))
    np.testing.assert_allclose(centres[order], true_centres, atol=0.3)


def check_ufuncs() -> None:
    for dtype in (np.float32, np.float64):
        x = np.linspace(-1, 3, 1001, dtype=dtype)
        t = np.clip(x / dtype(2), 0, 1)
        np.testing.assert_allclose(
            smooth_step(x, dtype(2)), t * t * (3 - 2 * t), rtol=1e-5, atol=1e-6
        )
    generator = np.random.default_rng(5)
    matrices, vectors = generator.normal(size=(30, 7, 11)), generator.normal(size=(30, 11))
    np.testing.assert_allclose(
        matrix_vector(matrices, vectors),
        np.einsum("bmn,bn->bm", matrices, vectors),
        rtol=1e-9,
        atol=1e-12,
    )
    values = generator.normal(size=5003)
    assert largest(values) == values.max()


def check_random() -> None:
    threads = 256
    states = create_xoroshiro128p_states(threads, seed=7)
    estimates = cuda.device_array(threads, dtype=np.float64)
    estimate_pi[4, 64](states, 200, estimates)
    first = estimates.copy_to_host()
    assert abs(first.mean() - math.pi) < 0.05, first.mean()
    assert len(np.unique(first)) > 10
    again = create_xoroshiro128p_states(threads, seed=7)
    estimate_pi[2, 128](again, 200, estimates)
    assert np.array_equal(estimates.copy_to_host(), first)


def check_warps() -> None:
    values = np.random.default_rng(6).random(256)
    sums, votes = np.zeros(8), np.zeros(256, dtype=np.uint32)
    warp_sums[2, 128](values, sums, votes)
    warps = values.reshape(8, 32)
    np.testing.assert_allclose(sums, warps.sum(axis=1), rtol=1e-12)
    expected = ((warps > 0.5) * (1 << np.arange(32, dtype=np.uint64))).sum(axis=1)
    assert np.array_equal(votes.reshape(8, 32), np.repeat(expected[:, None], 32, axis=1))


def check_structures() -> None:
    particles = np.zeros(100, dtype=PARTICLE)
    particles["mass"] = np.arange(100) + 0.25
    particles["position"] = np.arange(300).reshape(100, 3)
    particles["kind"] = np.arange(100) % 3
    energy = np.zeros(4)
    device = cuda.to_device(particles)
    advance[1, 64](device[1::2], energy)
    chosen = particles[1::2]
    expected = [chosen["mass"][chosen["kind"] == kind].sum() * 0.5 for kind in range(3)]
    np.testing.assert_allclose(energy, [*expected, chosen["mass"].max()], rtol=1e-12)
    chosen["position"] *= 2
    assert np.array_equal(device.copy_to_host(), particles)


check_kmeans()
check_ufuncs()
check_random()
check_warps()
check_structures()
print("ok")
