"""Loads, stores, moves, asynchronous copies and addresses (9.7.9)."""

from __future__ import annotations

from ..case import Case
from ..formats import is_signed, to_signed, width_of
from ..operands import register_width

TYPES = ("u8", "s8", "b8", "u16", "s16", "b16", "u32", "s32", "b32", "u64", "s64", "b64")
#: How the address of the lane's own memory is written in each space.
SPACES = {
    "global": "{cell}",
    "shared": "{shared}",
    "local": "%own",
    "": "{cell}",
}


def within(space: str, body: str) -> str:
    """A body in a block of its own, with memory of the space."""
    if space != "local":
        return body
    return (
        "{ .local .align 16 .b8 own_memory[32]; .reg .b64 %own; mov.u64 %own, own_memory;\n"
        + body
        + " }"
    )


def dotted(space: str) -> str:
    return f".{space}" if space else ""


def loads_and_stores() -> list[Case]:
    cases = []
    for space, at in SPACES.items():
        s = dotted(space)
        for t in TYPES:
            for width in (16, 32, 64):
                if width < width_of(t):
                    continue

                def load(a: int, t: str = t, width: int = width) -> int:
                    value = a & ((1 << width_of(t)) - 1)
                    if is_signed(t):
                        value = to_signed(value, width_of(t)) & ((1 << width) - 1)
                    return value

                body = f"st{s}.b64 [{at}+8], {{a0}};\nld{s}.{t} {{d0}}, [{at}+8];"
                cases.append(
                    Case(
                        f"ld{s}.{t}", (f"b{width}",), ("b64",), load, within(space, body), count=128
                    )
                )

                def store(a: int, b: int, t: str = t) -> int:
                    mask = (1 << width_of(t)) - 1
                    return b & ~mask | a & mask

                body = (
                    f"st{s}.b64 [{at}], {{a1}};\nst{s}.{t} [{at}], {{a0}};\n"
                    f"ld{s}.b64 {{d0}}, [{at}];"
                )
                cases.append(
                    Case(
                        f"st{s}.{t}",
                        ("b64",),
                        (f"b{width}", "b64"),
                        store,
                        within(space, body),
                        count=128,
                    )
                )
        cases += vectors(space)
    for mods in (
        "volatile.global",
        "relaxed.gpu.global",
        "global.nc",
        "global.cg",
        "global.L1::no_allocate",
    ):
        same = "st.global.u32 [{cell}], {a0};\nld." + mods + ".u32 {d0}, [{cell}];"
        cases.append(Case(f"ld.{mods}.u32", ("u32",), ("u32",), lambda a: a, same, count=128))
    same = "st.global.u32 [{cell}], {a0};\nldu.global.u32 {d0}, [{cell}];"
    cases.append(Case("ldu.global.u32", ("u32",), ("u32",), lambda a: a, same, count=128))
    return cases


def vectors(space: str) -> list[Case]:
    cases = []
    s, at = dotted(space), SPACES[space]
    for n in (2, 4):
        for t in ("b8", "b16", "b32", "b64"):
            if n * width_of(t) > 128:
                continue
            kind = "b16" if t == "b8" else t
            mask = (1 << width_of(t)) - 1
            sources = ", ".join(f"{{a{k}}}" for k in range(n))
            targets = ", ".join(f"{{d{k}}}" for k in range(n))
            body = (
                f"st{s}.v{n}.{t} [{at}+16], {{{sources}}};\n"
                f"ld{s}.v{n}.{t} {{{targets}}}, [{at}+16];"
            )
            reference = lambda *v, mask=mask: tuple(x & mask for x in v)  # noqa: E731
            name = f"st{s}.v{n}.{t}"
            cases.append(
                Case(name, (kind,) * n, (kind,) * n, reference, within(space, body), count=128)
            )
    return cases


def moves() -> list[Case]:
    cases = []
    for t in ("b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64", "pred"):
        cases.append(Case(f"mov.{t}", (t,), (t,), lambda a: a, count=128))
    for whole, part in (
        ("b32", "b16"),
        ("b64", "b32"),
        ("b64", "b16"),
        ("b32", "b8"),
        ("b16", "b8"),
    ):
        n, width = width_of(whole) // width_of(part), width_of(part)
        kind = f"b{register_width(part)}"
        mask = (1 << width) - 1
        sources = ", ".join(f"{{a{k}}}" for k in range(n))
        targets = ", ".join(f"{{d{k}}}" for k in range(n))

        def pack(*v: int, width: int = width, mask: int = mask) -> int:
            return sum((x & mask) << width * k for k, x in enumerate(v))

        def unpack(a: int, n: int = n, width: int = width, mask: int = mask) -> tuple[int, ...]:
            return tuple(a >> width * k & mask for k in range(n))

        cases.append(
            Case(
                f"mov.{whole} pack",
                (whole,),
                (kind,) * n,
                pack,
                f"mov.{whole} {{d0}}, {{{sources}}};",
                count=128,
            )
        )
        cases.append(
            Case(
                f"mov.{whole} unpack",
                (kind,) * n,
                (whole,),
                unpack,
                f"mov.{whole} {{{targets}}}, {{a0}};",
                count=128,
            )
        )
    return cases


def addresses() -> list[Case]:
    """Generic addresses reach the same memory, and tell which space they are of."""
    cases = []
    windows = {
        "global": "cvta.global.u64 %g, {cell};",
        "shared": "cvt.u64.u32 %g, {shared};\ncvta.shared.u64 %g, %g;",
        "local": "cvta.local.u64 %g, %own;",
    }
    for space, make in windows.items():
        at = SPACES[space]
        body = (
            f"{{ .reg .b64 %g, %back; {make}\nst.u32 [%g], {{a0}};\n"
            f"ld.{space}.u32 {{d0}}, [{at}];\n"
            f"cvta.to.{space}.u64 %back, %g;\nadd.u32 {{d1}}, {{a0}}, 1;\n"
            f"st.{space}.u32 [%back], {{d1}};\nld.u32 {{d1}}, [%g];\n"
            + "".join(f"isspacep.{other} {{d{2 + k}}}, %g;\n" for k, other in enumerate(windows))
            + "}"
        )
        tells = tuple(int(other == space) for other in windows)

        def reference(a: int, tells: tuple[int, ...] = tells) -> tuple[int, ...]:
            return (a, (a + 1) & 0xFFFFFFFF, *tells)

        results = ("u32", "u32", "pred", "pred", "pred")
        for name in (f"cvta.{space}.u64", f"cvta.to.{space}.u64", f"isspacep.{space}"):
            cases.append(Case(name, results, ("u32",), reference, within(space, body), count=128))
    return cases


def asynchronous_copies() -> list[Case]:
    """cp.async: `size` bytes, of which those from the source's size on become zero (9.7.9.25.3)."""
    cases = []
    for kind, size in (("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)):
        for source in (None, 0, size // 2, size - 1, size):
            amount = "" if source is None else f", {source}"
            body = (
                "st.global.v2.b64 [{cell}], {{a0}, {a1}};\n"
                "st.shared.v2.b64 [{shared}], {{a2}, {a2}};\n"
                f"cp.async.{kind}.shared.global [{{shared}}], [{{cell}}], {size}{amount};\n"
                "cp.async.commit_group;\ncp.async.wait_group 0;\ncp.async.wait_all;\n"
                "ld.shared.v2.b64 {{d0}, {d1}}, [{shared}];"
            )

            def reference(a: int, b: int, c: int, size=size, source=source) -> tuple[int, int]:
                taken = (1 << 8 * (size if source is None else source)) - 1
                copied = (1 << 8 * size) - 1
                whole = (c | c << 64) & ~copied | (a | b << 64) & taken
                return whole & (1 << 64) - 1, whole >> 64

            name = f"cp.async.{kind}.shared.global {size}{amount}"
            cases.append(Case(name, ("b64", "b64"), ("b64",) * 3, reference, body, count=128))
    return cases


def cases() -> list[Case]:
    return [*loads_and_stores(), *moves(), *addresses(), *asynchronous_copies()]
