"""Instructions under a guard, and neighbours that an interpreter may carry out as one."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from ..arithmetic import Arithmetic
from ..case import Case, Expected, a_nan
from ..formats import F32, FORMATS, integer
from ..operands import register_width
from . import approximate, bits, convert, floating, half
from . import integer as integers
from .floating import float_holds


def guarded(case: Case, negated: bool) -> Case:
    """The same instruction under a predicate; other lanes keep what was in the register."""
    n, result = len(case.operands), case.results[0]
    old = "pred" if result == "pred" else f"b{register_width(result)}"
    guard = f"@{'!' if negated else ''}{{a{n + 1}}} "
    body = f"mov.{old} {{d0}}, {{a{n}}};\n{guard}{case.text()}"

    def reference(*row: int) -> object:
        return case.reference(*row[:n]) if bool(row[n + 1]) != negated else row[n]

    operands = (*case.operands, old, "pred")
    return Case(f"{case.instruction} guarded", case.results, operands, reference, body, count=128)


def guards() -> list[Case]:
    everything = itertools.chain(
        *(family.cases() for family in (integers, bits, floating, half, convert, approximate))
    )
    plain = [c for c in everything if not c.body or "\n" not in c.body]
    plain = [c for c in plain if len(c.results) == 1]
    return [guarded(c, bool(k & 1)) for k, c in enumerate(plain[::5])]


def pairs() -> list[Case]:
    """Two f32 instructions, of which the second takes the first one's result."""
    a = Arithmetic(F32)
    first: dict[str, Callable[..., Expected]] = {
        "add.f32 %x, {a0}, {a1};": lambda p, q, r: a.add(p, q),
        "sub.f32 %x, {a0}, {a1};": lambda p, q, r: a.sub(p, q),
        "mul.f32 %x, {a0}, {a1};": lambda p, q, r: a.mul(p, q),
        "fma.rn.f32 %x, {a0}, {a1}, {a2};": a.fma,
    }
    second: dict[str, Callable[..., Expected]] = {
        "add.f32 {d0}, %x, {a3};": lambda x, p, q: a.add(x, p),
        "add.f32 {d0}, {a3}, %x;": lambda x, p, q: a.add(p, x),
        "sub.f32 {d0}, %x, {a3};": lambda x, p, q: a.sub(x, p),
        "sub.f32 {d0}, {a3}, %x;": lambda x, p, q: a.sub(p, x),
        "mul.f32 {d0}, %x, {a3};": lambda x, p, q: a.mul(x, p),
        "mul.f32 {d0}, %x, %x;": lambda x, p, q: a.mul(x, x),
        "fma.rn.f32 {d0}, %x, {a3}, {a4};": a.fma,
        "fma.rn.f32 {d0}, {a3}, %x, {a4};": lambda x, p, q: a.fma(p, x, q),
        "fma.rn.f32 {d0}, {a3}, {a4}, %x;": lambda x, p, q: a.fma(p, q, x),
        "fma.rn.f32 {d0}, %x, {a3}, %x;": lambda x, p, q: a.fma(x, p, x),
        "max.f32 {d0}, %x, {a3};": lambda x, p, q: a.extreme(x, p, True, False),
        "neg.f32 %x, %x; xor.b32 {d0}, %x, 0x80000000;": lambda x, p, q: x,
    }
    cases = []
    for (line, one), (next_line, two) in itertools.product(first.items(), second.items()):

        def reference(p: int, q: int, r: int, s: int, t: int, one=one, two=two) -> Expected:
            return two(one(p, q, r), s, t)

        body = f"{{ .reg .f32 %x; {line}\n{next_line} }}"
        if next_line.startswith("neg"):  # of a NaN, neg yields any
            finite = "choices32:0,80000000,1,3f800000,bf800000,7f7fffff,7f800000,42280000"
            operands = (finite, "choices32:3f800000,bf000000", *("choices32:3f800000",) * 3)
        else:
            operands = ("f32",) * 5
        name = f"{line.split()[0]} then {next_line.split()[0]}"
        cases.append(Case(name, ("f32",), operands, reference, body, count=256))
    return cases


def branches() -> list[Case]:
    """A comparison whose branch follows, with arithmetic or another predicate between."""
    cases = []
    a = Arithmetic(F32)
    kinds: list[tuple[str, str, Callable[[int, int], bool]]] = [
        ("lt.f32", "f32", float_holds(F32, "lt", False)),
        ("neu.f32", "f32", float_holds(F32, "neu", False)),
        ("geu.f32", "f32", float_holds(F32, "geu", False)),
    ]
    for t in ("s32", "u32", "s64", "u64", "b32"):
        for name, compare in integers.COMPARE.items():
            if t[0] != "b" or name in ("eq", "ne"):
                kinds.append(
                    (
                        f"{name}.{t}",
                        t,
                        lambda x, y, t=t, compare=compare: compare(integer(t, x), integer(t, y)),
                    )
                )
    for (name, t, holds), negated, between in itertools.product(kinds, (False, True), range(4)):
        logic = ("", "and.pred", "or.pred", "")[between]
        register = f".b{register_width(t)}"

        def reference(
            x: int, y: int, p: int, q: int, c: int, holds=holds, negated=negated, logic=logic
        ) -> Expected:
            test = holds(x, y)
            if logic:
                test = (test and bool(c)) if logic == "and.pred" else (test or bool(c))
            return a.add(p, q) if test == negated else a.mul(p, q)

        lines = [f"{{ .reg .pred %q, %s; .reg .f32 %x; .reg {register} %v;"]
        lines.append(f"setp.{name} %q, {{a0}}, {{a1}};")
        if logic:
            lines.append(f"{logic} %s, %q, {{a4}};")
        if between != 0:
            lines.append("add.f32 %x, {a2}, {a3};")
        lines.append(f"@{'!' if negated else ''}{'%s' if logic else '%q'} bra OTHER;")
        lines.append("add.f32 {d0}, {a2}, {a3}; bra AFTER;")
        lines.append("OTHER: mul.f32 {d0}, {a2}, {a3};\nAFTER: }")
        if between != 0:
            lines[-2] = "mov.f32 {d0}, %x; bra AFTER;"
        operands = (t, t, "f32", "f32", "pred")
        body = "\n".join(lines)
        cases.append(Case(f"setp.{name} and bra", ("f32",), operands, reference, body, count=128))
    return cases


def chains() -> list[Case]:
    """Sums of products whose factors come from memory."""
    cases = []
    spaces = {"global": "{cell}", "shared": "{shared}", "": "{cell}"}
    for t, n, mods in (("f32", 4, ""), ("f32", 4, ".ftz"), ("f64", 2, "")):
        a = Arithmetic(FORMATS[t], ftz=bool(mods))
        bytes_ = FORMATS[t].width // 8
        for (left, left_at), (right, right_at) in itertools.product(spaces.items(), repeat=2):

            def reference(total: int, *factors: int, a=a, n=n) -> Expected:
                result: Expected = total
                for k in range(n):
                    result = a.fma(factors[k], factors[n + k], result)
                    if not isinstance(result, int):
                        return a_nan(a.fmt)  # of the double-precision ones any
                return result

            lines = [f"{{ .reg .{t} %x, %y;"]
            for k in range(n):
                for part, (space, at) in enumerate(((left, left_at), (right, right_at))):
                    dot = f".{space}" if space else ""
                    offset = 16 * part + bytes_ * k
                    lines.append(f"st{dot}.{t} [{at}+{offset}], {{a{1 + part * n + k}}};")
            lines.append(f"mov.{t} {{d0}}, {{a0}};")
            for k in range(n):
                for part, (space, at) in enumerate(((left, left_at), (right, right_at))):
                    dot = f".{space}" if space else ""
                    lines.append(f"ld{dot}.{t} %{'xy'[part]}, [{at}+{16 * part + bytes_ * k}];")
                lines.append(f"fma.rn{mods}.{t} {{d0}}, %x, %y, {{d0}};")
            lines.append("}")
            name = f"fma.rn{mods}.{t} of {left or 'generic'} and {right or 'generic'} memory"
            operands = (t,) * (2 * n + 1)
            cases.append(Case(name, (t,), operands, reference, "\n".join(lines), count=256))
    return cases


def cases() -> list[Case]:
    return [*guards(), *pairs(), *branches(), *chains()]
