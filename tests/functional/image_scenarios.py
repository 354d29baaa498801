"""Device code that no compiler made: each ends in an error code or in success, with bounded memory.

``python image_scenarios.py NAME`` with the libcuda.so.1 that the loader finds, the simulated
driver's or the client's; an assertion that fails is the failure.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import mmap
import resource
import struct
import sys
from collections.abc import Callable, Iterator
from ctypes import byref, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p

MIB = 1 << 20
HUGE = 100 * MIB
HEAD = b".version 8.0\n.target sm_75\n.address_size 64\n"
SUCCESS, NOT_SUPPORTED = 0, 801
PTX, CUBIN = 1, 2
LZ4, ZSTD = 0x2000, 0x8000


def store(name: str, value: int) -> bytes:
    """A kernel that writes a number to the address that it is given."""
    return (
        f".visible .entry {name}(.param .u64 p) {{\n  .reg .b64 %a;\n  ld.param.u64 %a, [p];\n"
        f"  st.global.u32 [%a], {value};\n  ret;\n}}\n"
    ).encode()


class Cuda:
    """The driver, with a context; calls give their CUresult."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        assert self.library.cuInit(0) == SUCCESS
        assert self.library.cuCtxCreate_v2(byref(c_void_p()), c_uint(0), c_int(0)) == SUCCESS
        address = c_uint64()
        assert self.library.cuMemAlloc_v2(byref(address), c_size_t(4)) == SUCCESS
        self.address = address
        self.good()

    def load(self, image: bytes | c_void_p) -> tuple[int, c_void_p]:
        module = c_void_p()
        return int(self.library.cuModuleLoadData(byref(module), image)), module

    def unload(self, module: c_void_p) -> None:
        assert self.library.cuModuleUnload(module) == SUCCESS

    def function(self, module: c_void_p, name: str) -> tuple[int, c_void_p]:
        function = c_void_p()
        code = self.library.cuModuleGetFunction(byref(function), module, name.encode())
        return int(code), function

    def launch(self, function: c_void_p) -> int:
        """Of one thread, with a number's address; the CUresult of the first call that fails."""
        arguments = (c_void_p * 1)(ctypes.cast(ctypes.pointer(self.address), c_void_p))
        one = [c_uint(1)] * 6
        code = self.library.cuLaunchKernel(function, *one, c_uint(0), None, arguments, None)
        return int(code) or int(self.library.cuCtxSynchronize())

    def value(self) -> int:
        number = c_uint32()
        assert self.library.cuMemcpyDtoH_v2(byref(number), self.address, c_size_t(4)) == SUCCESS
        return number.value

    def check(self, module: c_void_p, name: str, value: int) -> None:
        """The kernel writes this number."""
        code, function = self.function(module, name)
        assert code == SUCCESS, (name, code)
        code = self.launch(function)
        assert code == SUCCESS, (name, code)
        assert self.value() == value, (name, self.value())

    def good(self) -> None:
        """What is right is loaded and runs."""
        code, module = self.load(HEAD + store("good", 4711))
        assert code == SUCCESS, code
        self.check(module, "good", 4711)
        self.unload(module)

    def survives(self, image: bytes | c_void_p, what: object) -> int:
        """Whatever becomes of the image, the context goes on."""
        code, module = self.load(image)
        assert 0 <= code < 1000, (what, code)
        if code == SUCCESS:
            self.unload(module)
        return code


class Edge:
    """Memory behind which there is none: who reads too far ends by a signal."""

    def __init__(self, room: int) -> None:
        page = mmap.PAGESIZE
        self.bytes = (room + page - 1) // page * page
        self.memory = mmap.mmap(-1, self.bytes + page)
        self.begin = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        libc = ctypes.CDLL(ctypes.util.find_library("c"))
        assert libc.mprotect(c_void_p(self.begin + self.bytes), c_size_t(page), c_int(0)) == 0

    def put(self, data: bytes) -> c_void_p:
        """A copy that ends where memory does."""
        at = self.bytes - len(data)
        self.memory[at : self.bytes] = data
        return c_void_p(self.begin + at)


def entry(kind: int, payload: bytes, flags: int = 0, raw: int = 0, architecture: int = 75) -> bytes:
    """One entry of a fat binary, as nvcc lays it out."""
    compressed = len(payload) if flags else 0
    payload += bytes(-len(payload) % 8)
    return (
        struct.pack("<HHIQ", kind, 0x0101, 64, len(payload))
        + struct.pack("<IIHHI", compressed, 0, 3, 7, architecture)
        + struct.pack("<IIQQQ", 0, 0, 0x11 | flags, 0, raw)
        + payload
    )


def fatbin(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def zstd_of_one_byte(byte: bytes, count: int) -> bytes:
    """A zstd frame of `count` times the byte: blocks of 128 KiB that are run lengths."""
    frame = struct.pack("<IBQ", 0xFD2FB528, 0xE0, count)
    while count > 0:
        size = min(count, 128 * 1024)
        count -= size
        frame += struct.pack("<I", (count == 0) | 1 << 1 | size << 3)[:3] + byte
    return frame


def lz4_of_one_byte(byte: bytes, count: int) -> bytes:
    """An LZ4 block of `count` times the byte: one literal, a match that repeats it, 5 literals."""
    match = count - 6 - 4 - 15
    return (
        b"\x1f" + byte + struct.pack("<H", 1) + b"\xff" * (match // 255) + bytes([match % 255])
        + b"\x50" + byte * 5
    )  # fmt: skip


def unknown_opcode() -> None:
    """Refused where it is used, and nothing else of the module."""
    cuda = Cuda()
    strange = b".visible .entry strange(.param .u64 p) {\n  frobnicate.u32 1;\n  ret;\n}\n"
    code, module = cuda.load(HEAD.replace(b"8.0", b"9.3") + strange + store("plain", 3))
    if code == SUCCESS:
        cuda.check(module, "plain", 3)
        code, function = cuda.function(module, "strange")
        assert code or cuda.launch(function) == NOT_SUPPORTED
        cuda.check(module, "plain", 3)
    assert cuda.survives(HEAD + strange, "unknown") != SUCCESS
    known = b".visible .entry k() { wgmma.fence.sync.aligned; ret; }\n"
    assert cuda.survives(HEAD + known, "of another GPU") in (SUCCESS, NOT_SUPPORTED)
    cuda.good()


def truncated() -> None:
    """A text cut off behind each of its bytes, with and without the NUL that ends it."""
    cuda = Cuda()
    text = (
        HEAD
        + b".visible .global .align 8 .u64 table[2] = {f, 0};\n.const .f32 c = 0f3F800000;\n"
        + b".extern .func (.param .b32 r) vprintf(.param .b64 a, .param .b64 b);\n"
        + b".visible .func f(.param .b32 x) { .reg .b32 %r<3>; ld.param.b32 %r1, [x]; // word\n"
        + b"  add.s32 %r2, %r1, (1 + 2) * 3; ret; }\n"
        + store("k", 9)
    )
    edge = Edge(len(text) + 1)
    worked = 0
    for length in range(len(text) + 1):
        worked += cuda.survives(edge.put(text[:length] + b"\0"), length) == SUCCESS
    assert worked > 1
    for length in range(0, len(text), 7):
        code = cuda.survives(edge.put(text[:length]), ("without an end", length))
        assert code != SUCCESS or length % mmap.PAGESIZE == 0
    cuda.good()


VALUES = (0, 1, 7, 15, 16, 17, 63, 64, 65, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF)
VALUES += (1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 16, (1 << 64) - 1)


def changed_fields(image: bytes, headers: Iterator[tuple[int, int]]) -> Iterator[bytes]:
    """The image with each field of its headers (offset, bytes) changed in every way."""
    for at, size in headers:
        old = int.from_bytes(image[at : at + size], "little")
        for value in {*VALUES, old + 1, old - 1, old * 2, len(image), len(image) - at}:
            field = (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")
            yield image[:at] + field + image[at + size :]


def wrong_fatbins() -> None:
    """Each field of each header wrong, and the file cut off behind each byte of the headers."""
    cuda = Cuda()
    text = HEAD + store("k", 9)
    packed = zstd_of_one_byte(b" ", 70000)
    parts = [
        entry(PTX, text, architecture=70),
        entry(PTX, packed, ZSTD, 70000, architecture=60),
        entry(PTX, lz4_of_one_byte(b"\n", 80000), LZ4, 80000, architecture=50),
        entry(CUBIN, b"\x7fELF" + bytes(100), architecture=90),
    ]
    image = fatbin(*parts)
    code, module = cuda.load(image)
    assert code == SUCCESS, code
    cuda.check(module, "k", 9)
    fields = [(0, 4), (4, 2), (6, 2), (8, 8)]
    at = 16
    for part in parts:
        sizes = (2, 2, 4, 8, 4, 4, 2, 2, 4, 4, 4, 8, 8, 8)
        offset = at
        for size in sizes:
            fields.append((offset, size))
            offset += size
        at += len(part)
    edge = Edge(len(image))
    worked = sum(
        cuda.survives(edge.put(changed), number) == SUCCESS
        for number, changed in enumerate(changed_fields(image, iter(fields)))
    )
    assert worked > 10
    for length in range(16, len(image), 3):
        cuda.survives(edge.put(image[:length]), length)
    cuda.good()


def wrong_cubins() -> None:
    """Cubins with each field of the ELF header wrong."""
    cuda = Cuda()
    ident = b"\x7fELF\2\1\1\x33\7" + bytes(7)
    header = ident + struct.pack("<HHIQQQI", 2, 190, 125, 0, 64, 64 + 56, 0x4B054B)
    header += struct.pack("<HHHHHH", 64, 56, 1, 64, 2, 1)
    strings = struct.pack("<IIQQQQIIQQ", 1, 3, 0, 0, 300, 8, 0, 0, 1, 0)
    image = header + bytes(56) + bytes(64) + strings
    image += bytes(400 - len(image))
    sizes = (2, 2, 4, 8, 8, 8, 4, 2, 2, 2, 2, 2, 2)
    fields = []
    at = 16
    for size in sizes:
        fields.append((at, size))
        at += size
    fields += [(at, 8) for at in range(64, 64 + 56 + 128, 8)]
    edge = Edge(len(image))
    for number, changed in enumerate(changed_fields(image, iter(fields))):
        assert cuda.survives(edge.put(changed), number) != SUCCESS
    cuda.good()


def bombs() -> None:
    """Some kilobytes that claim to be, or are, far more."""
    cuda = Cuda()
    size = 255 * MIB
    bombs = {
        "zstd": entry(PTX, zstd_of_one_byte(b" ", size), ZSTD, size),
        "zstd, of NULs": entry(PTX, zstd_of_one_byte(b"\0", size), ZSTD, size),
        "zstd, beyond the limit": entry(PTX, zstd_of_one_byte(b" ", 1 << 40 >> 7), ZSTD, 1 << 33),
        "zstd, of which no byte is there": entry(PTX, b"\x28\xb5\x2f\xfd", ZSTD, size),
        "zstd, longer than it says": entry(PTX, zstd_of_one_byte(b" ", size), ZSTD, 100),
        "lz4": entry(PTX, lz4_of_one_byte(b" ", 64 * MIB), LZ4, 64 * MIB),
        "lz4, longer than it says": entry(PTX, lz4_of_one_byte(b" ", 64 * MIB), LZ4, 100),
        "lz4, shorter than it says": entry(PTX, lz4_of_one_byte(b" ", 1 * MIB), LZ4, 255 * MIB),
    }
    for what, bomb in bombs.items():
        assert cuda.survives(fatbin(bomb), what) != SUCCESS, what
    one = entry(PTX, zstd_of_one_byte(b" ", 16 * MIB), ZSTD, 16 * MIB, architecture=0)
    assert cuda.survives(fatbin(*[one] * 500), "many") != SUCCESS
    # Elements far apart take memory where they are, and that is the device's.
    apart = b".global .b8 a%d[2][1073741823] = {{1}, {2}};\n"
    text = HEAD + b"".join(apart % number for number in range(1000)) + store("k", 1)
    assert cuda.survives(text, "initialisers") != SUCCESS
    cuda.good()


def huge_texts() -> None:
    """100 MB that are right, and 100 MB that are not."""
    cuda = Cuda()
    padding = b"// nothing to see in this line, nor in the next ones, and there are many of them\n"
    text = HEAD + padding * (HUGE // len(padding)) + store("k", 5)
    code, module = cuda.load(text)
    assert 0 <= code < 1000
    if code == SUCCESS:
        cuda.check(module, "k", 5)
        cuda.unload(module)
    line = b"  add.s32 %r1, %r1, 1;\n"
    loop = b".visible .entry k(.param .u64 p) {\n  .reg .b32 %r<2>; .reg .b64 %a;\n"
    loop += b"  ld.param.u64 %a, [p];\n  mov.u32 %r1, 0;\n"
    count = (8 * MIB) // len(line)
    text = HEAD + loop + line * count + b"  st.global.u32 [%a], %r1;\n  ret;\n}\n"
    code, module = cuda.load(text)
    assert code == SUCCESS
    cuda.check(module, "k", count)
    cuda.unload(module)
    garbage = {
        "words": b"add.s32 %r1, %r1, 1;\n" * (HUGE // 22),
        "a word": b"a" * HUGE,
        "braces": b"{" * HUGE,
        "brackets": b".global .b8 a" + b"[" * HUGE,
        "numbers": b".global .b8 a[] = {" + b"1," * (HUGE // 2),
        "a number": b".global .b8 a[" + b"9" * HUGE + b"];",
        "dots": b"." * HUGE,
        "a comment": b"/*" + b"*" * HUGE,
        "a string": b'.file 1 "' + b"x" * HUGE,
        "parameters": b".entry k(" + b".param .u64 p," * (HUGE // 14),
        "names that nothing defines": b".extern .func f;\n" * (HUGE // 17),
    }
    for what, text in garbage.items():
        code = cuda.survives(HEAD + text, what)
        assert code != SUCCESS or what == "names that nothing defines", what
    cuda.survives(bytes(range(1, 256)) * (HUGE // 255), "bytes")
    cuda.good()


def many_functions() -> None:
    """10,000 kernels, functions and variables in one module: each is found and is the right one."""
    cuda = Cuda()
    count = 10_000
    text = HEAD + b"".join(store(f"kernel_{number}", number) for number in range(count))
    code, module = cuda.load(text)
    assert code == SUCCESS
    handles = set()
    for number in range(count):
        code, function = cuda.function(module, f"kernel_{number}")
        assert code == SUCCESS, (number, code)
        handles.add(function.value)
    assert len(handles) == count
    for number in (0, 1, count // 2, count - 1):
        cuda.check(module, f"kernel_{number}", number)
    cuda.unload(module)

    names = [f"f{number}" for number in range(count)]
    functions = "".join(
        f".func (.param .b32 r) {name}(.param .b32 x) {{ .reg .b32 %r<3>; ld.param.b32 %r1, [x];\n"
        f"  add.s32 %r2, %r1, {number}; st.param.b32 [r], %r2; ret; }}\n"
        for number, name in enumerate(names)
    )
    variables = "".join(f".visible .global .u32 v{number} = {number};\n" for number in range(count))
    unused = "".join(f".extern .func unused_{number}(.param .b32 x);\n" for number in range(count))
    table = f".global .u64 table[{count}] = {{{', '.join(names)}}};\n"
    calls = "".join(
        "  { .param .b32 a; .param .b32 b; st.param.b32 [a], %r1;\n"
        f"  call (b), {name}, (a); ld.param.b32 %r1, [b]; }}\n"
        for name in names
    )
    kernels = f""".visible .entry all(.param .u64 p) {{
  .reg .b32 %r<2>; .reg .b64 %a;
  ld.param.u64 %a, [p];
  mov.u32 %r1, 0;
{calls}
  st.global.u32 [%a], %r1;
  ret;
}}
.visible .entry last(.param .u64 p) {{
  .reg .b32 %r<3>; .reg .b64 %a, %t;
  ld.param.u64 %a, [p];
  ld.global.u64 %t, [table+{8 * (count - 1)}];
  mov.u32 %r1, 5;
  {{
    .param .b32 a; .param .b32 b;
    st.param.b32 [a], %r1;
    prototype: .callprototype (.param .b32 _) _ (.param .b32 _);
    call (b), %t, (a), prototype;
    ld.param.b32 %r2, [b];
  }}
  st.global.u32 [%a], %r2;
  ret;
}}
"""
    code, module = cuda.load(HEAD + (unused + functions + variables + table + kernels).encode())
    assert code == SUCCESS, code
    cuda.check(module, "all", count * (count - 1) // 2)
    cuda.check(module, "last", count - 1 + 5)
    for number in range(0, count, 97):
        address, size = c_uint64(), c_size_t()
        name = f"v{number}".encode()
        code = cuda.library.cuModuleGetGlobal_v2(byref(address), byref(size), module, name)
        assert (code, size.value) == (SUCCESS, 4), (number, code)
        found = c_uint32()
        assert cuda.library.cuMemcpyDtoH_v2(byref(found), address, c_size_t(4)) == SUCCESS
        assert found.value == number
    cuda.unload(module)
    cuda.good()


SCENARIOS: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        unknown_opcode,
        truncated,
        wrong_fatbins,
        wrong_cubins,
        bombs,
        huge_texts,
        many_functions,
    )
}


def main() -> int:
    SCENARIOS[sys.argv[1]]()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"ok, at most {peak} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
