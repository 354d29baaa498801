"""What lanes of a warp tell each other: shfl, vote, match, redux, activemask (9.7.9, 9.7.13)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..case import ANYTHING, Case, Expected
from ..formats import integer, width_of, wrap

ALL = 0xFFFFFFFF
Lanes = Sequence[tuple[int, ...]]
#: Two groups of lanes in one instruction; each lane names its own.
GROUPS = "{ .reg .pred %odd; .reg .b32 %g; mov.u32 %g, %laneid; and.b32 %g, %g, 1;\n" + (
    "setp.ne.u32 %odd, %g, 0; selp.b32 %g, 0xaaaaaaaa, 0x55555555, %odd;\nand.b32 %g, %g, {mask};\n"
)


def shuffles() -> list[Case]:
    cases = []
    clamps = "choices32:0,1f,1c1f,1800,181f,1000,100f,1e00,1e01,1f1f,ffffffff"
    steps = "choices32:0,1,2,3,4,8,f,10,11,1f,20,ffffffff"
    for mode in ("up", "down", "bfly", "idx"):

        def reference(mask: int, lanes: Lanes, mode: str = mode) -> list[object]:
            answers: list[object] = []
            for lane, (own, b, c) in enumerate(lanes):
                step, segment, limit = b & 31, c >> 8 & 31, c & 31
                highest = (lane & segment) | (limit & ~segment)
                if mode == "up":
                    j = lane - step
                    valid = j >= highest
                else:
                    low = lane & segment
                    j = {"down": lane + step, "bfly": lane ^ step}.get(
                        mode, low | (step & ~segment)
                    )
                    valid = j <= highest
                j = j if valid else lane
                value: Expected = lanes[j][0] if mask >> j & 1 else ANYTHING
                answers.append((value if j != lane else own, int(valid)))
            return answers

        name = f"shfl.sync.{mode}.b32"
        body = f"{name} {{d0}}|{{d1}}, {{a0}}, {{a1}}, {{a2}}, {{mask}};"
        cases.append(
            Case(name, ("b32", "pred"), ("b32", steps, clamps), reference, body, group=True)
        )
        alone = lambda m, lanes, f=reference: [r[0] for r in f(m, lanes)]  # type: ignore[index]  # noqa: E731
        body = f"{name} {{d0}}, {{a0}}, {{a1}}, {{a2}}, {{mask}};"
        cases.append(Case(name, ("b32",), ("b32", steps, clamps), alone, body, group=True))
        body = f"shfl.{mode}.b32 {{d0}}|{{d1}}, {{a0}}, {{a1}}, {{a2}};"
        cases.append(
            Case(
                f"shfl.{mode}.b32",
                ("b32", "pred"),
                ("b32", steps, clamps),
                reference,
                body,
                group=True,
            )
        )
    return cases


def grouped(
    function: Callable[[list[int], Lanes, int], object], split: bool
) -> Callable[..., list[object]]:
    """A reference of each group of lanes: of all active ones, or of the even and the odd ones."""

    def reference(mask: int, lanes: Lanes) -> list[object]:
        answers: list[object] = []
        for lane in range(32):
            group = mask & ((0xAAAAAAAA if lane & 1 else 0x55555555) if split else ALL)
            answers.append(function([k for k in range(32) if group >> k & 1], lanes, lane))
        return answers

    return reference


def mask_of(lanes: list[int]) -> int:
    return sum(1 << k for k in lanes)


def group_case(
    name: str,
    results: tuple[str, ...],
    operands: tuple[str, ...],
    function: Callable[..., object],
    line: str,
) -> list[Case]:
    """`line` has {members} for the member mask."""
    whole = line.replace("{members}", "{mask}")
    parted = GROUPS + line.replace("{members}", "%g") + " }"
    return [
        Case(name, results, operands, grouped(function, False), whole, group=True),
        Case(name, results, operands, grouped(function, True), parted, group=True),
    ]


def votes() -> list[Case]:
    kinds: dict[str, Callable[[list[int], Lanes, int], object]] = {
        "all": lambda g, lanes, _: int(all(lanes[k][0] for k in g)),
        "any": lambda g, lanes, _: int(any(lanes[k][0] for k in g)),
        "uni": lambda g, lanes, _: int(len({lanes[k][0] for k in g}) <= 1),
        "ballot": lambda g, lanes, _: mask_of([k for k in g if lanes[k][0]]),
    }
    cases = []
    for kind, function in kinds.items():
        result, end = ("b32", "b32") if kind == "ballot" else ("pred", "pred")
        for rare in (False, True):  # whole warps that agree are rare among random predicates
            often = "choices32:1" + ",1" * 60 + ",0" if rare else "choices32:0,1"
            test = "setp.ne.u32 %v, {a0}, 0;\n"
            for old in (False, True):
                name = f"vote.{'' if old else 'sync.'}{kind}.{end}"
                line = f"{name} {{d0}}, %v" + ("" if old else ", {members}") + ";"
                wrapped = "{ .reg .pred %v;\n" + test + line + " }"
                found = group_case(name, (result,), (often,), function, wrapped)
                cases += found[:1] if old else found
    return cases


def matches() -> list[Case]:
    cases = []
    for t in ("b32", "b64"):
        top = "8000000000000000" if t == "b64" else "80000000"
        few = f"choices{width_of(t)}:0,1,{top},ffffffff"
        same = f"choices{width_of(t)}:7" + ",7" * 60 + f",{top}"

        def any_equal(g: list[int], lanes: Lanes, lane: int) -> object:
            return mask_of([k for k in g if lanes[k][0] == lanes[lane][0]])

        def all_equal(g: list[int], lanes: Lanes, lane: int) -> object:
            equal = len({lanes[k][0] for k in g}) == 1
            return (mask_of(g) if equal else 0), int(equal)

        name = f"match.any.sync.{t}"
        cases += group_case(
            name, ("b32",), (few,), any_equal, f"{name} {{d0}}, {{a0}}, {{members}};"
        )
        name = f"match.all.sync.{t}"
        line = f"{name} {{d0}}|{{d1}}, {{a0}}, {{members}};"
        for values in (few, same):
            cases += group_case(name, ("b32", "pred"), (values,), all_equal, line)
    return cases


def reductions() -> list[Case]:
    cases = []
    for t in ("u32", "s32", "b32"):
        operations: dict[str, Callable[[int, int], int]] = {
            "add": lambda a, b: a + b,
            "min": min,
            "max": max,
        }
        if t == "b32":
            operations = {
                "and": lambda a, b: a & b,
                "or": lambda a, b: a | b,
                "xor": lambda a, b: a ^ b,
            }
        for operation, combine in operations.items():

            def function(g: list[int], lanes: Lanes, lane: int, t=t, combine=combine) -> object:
                values = [lanes[k][0] if t == "b32" else integer(t, lanes[k][0]) for k in g]
                total = values[0]
                for v in values[1:]:
                    total = combine(total, v)
                return wrap(t, total)

            name = f"redux.sync.{operation}.{t}"
            cases += group_case(name, (t,), (t,), function, f"{name} {{d0}}, {{a0}}, {{members}};")
    return cases


def cases() -> list[Case]:
    active = Case(
        "activemask.b32",
        ("b32",),
        ("b32",),
        lambda mask, lanes: [mask] * 32,
        "activemask.b32 {d0};",
        group=True,
    )
    return [*shuffles(), *votes(), *matches(), *reductions(), active]
