"""Numba: a join of two tables of records by an open hash table (compare and swap), grouped sums and
maxima, a histogram in shared memory, a device reduction."""

import math

import numpy as np
from numba import cuda, float64, int64, types

order_type = np.dtype(
    [("customer", np.int64), ("amount", np.float32), ("count", np.int16), ("kind", np.uint8)],
    align=True,
)
customer_type = np.dtype([("key", np.int64), ("region", np.int32)])
SLOTS = 512
EMPTY = -(1 << 63)


@cuda.jit(device=True)
def mixed(key):
    h = np.uint64(key)
    h ^= h >> np.uint64(33)
    h *= np.uint64(0xFF51AFD7ED558CCD)
    h ^= h >> np.uint64(33)
    return h % np.uint64(SLOTS)


@cuda.jit
def build(customers, keys, values, duplicates):
    i = cuda.grid(1)
    if i >= customers.size:
        return
    key = customers[i].key
    slot = int64(mixed(key))
    while True:
        old = cuda.atomic.cas(keys, slot, EMPTY, key)
        if old == EMPTY:
            values[slot] = customers[i].region
            return
        if old == key:
            cuda.atomic.add(duplicates, 0, 1)
            return
        slot = (slot + 1) % SLOTS


@cuda.jit
def probe(orders, keys, values, totals, largest, kinds, missing):
    """Sums and the largest order of each region, a histogram of kinds, the orders of nobody."""
    local = cuda.shared.array(16, types.uint32)
    if cuda.threadIdx.x < 16:
        local[cuda.threadIdx.x] = 0
    cuda.syncthreads()
    for i in range(cuda.grid(1), orders.size, cuda.gridsize(1)):
        o = orders[i]
        slot = int64(mixed(o.customer))
        while keys[slot] != o.customer and keys[slot] != EMPTY:
            slot = (slot + 1) % SLOTS
        if keys[slot] == EMPTY:
            cuda.atomic.add(missing, 0, 1)
        else:
            price = float64(o.amount) * o.count
            cuda.atomic.add(totals, values[slot], price)
            cuda.atomic.max(largest, values[slot], price)
            cuda.atomic.inc(local, o.kind, 999)
    cuda.syncthreads()
    if cuda.threadIdx.x < 16:
        cuda.atomic.add(kinds, cuda.threadIdx.x, local[cuda.threadIdx.x])


@cuda.reduce
def longest(a, b):
    return max(a, b)


@cuda.jit
def spread(totals, result):
    """The logarithm's standard deviation by one thread, with local memory."""
    logs = cuda.local.array(7, float64)
    mean = 0.0
    for r in range(7):
        logs[r] = math.log1p(totals[r])
        mean += logs[r] / 7
    v = 0.0
    for r in range(7):
        v += (logs[r] - mean) ** 2
    result[0] = math.sqrt(v / 7)


rng = np.random.default_rng(8)
customers = np.zeros(300, customer_type)
customers["key"] = rng.choice(10**12, 300, replace=False) - 5 * 10**11
customers["region"] = rng.integers(0, 7, 300)
customers[-5:] = customers[:5]  # duplicates, of the same region
orders = np.zeros(3000, order_type)
orders["customer"] = rng.choice(customers["key"], 3000)
orders["customer"][::17] = 10**13 + np.arange(len(orders[::17]))  # unknown
orders["amount"] = rng.integers(1, 100000, 3000) / np.float32(
    64
)  # exact in float32 and in their sums
orders["count"] = rng.integers(-3, 50, 3000)
orders["kind"] = rng.integers(0, 16, 3000)

keys = cuda.to_device(np.full(SLOTS, EMPTY, np.int64))
values = cuda.device_array(SLOTS, np.int32)
totals = cuda.to_device(np.zeros(7))
largest = cuda.to_device(np.full(7, -np.inf))
kinds = cuda.to_device(np.zeros(16, np.uint32))
counters = cuda.to_device(np.zeros(2, np.int32))
build[5, 64](cuda.to_device(customers), keys, values, counters[:1])
orders_d = cuda.to_device(orders)
probe[6, 128](orders_d, keys, values, totals, largest, kinds, counters[1:])
result = cuda.device_array(1)
spread[1, 1](totals, result)

region = dict(zip(customers["key"].tolist(), customers["region"].tolist(), strict=True))
want, top, histogram, unknown = np.zeros(7), np.full(7, -np.inf), np.zeros(16, int), 0
for o in orders:
    r = region.get(int(o["customer"]))
    if r is None:
        unknown += 1
        continue
    price = float(o["amount"]) * int(o["count"])
    want[r] += price
    top[r] = max(top[r], price)
    histogram[o["kind"]] += 1
np.testing.assert_array_equal(totals.copy_to_host(), want)  # multiples of 1/64: exact in any order
np.testing.assert_array_equal(largest.copy_to_host(), top)
np.testing.assert_array_equal(kinds.copy_to_host(), histogram)
assert counters.copy_to_host().tolist() == [5, unknown]
assert unknown == len(orders[::17])
assert longest(largest, init=-np.inf) == top.max()
np.testing.assert_allclose(result.copy_to_host()[0], np.log1p(want).std(), rtol=1e-12)
back = orders_d.copy_to_host()
assert back.dtype == order_type and (back == orders).all()
print("ok")
