"""Programs about limits and what is beyond them (of a context, of a card, of time, of what CUDA
defines), of simgpu_scenarios.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from ctypes import byref, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p

from simgpu_driver import ADD, HEADER, MIB, ORDER, SAY, SPIN, STORE, STUCK, UNWRITTEN, Driver

GIB = 1 << 30


def endless() -> None:
    """A kernel that runs for ever is stopped by the machine's limit, 702; its context has ended."""
    cu = Driver()
    context = cu.start()
    cu.launch(cu.function(cu.module(HEADER + SPIN), "spin"))
    assert cu.code("cuCtxSynchronize") == 702
    assert cu.code("cuMemAlloc_v2", byref(c_uint64()), c_size_t(4)) == 702
    cu.cuCtxDestroy_v2(context)
    cu.start()
    place = cu.alloc(4)
    cu.launch(cu.function(cu.module(HEADER + STORE), "store"), c_uint64(place), c_uint32(9))
    assert cu.read_u32(place) == [9]


def stuck() -> None:
    """Threads that wait for each other for ever: 719 instead of a hang."""
    cu = Driver()
    cu.start()
    cu.launch(cu.function(cu.module(HEADER + STUCK), "stuck"), block=(32, 1, 1))
    assert cu.code("cuCtxSynchronize") == 719


def unwritten() -> None:
    """Prints what a read of unwritten shared memory ends with."""
    cu = Driver()
    cu.start()
    function = cu.function(cu.module(HEADER + UNWRITTEN), "unwritten")
    cu.launch(function, c_uint64(cu.alloc(4)))
    print(cu.code("cuCtxSynchronize"))


def unwritten_global() -> None:
    """In strict mode a kernel does not read device memory that nothing has written."""
    cu = Driver()
    cu.cuInit(0)

    def code_after(prepare: Callable[[int, int], None]) -> int:
        context = cu.start()
        place, other = cu.alloc(8), cu.alloc(8)
        prepare(place, other)
        cu.launch(cu.function(cu.module(HEADER + ADD), "add"), c_uint64(place), c_uint32(1))
        code = cu.code("cuCtxSynchronize")
        cu.cuCtxDestroy_v2(context)
        return code

    def copied(place: int, other: int) -> None:
        cu.cuMemcpyDtoD_v2(c_uint64(place), c_uint64(other), c_size_t(8))

    def written_and_copied(place: int, other: int) -> None:
        cu.write_u32(other, 1, 2)
        copied(place, other)

    def stored(place: int, _: int) -> None:
        store = cu.function(cu.module(HEADER + STORE), "store")
        cu.launch(store, c_uint64(place), c_uint32(1))

    def set_in_part(place: int, _: int) -> None:
        cu.cuMemsetD8_v2(c_uint64(place), c_uint(1), c_size_t(3))

    def set_whole(place: int, _: int) -> None:
        cu.cuMemsetD32_v2(c_uint64(place), c_uint32(1), c_size_t(1))

    assert code_after(lambda *_: None) == 719
    assert code_after(lambda place, _: cu.write_u32(place, 1)) == 0
    assert code_after(lambda place, _: cu.write_u32(place + 4, 1)) == 719
    assert code_after(copied) == 719
    assert code_after(written_and_copied) == 0
    assert code_after(stored) == 0
    assert code_after(set_in_part) == 719
    assert code_after(set_whole) == 0


def counted() -> None:
    """A kernel of 3 blocks of 48 threads, 4 instructions each."""
    cu = Driver()
    cu.start()
    store = cu.function(cu.module(HEADER + STORE), "store")
    cu.launch(store, c_uint64(cu.alloc(4)), c_uint32(1), grid=(3, 1, 1), block=(48, 1, 1))
    cu.cuCtxSynchronize()


def order() -> None:
    """Prints the order in which 40 blocks ran."""
    cu = Driver()
    cu.start()
    place = cu.alloc(4 * 41)
    cu.write_u32(place, 0)
    function = cu.function(cu.module(HEADER + ORDER), "order")
    cu.launch(function, c_uint64(place), grid=(40, 1, 1))
    print(*cu.read_u32(place + 4, 40))


def capability() -> None:
    """What a card of compute capability `argv[2]` has, and what it launches."""
    major, minor = map(int, sys.argv[2].split("."))
    # CUDA programming guide, technical specifications per compute capability: shared memory of a
    # block (KiB), threads and blocks of a multiprocessor.
    shared, threads, blocks = {
        "7.5": (64, 1024, 16),
        "8.0": (163, 2048, 32),
        "8.6": (99, 1536, 16),
    }[sys.argv[2]]
    cu = Driver()
    cu.start()

    def attribute(number: int) -> int:
        value = c_int()
        cu.cuDeviceGetAttribute(byref(value), c_int(number), c_int(0))
        return value.value

    assert (attribute(75), attribute(76)) == (major, minor)
    assert (attribute(97), attribute(39), attribute(106)) == (shared * 1024, threads, blocks)
    store = cu.function(cu.module(HEADER + STORE), "store")
    arguments = (c_uint64(cu.alloc(4)), c_uint32(1))
    assert cu.code("cuFuncSetAttribute", store, c_int(8), c_int(shared * 1024 + 1)) == 1
    cu.cuFuncSetAttribute(store, c_int(8), c_int(shared * 1024))
    assert cu.launch_code(store, *arguments, shared=shared * 1024) == 0
    assert cu.launch_code(store, *arguments, shared=shared * 1024 + 1) == 1
    resident = c_int()
    cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(byref(resident), store, c_int(32), c_size_t(0))
    assert resident.value == min(blocks, threads // 32)
    cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(byref(resident), store, c_int(512), c_size_t(0))
    assert resident.value == threads // 512
    all_of_them = (attribute(16) * blocks, 1, 1)
    one_more = (attribute(16) * blocks + 1, 1, 1)
    assert cu.launch_code(store, *arguments, grid=all_of_them, cooperative=True) == 0
    assert cu.launch_code(store, *arguments, grid=one_more, cooperative=True) == 720
    cu.cuCtxSynchronize()
    for target in (75, 80, 86):
        text = HEADER.replace("sm_75", f"sm_{target}") + STORE
        code = cu.code("cuModuleLoadData", byref(c_void_p()), text.encode())
        assert (code == 0) == (target <= 10 * major + minor), (target, code)
    persisting = cu.code("cuCtxSetLimit", c_int(6), c_size_t(0))
    assert persisting == (215 if major < 8 else 0)


def limits() -> None:
    """What cuCtxSetLimit takes, and until when."""
    cu = Driver()
    context = cu.start()

    def limit(number: int) -> int:
        value = c_size_t()
        cu.cuCtxGetLimit(byref(value), c_int(number))
        return value.value

    def set_limit(number: int, value: int) -> int:
        return cu.code("cuCtxSetLimit", c_int(number), c_size_t(value))

    stack, output, heap = 0, 1, 2
    assert [limit(number) for number in (stack, output, heap)] == [1024, MIB, 8 * MIB]
    assert set_limit(stack, 100_000) == 0 and 100_000 <= limit(stack) < 100_100
    assert set_limit(stack, MIB) == 1
    assert set_limit(10, 1) == 1 and set_limit(-1, 1) == 1
    assert set_limit(7, 1) == 215 and limit(7) == 0
    assert cu.code("cuCtxGetLimit", None, c_int(0)) == 1
    say = cu.function(cu.module(HEADER + SAY), "say")
    store = cu.function(cu.module(HEADER + STORE), "store")
    before = cu.memory()[0]
    assert set_limit(output, 64 * MIB) == 0 and limit(output) == 64 * MIB
    cu.launch(store, c_uint64(cu.alloc(4)), c_uint32(1))
    assert set_limit(output, 32 * MIB) == 0  # nothing has printed yet
    cu.launch(say, c_uint32(1))
    assert set_limit(output, 64 * MIB) == 1 and limit(output) == 32 * MIB
    assert set_limit(heap, 16 * MIB) == 0
    cu.cuCtxSynchronize()
    assert 32 * MIB <= before - cu.memory()[0] <= 36 * MIB  # the card's memory
    cu.cuCtxDestroy_v2(context)
    # A graph needs it when it is launched, not when it is made.
    context = cu.start()
    say = cu.function(cu.module(HEADER + SAY), "say")
    stream, graph, executable = cu.stream(1), c_void_p(), c_void_p()
    cu.cuStreamBeginCapture_v2(stream, c_int(0))
    cu.launch(say, c_uint32(4), stream=stream)
    cu.cuStreamEndCapture(stream, byref(graph))
    cu.cuGraphInstantiateWithFlags(byref(executable), graph, c_uint64(0))
    assert set_limit(output, 2 * MIB) == 0
    cu.cuGraphLaunch(executable, stream)
    assert set_limit(output, 3 * MIB) == 1 and limit(output) == 2 * MIB
    cu.cuCtxDestroy_v2(context)
    # More than the card has: known when it is needed, and told at the launch.
    context = cu.start()
    assert limit(output) == MIB
    say = cu.function(cu.module(HEADER + SAY), "say")
    assert set_limit(output, 100 * GIB) == 0
    assert cu.launch_code(say, c_uint32(2)) == 2
    assert set_limit(output, 0) == 0 and limit(output) >= 4096
    assert cu.launch_code(say, c_uint32(3)) == 0
    cu.cuCtxDestroy_v2(context)
