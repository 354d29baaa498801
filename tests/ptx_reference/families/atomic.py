"""atom and red: each lane on memory of its own, and a warp on shared cells (9.7.13)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..arithmetic import Arithmetic
from ..case import Case, Expected
from ..formats import FORMATS, integer, wrap
from .half import both

Update = Callable[[int, int], Expected]


def integers(t: str) -> dict[str, Update]:
    def on(function: Callable[[int, int], int]) -> Update:
        return lambda a, b: wrap(t, function(integer(t, a), integer(t, b)))

    return {"add": on(lambda a, b: a + b), "min": on(min), "max": on(max)}


BITS: dict[str, Update] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "exch": lambda a, b: b,
}
COUNTERS: dict[str, Update] = {
    "inc": lambda a, b: 0 if a >= b else a + 1,
    "dec": lambda a, b: b if a == 0 or a > b else a - 1,
}


#: What memory holds of the types that are no integers.
MEMORY = {"f64": "b64", "f32": "b32", "f16": "b16", "bf16": "b16", "f16x2": "b32", "bf16x2": "b32"}


def updates(space: str) -> list[tuple[str, str, Update]]:
    """(operation, type, new value from the old one and the operand)."""
    found = [(o, t, f) for t in ("u32", "s32", "u64", "s64") for o, f in integers(t).items()]
    found = [u for u in found if u[:2] != ("add", "s64")]  # the ISA has no signed 64-bit add
    found += [(o, t, f) for t in ("b32", "b64") for o, f in BITS.items()]
    found += [(o, "u32", f) for o, f in COUNTERS.items()]
    found.append(("exch", "b16", BITS["exch"]))
    # f32 flushes subnormal numbers in global memory and keeps them in shared memory.
    found.append(("add", "f32", Arithmetic(FORMATS["f32"], ftz=space == "global").add))
    found.append(("add", "f64", Arithmetic(FORMATS["f64"]).add))
    for half in ("f16", "bf16"):
        add = Arithmetic(FORMATS[half]).add
        found += [("add.noftz", half, add), ("add.noftz", f"{half}x2", both(add))]
    return found


def single() -> list[Case]:
    cases = []
    for space, at in (("global", "{cell}"), ("shared", "{shared}"), ("", "{cell}")):
        s = f".{space}" if space else ""
        for operation, t, update in updates(space or "global"):
            if t == "f32" and not space:
                continue  # which rule a generic address follows is left open
            memory = MEMORY.get(t) or f"b{t[1:]}"
            for opcode in ("atom", "red"):
                if opcode == "red" and operation == "exch":
                    continue
                name = f"{opcode}{s}.{operation}.{t}"
                target = "{d0}, " if opcode == "atom" else ""
                other = "" if opcode == "atom" else f"mov.{memory} {{d0}}, {{a0}};\n"
                body = (
                    f"st{s}.{memory} [{at}], {{a0}};\n{other}{name} {target}[{at}], {{a1}};\n"
                    f"ld{s}.{memory} {{d1}}, [{at}];"
                )
                reference = lambda a, b, f=update: (a, f(a, b))  # noqa: E731
                cases.append(Case(name, (t, t), (t, t), reference, body))
        for t in ("b16", "b32", "b64"):
            name = f"atom{s}.cas.{t}"
            body = (
                f"st{s}.{t} [{at}], {{a0}};\n{name} {{d0}}, [{at}], {{a1}}, {{a2}};\n"
                f"ld{s}.{t} {{d1}}, [{at}];"
            )
            reference = lambda a, b, c: (a, c if a == b else a)  # noqa: E731
            cases.append(Case(name, (t, t), (t, t, t), reference, body))
    return cases


def colliding() -> list[Case]:
    """Lanes of a warp on four cells: the end does not depend on the order."""
    cases = []
    chosen = [u for u in updates("global") if u[0] in ("add", "min", "max", "and", "or", "xor")]
    for operation, t, update in (u for u in chosen if u[1][0] in "usb" and u[1] != "bf16"):
        memory = f"b{t[1:]}"
        for opcode in ("atom", "red"):
            name = f"{opcode}.global.{operation}.{t}"
            target = "%old, " if opcode == "atom" else ""
            body = (
                "{ .reg .b64 %at; .reg .b32 %lane; .reg ." + memory + " %old;\n"
                f"st.global.{memory} [{{cell}}], {{a2}};\nbar.warp.sync {{mask}};\n"
                "mov.u32 %lane, %laneid;\nsub.u32 %lane, {a0}, %lane;\n"
                "mad.wide.s32 %at, %lane, 32, {cell};\n"
                f"{name} {target}[%at], {{a1}};\nbar.warp.sync {{mask}};\n"
                f"ld.global.{memory} {{d0}}, [{{cell}}]; }}"
            )

            def reference(
                mask: int, lanes: Sequence[tuple[int, ...]], update: Update = update
            ) -> list[Expected]:
                cells: list[Expected] = [row[2] for row in lanes]
                for lane, (cell, value, _) in enumerate(lanes):
                    if mask >> lane & 1:
                        old = cells[cell]
                        assert isinstance(old, int)
                        cells[cell] = update(old, value)
                return cells

            # Cells of lanes that are active in both launches' halves, or in the whole one.
            cells = "choices32:0,3,1c,1f"
            cases.append(Case(name, (t,), (cells, t, t), reference, body, group=True, count=128))
    return cases


def cases() -> list[Case]:
    return [*single(), *colliding()]
