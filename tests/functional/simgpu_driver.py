"""The CUDA driver API by ctypes, for tests that speak to the simulated driver directly."""

from __future__ import annotations

import ctypes
import os
from ctypes import byref, c_float, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

MIB = 1 << 20


class CudaError(Exception):
    """A call that did not succeed; ``code`` is its CUresult."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function}: error {code}")
        self.code = code


class Driver:
    """The functions of the libcuda.so.1 in $SIMGPU_DIRECTORY as methods that raise CudaError."""

    def __init__(self) -> None:
        directory = Path(os.environ["SIMGPU_DIRECTORY"])
        self.library = ctypes.CDLL(str(directory / "libcuda.so.1"))

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.library, name)

        def call(*arguments: Any) -> None:
            code = function(*arguments)
            if code != 0:
                raise CudaError(name, code)

        return call

    def code(self, name: str, *arguments: Any) -> int:
        """The CUresult of a call."""
        return int(getattr(self.library, name)(*arguments))

    def start(self, device: int = 0) -> c_void_p:
        """Initialises the driver and makes a context current."""
        self.cuInit(0)
        context = c_void_p()
        self.cuCtxCreate_v2(byref(context), c_uint(0), c_int(device))
        return context

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the current card."""
        free, total = c_size_t(), c_size_t()
        self.cuMemGetInfo_v2(byref(free), byref(total))
        return free.value, total.value

    def alloc(self, size: int) -> int:
        """Device memory of `size` bytes."""
        address = c_uint64()
        self.cuMemAlloc_v2(byref(address), c_size_t(size))
        return address.value

    def module(self, ptx: str | bytes) -> c_void_p:
        """Loads PTX text."""
        module = c_void_p()
        text = ptx.encode() if isinstance(ptx, str) else ptx
        self.cuModuleLoadData(byref(module), text)
        return module

    def function(self, module: c_void_p, name: str) -> c_void_p:
        """A kernel of a module."""
        function = c_void_p()
        self.cuModuleGetFunction(byref(function), module, name.encode())
        return function

    def stream(self, flags: int = 0) -> c_void_p:
        """A new stream; flag 1: it does not wait for the legacy default stream."""
        stream = c_void_p()
        self.cuStreamCreate(byref(stream), c_uint(flags))
        return stream

    def event(self, flags: int = 0) -> c_void_p:
        """A new event."""
        event = c_void_p()
        self.cuEventCreate(byref(event), c_uint(flags))
        return event

    def launch_code(
        self,
        function: c_void_p,
        *arguments: Any,
        grid: tuple[int, int, int] = (1, 1, 1),
        block: tuple[int, int, int] = (1, 1, 1),
        shared: int = 0,
        stream: c_void_p | int | None = None,
        cooperative: bool = False,
    ) -> int:
        """The CUresult of a launch; arguments are ctypes values."""
        pointers = None
        if arguments:
            pointers = (c_void_p * len(arguments))(
                *[ctypes.cast(ctypes.pointer(a), c_void_p) for a in arguments]
            )
        shape = [c_uint(n) for n in (*grid, *block, shared)]
        handle = c_void_p(stream) if isinstance(stream, int) else stream
        if cooperative:
            return self.code("cuLaunchCooperativeKernel", function, *shape, handle, pointers)
        return self.code("cuLaunchKernel", function, *shape, handle, pointers, None)

    def launch(self, function: c_void_p, *arguments: Any, **options: Any) -> None:
        """Launches, and raises CudaError if the call refuses."""
        code = self.launch_code(function, *arguments, **options)
        if code != 0:
            raise CudaError("cuLaunchKernel", code)

    def read_u32(self, address: int, count: int = 1) -> list[int]:
        """Copies 32-bit numbers from the device."""
        buffer = (c_uint32 * count)()
        self.cuMemcpyDtoH_v2(buffer, c_uint64(address), c_size_t(4 * count))
        return list(buffer)

    def write_u32(self, address: int, *values: int) -> None:
        """Copies 32-bit numbers to the device."""
        buffer = (c_uint32 * len(values))(*values)
        self.cuMemcpyHtoD_v2(c_uint64(address), buffer, c_size_t(4 * len(values)))

    def elapsed(self, start: c_void_p, end: c_void_p) -> float:
        """Milliseconds between two recorded events."""
        milliseconds = c_float()
        self.cuEventElapsedTime_v2(byref(milliseconds), start, end)
        return milliseconds.value


HEADER = ".version 8.0\n.target sm_75\n.address_size 64\n"

#: store(address, value)
STORE = """
.visible .entry store(.param .u64 address, .param .u32 value) {
  .reg .b64 %rd<2>; .reg .b32 %r<2>;
  ld.param.u64 %rd1, [address];
  ld.param.u32 %r1, [value];
  st.global.u32 [%rd1], %r1;
  ret;
}
"""

#: add(address, value): adds to the number there, without atomicity
ADD = """
.visible .entry add(.param .u64 address, .param .u32 value) {
  .reg .b64 %rd<2>; .reg .b32 %r<4>;
  ld.param.u64 %rd1, [address];
  ld.param.u32 %r1, [value];
  ld.global.u32 %r2, [%rd1];
  add.u32 %r3, %r2, %r1;
  st.global.u32 [%rd1], %r3;
  ret;
}
"""

#: pause(nanoseconds): waits that long by the device's clock
PAUSE = """
.visible .entry pause(.param .u64 nanoseconds) {
  .reg .b64 %rd<5>; .reg .pred %p<2>;
  ld.param.u64 %rd1, [nanoseconds];
  mov.u64 %rd2, %globaltimer;
LOOP:
  nanosleep.u32 10000;
  mov.u64 %rd3, %globaltimer;
  sub.u64 %rd4, %rd3, %rd2;
  setp.lt.u64 %p1, %rd4, %rd1;
  @%p1 bra LOOP;
  ret;
}
"""

#: await(address): waits until the number there is not 0
AWAIT = """
.visible .entry await(.param .u64 address) {
  .reg .b64 %rd<2>; .reg .b32 %r<2>; .reg .pred %p<2>;
  ld.param.u64 %rd1, [address];
LOOP:
  ld.volatile.global.u32 %r1, [%rd1];
  nanosleep.u32 10000;
  setp.eq.u32 %p1, %r1, 0;
  @%p1 bra LOOP;
  ret;
}
"""

#: spin(): runs for ever
SPIN = """
.visible .entry spin() {
  .reg .b32 %r<2>;
  mov.u32 %r1, 0;
LOOP:
  add.u32 %r1, %r1, 1;
  bra LOOP;
}
"""

#: stuck(): half of a warp waits for the whole of it, which never comes
STUCK = """
.visible .entry stuck() {
  .reg .b32 %r<2>; .reg .pred %p<2>;
  mov.u32 %r1, %tid.x;
  setp.lt.u32 %p1, %r1, 16;
  @%p1 bra LOW;
  bar.sync 1, 64;
  ret;
LOW:
  bar.sync 2, 64;
  ret;
}
"""

#: unwritten(address): hands out shared memory that nothing wrote
UNWRITTEN = """
.visible .entry unwritten(.param .u64 address) {
  .shared .align 4 .b8 place[64];
  .reg .b64 %rd<2>; .reg .b32 %r<2>;
  ld.param.u64 %rd1, [address];
  ld.shared.u32 %r1, [place+8];
  st.global.u32 [%rd1], %r1;
  ret;
}
"""

#: order(address): each block writes its number behind those that were there before; first a counter
ORDER = """
.visible .entry order(.param .u64 address) {
  .reg .b64 %rd<4>; .reg .b32 %r<3>;
  ld.param.u64 %rd1, [address];
  atom.global.add.u32 %r1, [%rd1], 1;
  mul.wide.u32 %rd2, %r1, 4;
  add.u64 %rd3, %rd1, %rd2;
  mov.u32 %r2, %ctaid.x;
  st.global.u32 [%rd3+4], %r2;
  ret;
}
"""

TRAP = """
.visible .entry stop() {
  trap;
  ret;
}
"""

SAY = """
.extern .func (.param .b32 result) vprintf(.param .b64 format, .param .b64 arguments);
.global .align 1 .b8 text[14] = {104, 101, 108, 108, 111, 32, 37, 100, 10, 0};
.visible .entry say(.param .u32 number) {
  .local .align 8 .b8 depot[8];
  .reg .b64 %rd<4>; .reg .b32 %r<3>;
  mov.u64 %rd1, depot;
  cvta.local.u64 %rd2, %rd1;
  ld.param.u32 %r1, [number];
  st.local.u32 [%rd1], %r1;
  mov.u64 %rd3, text;
  cvta.global.u64 %rd3, %rd3;
  {
    .param .b64 param0; st.param.b64 [param0], %rd3;
    .param .b64 param1; st.param.b64 [param1], %rd2;
    .param .b32 retval0;
    call.uni (retval0), vprintf, (param0, param1);
    ld.param.b32 %r2, [retval0];
  }
  ret;
}
"""
