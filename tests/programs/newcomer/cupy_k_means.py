"""CuPy: Lloyd's k-means with a templated RawModule, centroids in constant memory, two streams and
events, and a ReductionKernel; against NumPy in every round."""

import cupy as cp
import numpy as np

source = r"""
__constant__ float centres[64];
__device__ unsigned int moved;
template <typename T, int D>
__global__ void assign(const float* points, int n, int k, T* label, float* distance) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float best = 1e30f;
  int at = 0;
  for (int c = 0; c < k; ++c) {
    float s = 0;
#pragma unroll
    for (int d = 0; d < D; ++d) {
      float t = __fsub_rn(points[i * D + d], centres[c * D + d]);
      s = __fadd_rn(s, __fmul_rn(t, t));
    }
    if (s < best) best = s, at = c;
  }
  if (label[i] != at) atomicAdd(&moved, 1u);
  label[i] = at;
  distance[i] = best;
}
template <int D>
__global__ void accumulate(const float* points, int n, const signed char* label, double* sum,
                           int* count) {
  extern __shared__ double shared[];
  int k = gridDim.y, c = blockIdx.y;
  double mine[D] = {};
  int members = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    if (label[i] == c) {
      ++members;
      for (int d = 0; d < D; ++d) mine[d] += points[i * D + d];
    }
  for (int d = 0; d < D; ++d) {
    shared[threadIdx.x] = mine[d];
    __syncthreads();
    for (int s = blockDim.x / 2; s; s /= 2) {
      if (threadIdx.x < s) shared[threadIdx.x] += shared[threadIdx.x + s];
      __syncthreads();
    }
    if (threadIdx.x == 0) atomicAdd(&sum[c * D + d], shared[0]);
    __syncthreads();
  }
  if (members) atomicAdd(&count[c], members);
}
"""
names = ["assign<signed char, 3>", "accumulate<3>"]
module = cp.RawModule(code=source, options=("-std=c++17",), name_expressions=names)
assign, accumulate = (module.get_function(n) for n in names)
inertia = cp.ReductionKernel(
    "float32 d", "float64 total", "(double)d", "a + b", "total = a", "0", "inertia"
)

rng = np.random.default_rng(21)
n, k = 997, 5
seeds = rng.normal(size=(k, 3)) * 6
points = (seeds[rng.integers(0, k, n)] + rng.normal(size=(n, 3))).astype(np.float32)
points = np.round(points * 64) / np.float32(64)  # so that sums are exact in any order

compute, copies = cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(non_blocking=True)
device = cp.asarray(points)
label = cp.full(n, -1, cp.int8)
distance = cp.empty(n, cp.float32)
total, count = cp.zeros((k, 3)), cp.zeros(k, cp.int32)
moved_pointer = module.get_global("moved")
moved = cp.ndarray(1, cp.uint32, moved_pointer)
constant = cp.ndarray((k, 3), cp.float32, module.get_global("centres"))
pinned = cp.cuda.alloc_pinned_memory(n)
labels_host = np.frombuffer(pinned, np.int8, n)
cp.cuda.Device().synchronize()

centres = points[:k].copy()
last = None
for round_ in range(50):
    with compute:
        constant.set(centres)
        moved.fill(0)
        total.fill(0)
        count.fill(0)
        assign(((n + 127) // 128,), (128,), (device, np.int32(n), np.int32(k), label, distance))
        assigned = compute.record()
        accumulate((3, k), (64,), (device, np.int32(n), label, total, count), shared_mem=64 * 8)
        value = inertia(distance)
    copies.wait_event(assigned)
    label.get(stream=copies, out=labels_host)
    sums, members, changed = (
        total.get(stream=compute),
        count.get(stream=compute),
        int(moved.get(stream=compute)[0]),
    )
    copies.synchronize()

    difference = points[:, None, :] - centres[None]
    squares = difference * difference
    d2 = squares[..., 0] + squares[..., 1] + squares[..., 2]
    want = d2.argmin(1)
    np.testing.assert_array_equal(labels_host, want)
    np.testing.assert_array_equal(members, np.bincount(want, minlength=k))
    np.testing.assert_array_equal(
        sums, np.stack([points[want == c].astype(np.float64).sum(0) for c in range(k)])
    )
    np.testing.assert_allclose(
        float(value.get(stream=compute)), d2.min(1).astype(np.float64).sum(), rtol=1e-12
    )
    assert changed == (n if round_ == 0 else int((want != last).sum()))
    last = want
    if not changed:
        break
    centres = (sums / members[:, None]).astype(np.float32)
else:
    raise AssertionError("does not converge")
assert round_ > 1
print("ok")
