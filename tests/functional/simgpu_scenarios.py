"""Programs of the tests of the simulated driver; each runs in a process of its own.

``python simgpu_scenarios.py NAME`` with $SIMGPU_DIRECTORY; an assertion that fails is the failure.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from ctypes import byref, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import simgpu_limit_scenarios as limits
import simgpu_memory_scenarios as memory
from simgpu_driver import (
    ADD,
    AWAIT,
    HEADER,
    MIB,
    PAUSE,
    SAY,
    STORE,
    TRAP,
    CudaError,
    Driver,
)
from simgpu_memory_scenarios import GIB


def streams() -> None:
    """Order in a stream, concurrency between streams, the default streams' rules."""
    cu = Driver()
    cu.start()
    module = cu.module(HEADER + PAUSE + STORE + AWAIT + ADD)
    pause, store = cu.function(module, "pause"), cu.function(module, "store")
    wait, add = cu.function(module, "await"), cu.function(module, "add")
    place = cu.alloc(8)
    cu.write_u32(place, 0, 0)
    first, second, free = cu.stream(), cu.stream(), cu.stream(1)
    # Two streams run at the same time: one waits for what the other does.
    cu.launch(wait, c_uint64(place), stream=first)
    cu.launch(store, c_uint64(place), c_uint32(1), stream=second)
    cu.cuStreamSynchronize(first)
    # In a stream one after the other.
    cu.write_u32(place, 5, 0)
    cu.launch(pause, c_uint64(50_000_000), stream=first)
    for _ in range(100):
        cu.launch(add, c_uint64(place), c_uint32(1), stream=first)
    assert cu.code("cuStreamQuery", first) == 600
    cu.cuStreamSynchronize(first)
    assert cu.read_u32(place) == [105]
    # The legacy stream waits for blocking streams, and they for it; a non-blocking one doesn't.
    cu.launch(pause, c_uint64(80_000_000), stream=first)
    cu.launch(store, c_uint64(place), c_uint32(1), stream=first)
    cu.launch(add, c_uint64(place), c_uint32(10))
    cu.launch(add, c_uint64(place), c_uint32(100), stream=second)
    cu.launch(store, c_uint64(place + 4), c_uint32(7), stream=free)
    cu.cuStreamSynchronize(free)
    assert cu.code("cuStreamQuery", first) == 600
    cu.cuStreamSynchronize(second)
    assert cu.read_u32(place, 2) == [111, 7]
    # Events: order across streams, and time.
    start, end, untimed = cu.event(), cu.event(), cu.event(2)
    assert cu.code("cuEventElapsedTime_v2", byref(ctypes.c_float()), start, end) == 400
    cu.cuEventRecord(start, free)
    cu.launch(pause, c_uint64(60_000_000), stream=free)
    cu.launch(store, c_uint64(place), c_uint32(2), stream=free)
    cu.cuEventRecord(end, free)
    assert cu.code("cuEventQuery", end) == 600
    assert cu.code("cuEventElapsedTime_v2", byref(ctypes.c_float()), start, end) == 600
    cu.cuStreamWaitEvent(second, end, c_uint(0))
    cu.launch(add, c_uint64(place), c_uint32(1), stream=second)
    cu.cuStreamSynchronize(second)
    assert cu.read_u32(place) == [3]
    assert cu.elapsed(start, end) >= 60
    cu.cuEventRecord(untimed, free)
    cu.cuEventSynchronize(untimed)
    assert cu.code("cuEventElapsedTime_v2", byref(ctypes.c_float()), start, untimed) == 400
    # Host functions run in their place.
    seen: list[int] = []
    callback = ctypes.CFUNCTYPE(None, c_void_p)(lambda _: seen.append(len(seen)))
    cu.launch(pause, c_uint64(20_000_000), stream=free)
    cu.cuLaunchHostFunc(free, callback, None)
    assert seen == []
    cu.cuStreamSynchronize(free)
    assert seen == [0]


def threads() -> None:
    """Each thread has a current context and a default stream of its own."""
    cu = Driver()
    context = cu.start()
    module = cu.module(HEADER + PAUSE + ADD)
    add, pause = cu.function(module, "add"), cu.function(module, "pause")
    places = [cu.alloc(4) for _ in range(4)]
    errors: list[BaseException] = []

    def work(place: int) -> None:
        try:
            current = c_void_p()
            cu.cuCtxGetCurrent(byref(current))
            assert not current.value
            assert cu.code("cuMemAlloc_v2", byref(c_uint64()), c_size_t(4)) == 201
            cu.cuCtxSetCurrent(context)
            cu.write_u32(place, 0)
            for _ in range(200):
                cu.launch(add, c_uint64(place), c_uint32(1), stream=2)
            cu.cuStreamSynchronize(c_void_p(2))
            assert cu.read_u32(place) == [200]
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=work, args=(place,)) for place in places]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not errors, errors
    # A thread's own stream is not waited for by another thread's.
    cu.launch(pause, c_uint64(100_000_000), stream=2)
    done: list[float] = []

    def quick() -> None:
        cu.cuCtxSetCurrent(context)
        started = time.monotonic()
        cu.launch(add, c_uint64(places[0]), c_uint32(1), stream=2)
        cu.cuStreamSynchronize(c_void_p(2))
        done.append(time.monotonic() - started)
        done.append(cu.code("cuStreamQuery", c_void_p(2)))

    thread = threading.Thread(target=quick)
    thread.start()
    thread.join()
    assert cu.code("cuStreamQuery", c_void_p(2)) == 600
    assert done[1] == 0


def errors_at_the_call() -> None:
    """What CUDA reports at the call."""
    cu = Driver()
    assert cu.code("cuMemAlloc_v2", byref(c_uint64()), c_size_t(4)) == 3
    assert cu.code("cuInit", c_uint(1)) == 1
    cu.cuInit(c_uint(0))
    assert cu.code("cuDeviceGet", byref(c_int()), c_int(2)) == 101
    assert cu.code("cuDeviceGet", byref(c_int()), c_int(-1)) == 101
    assert cu.code("cuMemAlloc_v2", byref(c_uint64()), c_size_t(4)) == 201
    assert cu.code("cuCtxDestroy_v2", c_void_p(0x1234)) == 201
    context = cu.start()
    place = cu.alloc(4)
    module = cu.module(HEADER + STORE + ".visible .entry empty() { ret; }\n")
    store = cu.function(module, "store")
    arguments = (c_uint64(place), c_uint32(1))
    assert cu.code("cuModuleGetFunction", byref(c_void_p()), module, b"nothing") == 500
    assert cu.code("cuModuleGetGlobal_v2", byref(c_uint64()), None, module, b"nothing") == 500
    assert cu.code("cuModuleGetFunction", byref(c_void_p()), c_void_p(0x1234), b"store") == 400
    for shape in ({"grid": (0, 1, 1)}, {"block": (0, 1, 1)}, {"block": (1025, 1, 1)}):
        assert cu.launch_code(store, *arguments, **shape) == 1, shape
    for shape in ({"block": (1, 1, 65)}, {"block": (32, 32, 2)}, {"grid": (1, 65536, 1)}):
        assert cu.launch_code(store, *arguments, **shape) == 1, shape
    assert cu.launch_code(store, *arguments, shared=48 * 1024 + 1) == 1
    assert cu.launch_code(store, *arguments, shared=48 * 1024) == 0
    assert cu.launch_code(store) == 1  # parameters are missing
    assert cu.launch_code(c_void_p(0x1234), *arguments) == 400
    assert cu.launch_code(store, *arguments, stream=0x1234) == 400
    huge = (1 << 20, 1, 1)
    assert cu.launch_code(store, *arguments, grid=huge, cooperative=True) == 720
    assert cu.code("cuFuncSetAttribute", store, c_int(8), c_int(164 * 1024)) == 1
    cu.cuFuncSetAttribute(store, c_int(8), c_int(100 * 1024))
    assert cu.launch_code(store, *arguments, shared=100 * 1024) == 0
    assert cu.code("cuStreamSynchronize", c_void_p(0x1234)) == 400
    assert cu.code("cuEventRecord", c_void_p(0x1234), None) == 400
    assert cu.code("cuStreamCreate", byref(c_void_p()), c_uint(64)) == 1
    assert cu.code("cuModuleUnload", module) == 0
    assert cu.code("cuModuleUnload", module) == 400
    assert cu.launch_code(store, *arguments) == 400
    assert cu.code("cuModuleLoadData", byref(c_void_p()), b"\x01\x02\x03nonsense") == 200
    assert (
        cu.code("cuModuleLoadData", byref(c_void_p()), HEADER.encode() + b".visible .entry") == 218
    )
    future = b".version 99.0\n.target sm_80\n.address_size 64\n"
    assert cu.code("cuModuleLoadData", byref(c_void_p()), future) == 222
    newer = b".version 8.0\n.target sm_90\n.address_size 64\n"
    assert cu.code("cuModuleLoadData", byref(c_void_p()), newer) in (209, 218)
    assert cu.code("cuModuleLoad", byref(c_void_p()), b"/nowhere/at/all") == 301
    cu.cuCtxDestroy_v2(context)
    assert cu.code("cuMemAlloc_v2", byref(c_uint64()), c_size_t(4)) == 201
    assert cu.code("cuCtxSetCurrent", context) in (201, 709)


def jit_log() -> None:
    """The error log tells line and reason; its size comes back."""
    cu = Driver()
    cu.start()
    log = ctypes.create_string_buffer(4096)
    options = (c_int * 2)(5, 6)
    values = (c_void_p * 2)(ctypes.cast(log, c_void_p), 4096)
    text = HEADER + ".visible .entry broken() {\n  nonsense.u32 %r1;\n  ret;\n}\n"
    assert (
        cu.code("cuModuleLoadDataEx", byref(c_void_p()), text.encode(), 2, options, values) == 218
    )
    message = log.value.decode()
    assert "5" in message and message, message
    assert values[1] in (len(message), len(message) + 1)


def faults() -> None:
    """An access out of bounds is 700, stays with the context, and ends with it."""
    cu = Driver()
    context = cu.start()
    module = cu.module(HEADER + STORE)
    store = cu.function(module, "store")
    place = cu.alloc(1000)
    cu.launch(store, c_uint64(place + 1000), c_uint32(1))  # one past the end
    assert cu.code("cuCtxSynchronize") == 700
    assert cu.code("cuCtxSynchronize") == 700
    assert cu.code("cuMemAlloc_v2", byref(c_uint64()), c_size_t(4)) == 700
    assert cu.launch_code(store, c_uint64(place), c_uint32(1)) == 700
    assert cu.code("cuMemFree_v2", c_uint64(place)) == 700
    cu.cuCtxDestroy_v2(context)
    for ptx, name, arguments, expected in (
        (STORE, "store", (c_uint64(0), c_uint32(1)), 700),
        (TRAP, "stop", (), 719),
    ):
        context = cu.start()
        cu.launch(cu.function(cu.module(HEADER + ptx), name), *arguments)
        assert cu.code("cuCtxSynchronize") == expected
        cu.cuCtxDestroy_v2(context)
    context = cu.start()
    place = cu.alloc(64)
    store = cu.function(cu.module(HEADER + STORE), "store")
    cu.launch(store, c_uint64(place + 2), c_uint32(1))
    assert cu.code("cuCtxSynchronize") == 716
    cu.cuCtxDestroy_v2(context)
    # Freed memory is out of bounds, too.
    context = cu.start()
    place = cu.alloc(64 * MIB)
    cu.cuMemFree_v2(c_uint64(place))
    cu.launch(cu.function(cu.module(HEADER + STORE), "store"), c_uint64(place), c_uint32(1))
    assert cu.code("cuCtxSynchronize") == 700
    cu.cuCtxDestroy_v2(context)
    cu.start()
    place = cu.alloc(4)
    cu.launch(cu.function(cu.module(HEADER + STORE), "store"), c_uint64(place), c_uint32(5))
    assert cu.read_u32(place) == [5]


def primary() -> None:
    """Primary contexts: counted, reset, and their handle known before."""
    cu = Driver()
    cu.cuInit(c_uint(0))
    context, again, flags, active = c_void_p(), c_void_p(), c_uint(), c_int()
    cu.cuDevicePrimaryCtxGetState(c_int(1), byref(flags), byref(active))
    assert active.value == 0
    cu.cuDevicePrimaryCtxRetain(byref(context), c_int(1))
    cu.cuDevicePrimaryCtxRetain(byref(again), c_int(1))
    assert context.value == again.value
    cu.cuCtxSetCurrent(context)
    device = c_int()
    cu.cuCtxGetDevice(byref(device))
    assert device.value == 1
    cu.alloc(GIB)
    cu.cuDevicePrimaryCtxRelease_v2(c_int(1))
    assert cu.memory()[0] <= 79 * GIB
    cu.cuDevicePrimaryCtxRelease_v2(c_int(1))
    cu.cuDevicePrimaryCtxGetState(c_int(1), byref(flags), byref(active))
    assert active.value == 0
    assert cu.code("cuDevicePrimaryCtxRelease_v2", c_int(1)) == 201
    assert cu.code("cuMemAlloc_v2", byref(c_uint64()), c_size_t(4)) == 709
    cu.cuDevicePrimaryCtxRetain(byref(again), c_int(1))
    assert again.value == context.value
    assert cu.memory()[0] == 80 * GIB


def pointers() -> None:
    """Attributes of addresses, in the widths that the real driver writes."""
    cu = Driver()
    context = cu.start()
    address = cu.alloc(4096)
    pinned = c_void_p()
    cu.cuMemHostAlloc(byref(pinned), c_size_t(64), c_uint(0))

    def attribute(kind: int, pointer: int, width: int) -> int:
        guard = (ctypes.c_ubyte * 16)(*[0xAA] * 16)
        cu.cuPointerGetAttribute(guard, c_int(kind), c_uint64(pointer))
        assert bytes(guard[width:]) == b"\xaa" * (16 - width), kind
        return int.from_bytes(bytes(guard[:width]), "little")

    assert attribute(1, address, 8) == context.value
    assert attribute(2, address + 100, 4) == 2
    assert attribute(3, address + 100, 8) == address + 100
    assert attribute(8, address, 4) == 0
    assert attribute(9, address, 4) == 0
    assert attribute(11, address + 100, 8) == address
    assert attribute(12, address + 100, 8) == 4096
    assert attribute(2, pinned.value or 0, 4) == 1
    assert attribute(4, pinned.value or 0, 8) == pinned.value
    assert cu.code("cuPointerGetAttribute", byref(c_uint64()), 2, c_uint64(0x1000)) == 1
    assert cu.code("cuPointerGetAttribute", byref(c_uint64()), 2, c_uint64(address + 4096)) == 1
    kinds = (c_int * 6)(1, 2, 3, 4, 8, 9)
    values = [c_uint64(0xAAAAAAAAAAAAAAAA) for _ in kinds]
    places = (c_void_p * 6)(*[ctypes.cast(ctypes.pointer(v), c_void_p) for v in values])
    cu.cuPointerGetAttributes(c_uint(6), kinds, places, c_uint64(0x1000))
    assert [v.value for v in values] == [
        0,
        0xAAAAAAAA00000000,
        0,
        0,
        0xAAAAAAAA00000000,
        0xAAAAAAAAFFFFFFFE,
    ]
    memory = ctypes.create_string_buffer(8192)
    place = ctypes.addressof(memory)
    cu.cuMemHostRegister_v2(c_void_p(place), c_size_t(8192), c_uint(0))
    assert cu.code("cuMemHostRegister_v2", c_void_p(place), c_size_t(8192), c_uint(0)) == 712
    store = cu.function(cu.module(HEADER + STORE), "store")
    cu.launch(store, c_uint64(place + 8), c_uint32(0x31323334))
    cu.cuCtxSynchronize()
    assert memory.raw[8:12] == b"4321"
    cu.cuMemHostUnregister(c_void_p(place))
    assert cu.code("cuMemHostUnregister", c_void_p(place)) == 713


def linking() -> None:
    """Two texts become one program; what a text lacks is an error when linking ends."""
    cu = Driver()
    cu.start()
    user = HEADER + (
        ".extern .func (.param .b32 r) twice(.param .b32 x);\n"
        ".visible .entry run(.param .u64 address, .param .u32 value) {\n"
        "  .reg .b64 %rd<2>; .reg .b32 %r<3>;\n"
        "  ld.param.u64 %rd1, [address]; ld.param.u32 %r1, [value];\n"
        "  { .param .b32 p; st.param.b32 [p], %r1; .param .b32 q;\n"
        "    call.uni (q), twice, (p); ld.param.b32 %r2, [q]; }\n"
        "  st.global.u32 [%rd1], %r2; ret;\n}\n"
    )
    maker = HEADER + (
        ".visible .func (.param .b32 r) twice(.param .b32 x) {\n"
        "  .reg .b32 %r<3>; ld.param.b32 %r1, [x]; add.u32 %r2, %r1, %r1;\n"
        "  st.param.b32 [r], %r2; ret;\n}\n"
    )

    def link(*texts: str) -> tuple[int, bytes]:
        state, out, size = c_void_p(), c_void_p(), c_size_t()
        cu.cuLinkCreate_v2(c_uint(0), None, None, byref(state))
        for i, text in enumerate(texts):
            data = text.encode()
            name = f"part{i}".encode()
            cu.cuLinkAddData_v2(
                state, c_int(1), data, c_size_t(len(data)), name, c_uint(0), None, None
            )
        code = cu.code("cuLinkComplete", state, byref(out), byref(size))
        image = ctypes.string_at(out, size.value) if code == 0 else b""
        cu.cuLinkDestroy(state)
        return code, image

    assert link(user)[0] != 0
    code, image = link(user, maker)
    assert code == 0
    place = cu.alloc(4)
    cu.launch(cu.function(cu.module(image), "run"), c_uint64(place), c_uint32(21))
    assert cu.read_u32(place) == [42]
    library, kernel, function = c_void_p(), c_void_p(), c_void_p()
    cu.cuLibraryLoadData(byref(library), image, None, None, 0, None, None, 0)
    cu.cuLibraryGetKernel(byref(kernel), library, b"run")
    assert cu.code("cuLibraryGetKernel", byref(c_void_p()), library, b"walk") == 500
    cu.launch(kernel, c_uint64(place), c_uint32(4))  # a CUkernel in a CUfunction's place
    assert cu.read_u32(place) == [8]
    cu.cuKernelGetFunction(byref(function), kernel)
    cu.launch(function, c_uint64(place), c_uint32(5))
    assert cu.read_u32(place) == [10]
    cu.cuLibraryUnload(library)
    assert cu.launch_code(kernel, c_uint64(place), c_uint32(4)) == 400


def device_printf() -> None:
    """Formatted output appears at a synchronisation, behind what the program wrote before."""
    cu = Driver()
    cu.start()
    say = cu.function(cu.module(HEADER + SAY), "say")
    cu.launch(say, c_uint32(42))
    cu.cuCtxSynchronize()
    cu.launch(say, c_uint32(43))
    cu.cuStreamSynchronize(None)


def forked() -> None:
    """A child made by fork() gets NOT_INITIALIZED; the parent goes on."""
    cu = Driver()
    cu.start()
    place = cu.alloc(4)
    store = cu.function(cu.module(HEADER + STORE), "store")
    cu.launch(store, c_uint64(place), c_uint32(1))
    child = os.fork()
    if child == 0:
        right = cu.code("cuInit", c_uint(0)) == 3
        right = right and cu.code("cuMemAlloc_v2", byref(c_uint64()), c_size_t(4)) == 3
        right = right and cu.code("cuCtxSynchronize") == 3
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    cu.launch(store, c_uint64(place), c_uint32(2))
    assert cu.read_u32(place) == [2]


def pause_long() -> None:
    """Holds the card with a kernel that only waits (`argv[2]` milliseconds)."""
    cu = Driver()
    cu.start()
    pause = cu.function(cu.module(HEADER + PAUSE), "pause")
    print("started", flush=True)
    cu.launch(pause, c_uint64(int(sys.argv[2]) * 1_000_000))
    before = time.process_time()
    started = time.monotonic()
    cu.cuCtxSynchronize()
    wall, cpu = time.monotonic() - started, time.process_time() - before
    assert cpu < wall / 2, (cpu, wall)
    print("ended", flush=True)


def small_kernels() -> None:
    """Some small kernels, each waited for."""
    cu = Driver()
    cu.start()
    place = cu.alloc(4)
    cu.write_u32(place, 0)
    add = cu.function(cu.module(HEADER + ADD), "add")
    for _ in range(5):
        cu.launch(add, c_uint64(place), c_uint32(1))
        cu.cuCtxSynchronize()
    assert cu.read_u32(place) == [5]


def devices() -> None:
    """Prints the devices' UUIDs, or the error of cuInit."""
    cu = Driver()
    code = cu.code("cuInit", c_uint(0))
    if code != 0:
        print("error", code)
        return
    count = c_int()
    cu.cuDeviceGetCount(byref(count))
    for i in range(count.value):
        uuid = (ctypes.c_ubyte * 16)()
        cu.cuDeviceGetUuid_v2(uuid, c_int(i))
        print(bytes(uuid).hex())


if __name__ == "__main__":
    try:
        name = sys.argv[1]
        (getattr(memory, name, None) or getattr(limits, name, None) or globals()[name])()
    except CudaError as error:
        sys.exit(f"unexpected {error}")
