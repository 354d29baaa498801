"""Numba streams, events, pinned memory: chunks of DNA sequences are aligned (edit distance) in two
streams that hand over by events; records (structured dtype)."""

import sys

import numpy as np
from numba import cuda, int32

L = 24
L1 = L + 1  # a constant: Numba takes no expression as the shape of a local array
record = np.dtype(
    [("a", np.uint8, (L,)), ("b", np.uint8, (L,)), ("id", np.int32), ("weight", np.float32)],
    align=True,
)


def need(ok, what):
    if not ok:
        sys.exit("WRONG: " + what)


@cuda.jit
def distances(a, b, out):
    i = cuda.grid(1)
    if i >= a.shape[0]:
        return
    row = cuda.local.array(L1, int32)
    for j in range(L + 1):
        row[j] = j
    for y in range(1, L + 1):
        diagonal = row[0]
        row[0] = y
        for x in range(1, L + 1):
            up = row[x]
            cost = 0 if a[i, y - 1] == b[i, x - 1] else 1
            row[x] = min(min(up + 1, row[x - 1] + 1), diagonal + cost)
            diagonal = up
    out[i] = row[L]


@cuda.jit
def weigh(dist, recs, out):
    i = cuda.grid(1)
    if i < dist.shape[0]:
        out[i] = dist[i] * recs[i]["weight"] + recs[i]["id"]


def cpu(a, b):
    n = len(a)
    prev = np.tile(np.arange(L + 1), (n, 1))
    for y in range(1, L + 1):
        cur = np.empty_like(prev)
        cur[:, 0] = y
        for x in range(1, L + 1):
            cost = (a[:, y - 1] != b[:, x - 1]).astype(np.int64)
            cur[:, x] = np.minimum(
                np.minimum(prev[:, x] + 1, cur[:, x - 1] + 1), prev[:, x - 1] + cost
            )
        prev = cur
    return prev[:, L]


def main():
    rng = np.random.default_rng(1)
    chunks, n = 4, 700
    a = cuda.pinned_array((chunks, n, L), dtype=np.uint8)
    b = cuda.pinned_array((chunks, n, L), dtype=np.uint8)
    a[:] = rng.integers(0, 4, a.shape)
    b[:] = np.where(rng.random(a.shape) < 0.3, rng.integers(0, 4, a.shape), a)
    recs = np.zeros((chunks, n), dtype=record)
    recs["id"] = np.arange(chunks * n).reshape(chunks, n)
    recs["weight"] = rng.random((chunks, n), dtype=np.float32)
    out = cuda.pinned_array((chunks, n), dtype=np.float64)
    out[:] = -1
    compute, finish = cuda.stream(), cuda.stream()
    begin, end = cuda.event(timing=True), cuda.event(timing=True)
    keep = []
    begin.record(compute)
    for c in range(chunks):
        da, db = cuda.to_device(a[c], stream=compute), cuda.to_device(b[c], stream=compute)
        dist = cuda.device_array(n, np.int32, stream=compute)
        distances[(n + 63) // 64, 64, compute](da, db, dist)
        ready = cuda.event(timing=False)
        ready.record(compute)
        ready.wait(finish)
        drec = cuda.to_device(recs[c], stream=finish)
        res = cuda.device_array(n, np.float64, stream=finish)
        weigh[(n + 127) // 128, 128, finish](dist, drec, res)
        res.copy_to_host(out[c], stream=finish)
        keep.append((da, db, dist, drec, res, ready))
    last = cuda.event(timing=False)
    last.record(finish)
    last.wait(compute)
    end.record(compute)
    end.synchronize()
    need(end.query() and last.query(), "events are not complete after synchronize")
    ms = begin.elapsed_time(end)
    need(0 < ms < 120_000, f"elapsed {ms} ms")
    for c in range(chunks):
        d = cpu(a[c], b[c])
        need(np.array_equal(keep[c][2].copy_to_host(), d), f"distances of chunk {c}")
        want = d * recs[c]["weight"].astype(np.float64) + recs[c]["id"]
        need(np.allclose(out[c], want, rtol=1e-6), f"weighted result of chunk {c}")
    with cuda.defer_cleanup():
        del keep
    free, total = cuda.current_context().get_memory_info()
    need(0 < free <= total, f"memory info {free} {total}")
    print(f"mean distance {d.mean():.2f}")
    print("ok")


main()
