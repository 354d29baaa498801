"""Numba: a suffix array by prefix doubling, sorted by a bitonic network on the device, and searched
by binary search; against sorted()."""

import numpy as np
from numba import cuda

NONE = np.uint32(0xFFFFFFFF)


@cuda.jit(device=True)
def before(rank, n, a, b, h):
    """Whether suffix a comes before b, by their first 2 h letters."""
    if a == NONE or b == NONE:
        return a != NONE
    if rank[a] != rank[b]:
        return rank[a] < rank[b]
    ra = rank[a + h] if a + h < n else -1
    rb = rank[b + h] if b + h < n else -1
    return ra < rb if ra != rb else a < b


@cuda.jit
def stage(order, rank, n, h, k, j):
    i = cuda.grid(1)
    other = i ^ j
    if other > i and other < order.size:
        a, b = order[i], order[other]
        up = (i & k) == 0
        if before(rank, n, b, a, h) == up:
            order[i] = b
            order[other] = a


@cuda.jit
def heads(order, rank, n, h, head):
    i = cuda.grid(1)
    if i < n:
        new = 0
        if i > 0:
            a, b = order[i - 1], order[i]
            ra = rank[a + h] if a + h < n else -1
            rb = rank[b + h] if b + h < n else -1
            if rank[a] != rank[b] or ra != rb:
                new = 1
        head[i] = new


@cuda.jit
def scan(values, result):
    """Inclusive sums of any length by one block, tile after tile, with warp shuffles."""
    sums = cuda.shared.array(8, np.int32)
    lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
    carry = 0
    for base in range(0, values.size, 256):
        i = base + cuda.threadIdx.x
        v = values[i] if i < values.size else np.int32(0)
        d = 1
        while d < 32:
            u = cuda.shfl_up_sync(0xFFFFFFFF, v, d)
            if lane >= d:
                v += u
            d *= 2
        if lane == 31:
            sums[warp] = v
        cuda.syncthreads()
        for w in range(warp):
            v += sums[w]
        total = 0
        for w in range(8):
            total += sums[w]
        if i < values.size:
            result[i] = v + carry
        carry += total
        cuda.syncthreads()


@cuda.jit
def scatter(order, sums, rank):
    i = cuda.grid(1)
    if i < sums.size:
        rank[order[i]] = sums[i]


@cuda.jit
def search(text, order, patterns, lengths, found):
    """The number of occurrences of each pattern."""
    q = cuda.grid(1)
    if q >= lengths.size:
        return
    for side in range(2):
        low, high = 0, text.size
        while low < high:
            middle = (low + high) // 2
            c = 0
            for k in range(lengths[q]):
                p = order[middle] + k
                t = np.int32(text[p]) if p < text.size else np.int32(-1)
                c = t - np.int32(patterns[q, k])
                if c != 0:
                    break
            if c < 0 or (side == 1 and c == 0):
                low = middle + 1
            else:
                high = middle
        found[q, side] = low


rng = np.random.default_rng(11)
n = 700
text = rng.choice(np.frombuffer(b"ab", np.uint8), n)
text[200:400] = text[300:500]  # long repeats
size = 1024
order_h = np.full(size, NONE, np.uint32)
order_h[:n] = np.arange(n)
order = cuda.to_device(order_h)
rank = cuda.to_device(text.astype(np.int32))
head = cuda.device_array(n, np.int32)
sums = cuda.device_array(n, np.int32)
h, rounds = 0, 0
while True:
    # In the first round only the letters themselves count.
    step = h if h else n
    k = 2
    while k <= size:
        j = k // 2
        while j:
            stage[size // 128, 128](order, rank, n, step, k, j)
            j //= 2
        k *= 2
    heads[(n + 127) // 128, 128](order, rank, n, step, head)
    scan[1, 256](head, sums)
    scatter[(n + 127) // 128, 128](order, sums, rank)
    rounds += 1
    if sums[n - 1] == n - 1:
        break
    h = h * 2 if h else 1
raw = text.tobytes()
want = sorted(range(n), key=lambda i: raw[i:])
np.testing.assert_array_equal(order.copy_to_host()[:n], want)

queries = [
    b"a",
    b"b",
    b"ab",
    b"aabb",
    b"bababa",
    raw[300:340],
    raw[690:],
    b"c",
    b"aaaaaaaaaaaaaaaaaaaaaa",
]
patterns = np.zeros((len(queries), 40), np.uint8)
for i, q in enumerate(queries):
    patterns[i, : len(q)] = np.frombuffer(q, np.uint8)
lengths = np.array([len(q) for q in queries], np.int32)
found = cuda.device_array((len(queries), 2), np.int32)
search[1, 32](cuda.to_device(text), order, cuda.to_device(patterns), cuda.to_device(lengths), found)
counts = np.diff(found.copy_to_host(), axis=1)[:, 0]
np.testing.assert_array_equal(
    counts, [sum(raw.startswith(q, i) for i in range(n)) for q in queries]
)
print("ok")
