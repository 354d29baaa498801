"""CuPy: BFS (RawKernel with atomicCAS on CSR), PageRank (ElementwiseKernel, ReductionKernel,
scatter_add), fancy indexing, boolean masks, cumsum."""

import collections
import sys

import cupy as cp
import cupyx
import numpy as np


def need(ok, what):
    if not ok:
        sys.exit("WRONG: " + what)


bfs_level = cp.RawKernel(
    r"""
extern "C" __global__ void bfs_level(const int* row, const int* col, const int* frontier, int size,
                                     int level, int* dist, int* next, int* next_size) {
  int lane = threadIdx.x & 31, warp = (blockIdx.x * blockDim.x + threadIdx.x) >> 5;
  if (warp >= size) return;  // one warp per vertex of the frontier
  int v = frontier[warp];
  for (int e = row[v] + lane; e < row[v + 1]; e += 32) {
    int w = col[e];
    if (atomicCAS(&dist[w], -1, level) == -1) next[atomicAdd(next_size, 1)] = w;
  }
}
""",
    "bfs_level",
)

damp = cp.ElementwiseKernel(
    "T flow, T dangling, T n",
    "T rank",
    "rank = (T)0.15 / n + (T)0.85 * (flow + dangling / n)",
    "damp",
)
l1 = cp.ReductionKernel(
    "T p, T q", "T y", "p > q ? p - q : q - p", "a + b", "y = a", "0", "l1_distance"
)


def main():
    rng = np.random.default_rng(5)
    n, m = 4000, 22_000
    src, dst = rng.integers(0, n - 200, m), rng.integers(0, n, m)  # the last 200 are dangling
    order = np.argsort(src, kind="stable")
    src, dst = src[order], dst[order].astype(np.int32)
    row = np.zeros(n + 1, np.int64)
    np.add.at(row, src + 1, 1)
    degree_cpu = row[1:].copy()

    # CSR on the device: degrees by scatter_add, offsets by cumsum
    degree = cp.zeros(n, cp.int32)
    cupyx.scatter_add(degree, cp.asarray(src), 1)
    d_row = cp.zeros(n + 1, cp.int32)
    d_row[1:] = cp.cumsum(degree)
    need(
        np.array_equal(d_row.get(), np.concatenate([[0], np.cumsum(degree_cpu)])),
        "cumsum / scatter_add",
    )
    d_col = cp.asarray(dst)

    dist = cp.full(n, -1, cp.int32)
    dist[0] = 0
    frontier, level = cp.zeros(1, cp.int32), 0
    while frontier.size:
        level += 1
        nxt, count = cp.empty(n, cp.int32), cp.zeros((), cp.int32)
        size = frontier.size
        bfs_level(
            ((size * 32 + 127) // 128,),
            (128,),
            (d_row, d_col, frontier, np.int32(size), np.int32(level), dist, nxt, count),
        )
        frontier = nxt[: int(count)]
    host_row = d_row.get()
    want = np.full(n, -1)
    want[0] = 0
    queue = collections.deque([0])
    while queue:
        v = queue.popleft()
        for w in dst[host_row[v] : host_row[v + 1]]:
            if want[w] < 0:
                want[w] = want[v] + 1
                queue.append(w)
    need(np.array_equal(dist.get(), want), "BFS distances")
    reached = dist >= 0
    need(int(reached.sum()) == int((want >= 0).sum()), "reached")
    need(
        np.array_equal(cp.nonzero(~reached)[0].get(), np.nonzero(want < 0)[0]), "nonzero of a mask"
    )
    need(
        np.array_equal(dist[reached][::-3].get(), want[want >= 0][::-3]),
        "boolean mask and negative stride",
    )

    rank = cp.full(n, 1.0 / n)
    d_src, d_dst = cp.asarray(src), cp.asarray(dst)
    steps = 0
    while True:
        share = rank / cp.maximum(degree, 1)
        flow = cp.zeros(n)
        cupyx.scatter_add(flow, d_dst, share[d_src])
        dangling = rank[degree == 0].sum()
        new = damp(flow, dangling, float(n))
        delta = float(l1(new, rank))
        rank = new
        steps += 1
        if delta < 1e-10 or steps > 100:
            break
    r = np.full(n, 1.0 / n)
    for _ in range(steps):
        flow = np.zeros(n)
        np.add.at(flow, dst, (r / np.maximum(degree_cpu, 1))[src])
        r = 0.15 / n + 0.85 * (flow + r[degree_cpu == 0].sum() / n)
    need(steps < 100, f"PageRank did not converge: {delta}")
    need(abs(float(rank.sum()) - 1) < 1e-9, f"ranks sum to {float(rank.sum())}")
    need(np.allclose(rank.get(), r, rtol=1e-9), "PageRank")
    need(int(rank.argmax()) == int(r.argmax()), "argmax")
    print(f"{level} levels, {steps} PageRank steps")
    print("ok")


main()
