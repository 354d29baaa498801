"""CuPy: connected components of an image by label propagation and pointer jumping in
ElementwiseKernels; sizes, numbers and an outline by CuPy's own kernels; against union-find."""

import cupy as cp
import numpy as np

hook = cp.ElementwiseKernel(
    "raw uint8 image, int32 w, int32 h",
    "raw int32 parent, raw int32 changed",
    """
    if (image[i]) {
      int x = i % w, y = i / w, mine = parent[i], best = mine;
      for (int dy = -1; dy <= 1; ++dy)
        for (int dx = -1; dx <= 1; ++dx) {
          int nx = x + dx, ny = y + dy;
          if (nx < 0 || nx >= w || ny < 0 || ny >= h || !image[ny * w + nx]) continue;
          best = min(best, parent[ny * w + nx]);
        }
      if (best < mine) {
        atomicMin(&parent[mine], best);
        atomicMin(&parent[i], best);
        changed[0] = 1;
      }
    }
    """,
    "hook",
)
jump = cp.ElementwiseKernel(
    "raw int32 source",
    "int32 target",
    "int p = source[i]; while (p >= 0 && source[p] != p) p = source[p]; target = p",
    "jump",
)
lowest = cp.ReductionKernel(
    "int32 label, int64 row, int32 which",
    "int64 y",
    "label == which ? row : -1LL",
    "max(a, b)",
    "y = a",
    "-1",
    "lowest",
)

rng = np.random.default_rng(2)
h, w = 43, 57
image = (rng.random((h, w)) < 0.35).astype(np.uint8)
image[20] = np.arange(w) % 9 != 0
device = cp.asarray(image)
parent = cp.where(device.ravel() != 0, cp.arange(h * w, dtype=cp.int32), cp.int32(-1))
changed = cp.zeros(1, cp.int32)
rounds = 0
while True:
    changed.fill(0)
    hook(device.ravel(), w, h, parent, changed, size=h * w)
    parent = jump(parent, cp.empty_like(parent))
    rounds += 1
    if not int(changed[0]):
        break

union = list(range(h * w))


def find(i):
    while union[i] != i:
        union[i] = union[union[i]]
        i = union[i]
    return i


for y in range(h):
    for x in range(w):
        if image[y, x]:
            for dy, dx in ((-1, -1), (-1, 0), (-1, 1), (0, -1)):
                if y + dy >= 0 and 0 <= x + dx < w and image[y + dy, x + dx]:
                    a, b = find(y * w + x), find((y + dy) * w + x + dx)
                    union[max(a, b)] = min(a, b)
want = np.array([find(i) if image.flat[i] else -1 for i in range(h * w)], np.int32)
np.testing.assert_array_equal(parent.get(), want)

# Sizes by bincount, of the roots by boolean indexing; the largest one's outline by shifted views.
sizes = cp.bincount(parent[parent >= 0], minlength=h * w)
np.testing.assert_array_equal(sizes.get(), np.bincount(want[want >= 0], minlength=h * w))
roots = cp.flatnonzero(parent == cp.arange(h * w, dtype=cp.int32))
np.testing.assert_array_equal(roots.get(), np.flatnonzero(want == np.arange(h * w)))
largest = int(sizes.argmax())
assert largest == np.bincount(want[want >= 0]).argmax()
compact = cp.cumsum((parent == cp.arange(h * w, dtype=cp.int32)).astype(cp.int32)) - 1
numbers = cp.where(parent >= 0, compact[parent], -1)
hroots = np.unique(want[want >= 0])
np.testing.assert_array_equal(numbers.get(), np.where(want >= 0, np.searchsorted(hroots, want), -1))
mask = cp.pad((parent == largest).reshape(h, w), 1)
outline = mask[1:-1, 1:-1] & ~(mask[:-2, 1:-1] & mask[2:, 1:-1] & mask[1:-1, :-2] & mask[1:-1, 2:])
hmask = np.pad((want == largest).reshape(h, w), 1)
np.testing.assert_array_equal(
    outline.get(),
    hmask[1:-1, 1:-1] & ~(hmask[:-2, 1:-1] & hmask[2:, 1:-1] & hmask[1:-1, :-2] & hmask[1:-1, 2:]),
)
ys, xs = np.nonzero((want == largest).reshape(h, w))
rows = cp.arange(h, dtype=cp.int64)[:, None]
labels = parent.reshape(h, w)
assert int(lowest(labels, rows, largest)) == ys.max()
last = lowest(labels, rows, largest, axis=0).get()
np.testing.assert_array_equal(
    last, np.where(want.reshape(h, w) == largest, np.arange(h)[:, None], -1).max(axis=0)
)
columns = cp.any((parent == largest).reshape(h, w), axis=0)
np.testing.assert_array_equal(cp.nonzero(columns)[0].get(), np.unique(xs))
print("ok")
