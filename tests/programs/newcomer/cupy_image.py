"""CuPy: integral image, Otsu's threshold, templated RawModule (connected components by label
propagation), fused kernel, streams and events, reductions along axes, complex numbers."""

import sys

import cupy as cp
import numpy as np


def need(ok, what):
    if not ok:
        sys.exit("WRONG: " + what)


module = cp.RawModule(
    code=r"""
template <typename T, int Radius> __device__ T clamped(const T* im, int w, int h, int x, int y) {
  x = x < 0 ? 0 : x >= w ? w - 1 : x;
  y = y < 0 ? 0 : y >= h ? h - 1 : y;
  return im[y * w + x];
}
template <typename T, int Radius> __global__ void box(const T* im, T* out, int w, int h) {
  int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
  if (x >= w || y >= h) return;
  T s = 0;
  for (int b = -Radius; b <= Radius; ++b)
    for (int a = -Radius; a <= Radius; ++a) s += clamped<T, Radius>(im, w, h, x + a, y + b);
  out[y * w + x] = s / T((2 * Radius + 1) * (2 * Radius + 1));
}
extern "C" { __constant__ int offsets[4]; }
__global__ void propagate(const unsigned char* mask, int* label, int w, int h, int* changed) {
  int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
  if (x >= w || y >= h || !mask[y * w + x]) return;
  int i = y * w + x, best = label[i];
  if (x > 0 && mask[i + offsets[0]]) best = min(best, label[i + offsets[0]]);
  if (x < w - 1 && mask[i + offsets[1]]) best = min(best, label[i + offsets[1]]);
  if (y > 0 && mask[i + offsets[2]]) best = min(best, label[i + offsets[2]]);
  if (y < h - 1 && mask[i + offsets[3]]) best = min(best, label[i + offsets[3]]);
  best = min(best, label[best]);
  if (best < label[i]) { atomicMin(&label[i], best); *changed = 1; }
}
""",
    options=("-std=c++17",),
    name_expressions=("box<float, 1>", "box<double, 2>", "propagate"),
)


@cp.fuse()
def gamma(x, g):
    return cp.sqrt(x * x + g) - cp.exp(-x)


def main():
    rng = np.random.default_rng(2)
    h, w = 93, 120
    yy, xx = np.mgrid[0:h, 0:w]
    im = 0.2 + 0.05 * rng.standard_normal((h, w))
    for _ in range(12):
        cy, cx, r = rng.integers(5, h - 5), rng.integers(5, w - 5), rng.integers(3, 9)
        im[(yy - cy) ** 2 + (xx - cx) ** 2 < r * r] += 0.5
    g = cp.asarray(im)
    grid, block = ((w + 15) // 16, (h + 7) // 8), (16, 8)

    for name, dtype, r in (("box<float, 1>", np.float32, 1), ("box<double, 2>", np.float64, 2)):
        src, out = g.astype(dtype), cp.empty((h, w), dtype)
        module.get_function(name)(grid, block, (src, out, np.int32(w), np.int32(h)))
        p = np.pad(im.astype(dtype).astype(np.float64), r, mode="edge")
        want = (
            sum(p[b : b + h, a : a + w] for b in range(2 * r + 1) for a in range(2 * r + 1))
            / (2 * r + 1) ** 2
        )
        need(np.allclose(out.get(), want, rtol=1e-5 if dtype == np.float32 else 1e-12), name)

    integral = cp.cumsum(cp.cumsum(g, axis=0), axis=1)
    need(np.allclose(integral.get(), im.cumsum(0).cumsum(1)), "integral image")
    need(
        np.allclose(g.mean(axis=0).get(), im.mean(0))
        and np.allclose(g.std(axis=1).get(), im.std(1)),
        "mean, std",
    )
    need(np.allclose(gamma(g, 0.3).get(), np.sqrt(im * im + 0.3) - np.exp(-im)), "fused kernel")

    lo, hi = float(g.min()), float(g.max())
    bins = 64
    index = cp.clip(((g - lo) / (hi - lo) * bins).astype(cp.int32), 0, bins - 1)
    hist = cp.bincount(index.ravel(), minlength=bins).astype(cp.float64)
    want_hist = np.bincount(
        np.clip(((im - lo) / (hi - lo) * bins).astype(np.int32), 0, bins - 1).ravel(),
        minlength=bins,
    )
    need(np.array_equal(hist.get(), want_hist), "bincount")
    levels = cp.arange(bins, dtype=cp.float64)
    w0 = cp.cumsum(hist)
    w1 = hist.sum() - w0
    s0 = cp.cumsum(hist * levels)
    mean_diff = s0 / cp.maximum(w0, 1) - (s0[-1] - s0) / cp.maximum(w1, 1)
    best = int(cp.argmax(w0 * w1 * mean_diff**2))
    hh = want_hist.astype(float)
    v0, t0 = hh.cumsum(), (hh * np.arange(bins)).cumsum()
    between = (
        v0
        * (hh.sum() - v0)
        * (t0 / np.maximum(v0, 1) - (t0[-1] - t0) / np.maximum(hh.sum() - v0, 1)) ** 2
    )
    need(between[best] >= between.max() * (1 - 1e-12), f"Otsu {best}, expected {between.argmax()}")

    mask = (index > best).astype(cp.uint8)
    ptr = module.get_global("offsets")
    table = cp.ndarray((4,), cp.int32, ptr)
    table[...] = cp.asarray(np.array([-1, 1, -w, w], np.int32))
    label = cp.arange(h * w, dtype=cp.int32).reshape(h, w)
    changed = cp.ones(1, cp.int32)
    stream = cp.cuda.Stream(non_blocking=True)
    t0_, t1_ = cp.cuda.Event(), cp.cuda.Event()
    cp.cuda.Device().synchronize()
    rounds = 0
    with stream:
        t0_.record()
        while int(changed[0]):
            changed.fill(0)
            module.get_function("propagate")(
                grid, block, (mask, label, np.int32(w), np.int32(h), changed)
            )
            rounds += 1
        t1_.record()
    t1_.synchronize()
    need(cp.cuda.get_elapsed_time(t0_, t1_) > 0, "elapsed time")
    m, want = mask.get().astype(bool), np.arange(h * w).reshape(h, w)
    while True:
        pad = np.pad(np.where(m, want, h * w), 1, constant_values=h * w)
        new = np.minimum.reduce(
            [pad[1:-1, 1:-1], pad[:-2, 1:-1], pad[2:, 1:-1], pad[1:-1, :-2], pad[1:-1, 2:]]
        )
        new = np.where(m, new, want)
        if np.array_equal(new, want):
            break
        want = new
    got = label.get()
    need(np.array_equal(got[m], want[m]), "labels")
    roots = cp.count_nonzero((label.ravel() == cp.arange(h * w)) & (mask.ravel() == 1))
    need(int(roots) == len(np.unique(want[m])), "number of components")

    z = g + 1j * g[:, ::-1]
    need(
        np.allclose(cp.abs(z.conj() * z + 1).get(), np.abs(np.abs(im + 1j * im[:, ::-1]) ** 2 + 1)),
        "complex",
    )
    ii, jj = rng.integers(0, h, 500), rng.integers(-w, w, 500)
    need(np.array_equal(g[cp.asarray(ii), cp.asarray(jj)].get(), im[ii, jj]), "two index arrays")
    print(f"threshold {best}, {int(roots)} components, {rounds} rounds")
    print("ok")


main()
