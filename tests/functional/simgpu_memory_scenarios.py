"""Programs about memory, of simgpu_scenarios.py."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from ctypes import byref, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from pathlib import Path

from simgpu_driver import (
    HEADER,
    MIB,
    STORE,
    Driver,
)

GIB = 1 << 30


def resident_bytes() -> int:
    """The process's resident set."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def accounting() -> None:
    """Memory comes in granules, is charged, given back, and takes no host memory untouched."""
    cu = Driver()
    context = cu.start()
    free, total = cu.memory()
    assert total == 80 * GIB
    before = resident_bytes()
    big = cu.alloc(70 * GIB)
    assert cu.memory()[0] == free - 70 * GIB
    assert resident_bytes() - before < 64 * MIB
    assert cu.code("cuMemAlloc_v2", byref(c_uint64()), c_size_t(11 * GIB)) == 2
    assert cu.code("cuMemAlloc_v2", byref(c_uint64()), c_size_t(0)) == 1
    small = [cu.alloc(1000) for _ in range(10)]
    assert cu.memory()[0] == free - 70 * GIB - 2 * MIB
    assert len(set(small)) == 10 and all(address % 256 == 0 for address in small)
    for address in [*small, big]:
        cu.cuMemFree_v2(c_uint64(address))
    assert cu.memory()[0] == free
    assert cu.code("cuMemFree_v2", c_uint64(big)) == 1
    cu.alloc(GIB)
    cu.cuCtxDestroy_v2(context)
    cu.start()
    assert cu.memory()[0] == free


def hold() -> None:
    """Holds memory until it is killed; says so on standard output."""
    cu = Driver()
    cu.start()
    cu.alloc(int(sys.argv[2]) * MIB)
    print("holding", flush=True)
    time.sleep(60)


def free_memory() -> None:
    """Prints the card's free MiB."""
    cu = Driver()
    cu.start()
    print(cu.memory()[0] // MIB)


def out_of_memory() -> None:
    """With `argv[2]` MiB free at the most, one MiB more is refused."""
    cu = Driver()
    cu.start()
    free = cu.memory()[0]
    assert free <= int(sys.argv[2]) * MIB
    assert cu.code("cuMemAlloc_v2", byref(c_uint64()), c_size_t(free + MIB)) == 2
    cu.alloc(free)


def copies() -> None:
    """Bytes arrive, also through streams, rows and slices; wrong ranges are refused."""
    cu = Driver()
    cu.start()
    size = 4 * MIB + 12
    address = cu.alloc(size)
    data = os.urandom(size)
    cu.cuMemcpyHtoD_v2(c_uint64(address), data, c_size_t(size))
    back = ctypes.create_string_buffer(size)
    cu.cuMemcpyDtoH_v2(back, c_uint64(address), c_size_t(size))
    assert back.raw == data
    assert cu.code("cuMemcpyHtoD_v2", c_uint64(address + 8), data, c_size_t(size)) == 1
    assert cu.code("cuMemcpyDtoH_v2", back, c_uint64(address - 64 * MIB), c_size_t(4)) == 1
    stream = cu.stream()
    other = cu.alloc(size)
    pinned = c_void_p()
    cu.cuMemHostAlloc(byref(pinned), c_size_t(size), c_uint(0))
    cu.cuMemcpyDtoDAsync_v2(c_uint64(other), c_uint64(address), c_size_t(size), stream)
    cu.cuMemcpyDtoHAsync_v2(pinned, c_uint64(other), c_size_t(size), stream)
    cu.cuStreamSynchronize(stream)
    assert ctypes.string_at(pinned, size) == data
    cu.cuMemsetD32_v2(c_uint64(address), c_uint32(0x01020304), c_size_t(1000))
    cu.cuMemsetD16Async(c_uint64(address + 4), ctypes.c_ushort(0x0506), c_size_t(1), stream)
    cu.cuStreamSynchronize(stream)
    assert cu.read_u32(address, 3) == [0x01020304, 0x01020506, 0x01020304]
    assert cu.code("cuMemsetD32_v2", c_uint64(address + 2), c_uint32(0), c_size_t(1)) == 1
    pitch = c_size_t()
    rows = c_uint64()
    cu.cuMemAllocPitch_v2(byref(rows), byref(pitch), c_size_t(100), c_size_t(7), c_uint(4))
    assert pitch.value >= 100 and pitch.value % 32 == 0
    cu.cuMemsetD2D8_v2(rows, pitch, ctypes.c_ubyte(7), c_size_t(100), c_size_t(7))
    words = cu.read_u32(rows.value + pitch.value, 26)
    assert words[:25] == [0x07070707] * 25 and words[25] == 0
    one, two = cu.alloc(64), cu.alloc(64)
    # A copy may not run from one allocation into its neighbour.
    assert cu.code("cuMemcpyHtoD_v2", c_uint64(min(one, two)), data, c_size_t(2048)) == 1


def virtual_memory() -> None:
    """Reserve at an address, create, map, allow, use, unmap."""
    cu = Driver()
    cu.start()
    free = cu.memory()[0]
    properties = (c_uint32 * 8)(1, 0, 1, 0)  # pinned, no handle type, location: device 0
    granularity = c_size_t()
    cu.cuMemGetAllocationGranularity(byref(granularity), properties, c_uint(0))
    assert granularity.value == 2 * MIB
    wanted = 0x6000_0000_0000
    base = c_uint64()
    cu.cuMemAddressReserve(
        byref(base), c_size_t(64 * MIB), c_size_t(0), c_uint64(wanted), c_uint64(0)
    )
    assert base.value == wanted
    handle, second = c_uint64(), c_uint64()
    cu.cuMemCreate(byref(handle), c_size_t(4 * MIB), properties, c_uint64(0))
    cu.cuMemCreate(byref(second), c_size_t(2 * MIB), properties, c_uint64(0))
    assert cu.memory()[0] == free - 6 * MIB
    cu.cuMemMap(base, c_size_t(4 * MIB), c_size_t(0), handle, c_uint64(0))
    cu.cuMemMap(c_uint64(wanted + 4 * MIB), c_size_t(2 * MIB), c_size_t(0), second, c_uint64(0))
    assert cu.code("cuMemMap", base, c_size_t(2 * MIB), c_size_t(0), second, c_uint64(0)) != 0
    data = os.urandom(6 * MIB)
    assert cu.code("cuMemcpyHtoD_v2", base, data, c_size_t(4)) == 1  # no access yet
    access = (c_uint32 * 3)(1, 0, 3)
    cu.cuMemSetAccess(base, c_size_t(6 * MIB), access, c_size_t(1))
    cu.cuMemcpyHtoD_v2(base, data, c_size_t(6 * MIB))  # over both pieces
    back = ctypes.create_string_buffer(6 * MIB)
    cu.cuMemcpyDtoH_v2(back, base, c_size_t(6 * MIB))
    assert back.raw == data
    function = cu.function(cu.module(HEADER + STORE), "store")
    cu.launch(function, c_uint64(wanted + 5 * MIB), c_uint32(99))
    assert cu.read_u32(wanted + 5 * MIB) == [99]
    flags = c_uint64()
    location = (c_uint32 * 2)(1, 0)
    cu.cuMemGetAccess(byref(flags), location, base)
    assert flags.value == 3
    cu.cuMemRelease(handle)
    assert cu.memory()[0] == free - 6 * MIB  # the mapping keeps it
    cu.cuMemUnmap(base, c_size_t(4 * MIB))
    assert cu.memory()[0] == free - 2 * MIB
    # The same memory at another place keeps what is in it.
    cu.cuMemMap(c_uint64(wanted), c_size_t(2 * MIB), c_size_t(0), second, c_uint64(0))
    cu.cuMemSetAccess(c_uint64(wanted), c_size_t(2 * MIB), access, c_size_t(1))
    assert cu.read_u32(wanted + MIB) == [99]
    for address in (wanted, wanted + 4 * MIB):
        cu.cuMemUnmap(c_uint64(address), c_size_t(2 * MIB))
    cu.cuMemRelease(second)
    cu.cuMemAddressFree(base, c_size_t(64 * MIB))
    assert cu.memory()[0] == free
    fresh = c_uint64()
    cu.cuMemCreate(byref(fresh), c_size_t(2 * MIB), properties, c_uint64(0))
    cu.cuMemAddressReserve(byref(base), c_size_t(2 * MIB), c_size_t(0), c_uint64(0), c_uint64(0))
    cu.cuMemMap(base, c_size_t(2 * MIB), c_size_t(0), fresh, c_uint64(0))
    cu.cuMemSetAccess(base, c_size_t(2 * MIB), access, c_size_t(1))
    assert cu.read_u32(base.value + MIB) == [0]  # somebody's old data is never seen
