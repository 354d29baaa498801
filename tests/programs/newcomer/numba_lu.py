"""Numba: a batch of linear systems by LU with partial pivoting, one block a system, in shared
memory; device functions that return tuples, local arrays, complex numbers, several streams."""

import math

import numpy as np
from numba import boolean, complex128, cuda, float64, int32

SIZE = 24
WIDTH = SIZE + 1  # a matrix and its right-hand side
THREADS = 32


@cuda.jit(device=True, inline="always")
def swap(matrix, one, other, column):
    kept = matrix[one, column]
    matrix[one, column] = matrix[other, column]
    matrix[other, column] = kept


@cuda.jit(device=True)
def largest_in_column(matrix, column):
    """The row at or below the diagonal with the largest value, and that value."""
    best_row, best = column, abs(matrix[column, column])
    for row in range(column + 1, SIZE):
        value = abs(matrix[row, column])
        if value > best:
            best_row, best = row, value
    return best_row, best


@cuda.jit
def solve(matrices, right, solutions, determinants, singular):
    system = cuda.blockIdx.x
    thread = cuda.threadIdx.x
    a = cuda.shared.array((SIZE, WIDTH), float64)
    pivot = cuda.shared.array(1, int32)
    failed = cuda.shared.array(1, boolean)
    for row in range(SIZE):
        if thread < SIZE:
            a[row, thread] = matrices[system, row, thread]
        elif thread == SIZE:
            a[row, SIZE] = right[system, row]
    if thread == 0:
        failed[0] = False
    cuda.syncthreads()
    determinant = 1.0
    for column in range(SIZE):
        if thread == 0:
            row, value = largest_in_column(a, column)
            pivot[0] = row
            if value < 1e-12:
                failed[0] = True
        cuda.syncthreads()
        if failed[0]:
            break
        if pivot[0] != column:
            determinant = -determinant
            if thread <= SIZE:
                swap(a, column, pivot[0], thread)
            cuda.syncthreads()
        determinant *= a[column, column]
        if column < thread < SIZE:
            factor = a[thread, column] / a[column, column]
            a[thread, column] = 0.0
            for k in range(column + 1, WIDTH):
                a[thread, k] -= factor * a[column, k]
        cuda.syncthreads()
    if thread == 0:
        singular[system] = failed[0]
        if failed[0]:
            determinants[system] = 0.0
            return
        determinants[system] = determinant
        x = cuda.local.array(SIZE, float64)
        for row in range(SIZE - 1, -1, -1):
            total = a[row, SIZE]
            for k in range(row + 1, SIZE):
                total -= a[row, k] * x[k]
            x[row] = total / a[row, row]
            solutions[system, row] = x[row]


@cuda.jit("void(complex128[:], complex128[:], int32[:], int32)")
def newton_roots(starts, roots, steps, limit):
    """Newton's method for z**3 = 1: which root a start leads to, and after how many steps."""
    for i in range(cuda.grid(1), starts.size, cuda.gridsize(1)):
        z = starts[i]
        step = 0
        while step < limit and abs(z * z * z - 1.0) > 1e-12:
            z = z - (z * z * z - 1.0) / (3.0 * z * z)
            step += 1
        roots[i] = complex128(z)
        steps[i] = step


def check_systems() -> None:
    generator = np.random.default_rng(1)
    count = 40
    matrices = generator.normal(size=(count, SIZE, SIZE))
    matrices[3, :, 5] = matrices[3, :, 6]  # singular
    matrices[7, 0, 0] = 0.0  # needs a pivot at once
    right = generator.normal(size=(count, SIZE))
    solutions = np.zeros_like(right)
    determinants = np.zeros(count)
    singular = np.zeros(count, dtype=np.bool_)
    solve[count, THREADS](matrices, right, solutions, determinants, singular)
    assert np.flatnonzero(singular).tolist() == [3], singular
    good = ~singular
    expected = np.linalg.solve(matrices[good], right[good][..., None])[..., 0]
    np.testing.assert_allclose(solutions[good], expected, rtol=1e-8)
    np.testing.assert_allclose(determinants[good], np.linalg.det(matrices[good]), rtol=1e-9)


def check_roots() -> None:
    axis = np.linspace(-2, 2, 31) + 0.01
    starts = (axis[:, None] + 1j * axis[None, :] * 1.1).ravel()
    halves = np.array_split(starts, 2)
    pending = []
    for half in halves:
        stream = cuda.stream()
        device_half = cuda.to_device(half, stream=stream)
        roots = cuda.device_array(half.size, dtype=np.complex128, stream=stream)
        steps = cuda.device_array(half.size, dtype=np.int32, stream=stream)
        newton_roots[3, 64, stream](device_half, roots, steps, 200)
        pending.append((stream, roots, steps))
    found, counts = [], []
    for stream, roots, steps in pending:
        found.append(roots.copy_to_host(stream=stream))
        counts.append(steps.copy_to_host(stream=stream))
        stream.synchronize()
    roots, steps = np.concatenate(found), np.concatenate(counts)
    assert np.all(np.abs(roots**3 - 1) < 1e-10)
    assert steps.min() >= 1 and steps.max() < 200
    # By symmetry of the method: a start near a root leads to it.
    for k in range(3):
        root = complex(math.cos(2 * math.pi * k / 3), math.sin(2 * math.pi * k / 3))
        near = np.abs(starts - root) < 0.15
        assert near.any() and np.allclose(roots[near], root, atol=1e-9)
    z = starts.copy()
    for _ in range(200):
        far = np.abs(z**3 - 1) > 1e-12
        z[far] = z[far] - (z[far] ** 3 - 1) / (3 * z[far] ** 2)
    # Starts on a basin's edge may go either way with another rounding.
    assert np.mean(np.abs(z - roots) < 1e-9) > 0.99


check_systems()
check_roots()
print("ok")
