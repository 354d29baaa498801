"""Integer arithmetic, logic, shifts, carry chains and comparisons (9.7.1, 9.7.2, 9.7.8)."""

from __future__ import annotations

from collections.abc import Callable

from ..case import ANYTHING, Case, Expected
from ..formats import clamp, integer, limits, width_of, wrap

NUMBERS = ("u16", "s16", "u32", "s32", "u64", "s64")


def wide_of(t: str) -> str:
    return f"{t[0]}{2 * width_of(t)}"


def on(t: str, function: Callable[..., int]) -> Callable[..., int]:
    """A reference on integers of one type that wraps its result."""
    return lambda *bits: wrap(t, function(*(integer(t, b) for b in bits)))


def arithmetic() -> list[Case]:
    cases = []
    for t in NUMBERS:
        two, three = (t, t), (t, t, t)
        cases += [
            Case(f"add.{t}", (t,), two, on(t, lambda a, b: a + b)),
            Case(f"sub.{t}", (t,), two, on(t, lambda a, b: a - b)),
            Case(f"mul.lo.{t}", (t,), two, on(t, lambda a, b: a * b)),
            Case(f"mul.hi.{t}", (t,), two, high(t)),
            Case(f"mad.lo.{t}", (t,), three, on(t, lambda a, b, c: a * b + c)),
            Case(f"mad.hi.{t}", (t,), three, high(t)),
            Case(f"min.{t}", (t,), two, on(t, min)),
            Case(f"max.{t}", (t,), two, on(t, max)),
            Case(f"sad.{t}", (t,), three, on(t, lambda a, b, c: c + abs(a - b))),
            Case(f"div.{t}", (t,), two, division(t, True)),
            Case(f"rem.{t}", (t,), two, division(t, False)),
        ]
        if t[0] == "s":
            cases.append(Case(f"neg.{t}", (t,), (t,), on(t, lambda a: -a)))
            cases.append(Case(f"abs.{t}", (t,), (t,), on(t, abs)))
        if width_of(t) < 64:
            w = wide_of(t)
            cases.append(Case(f"mul.wide.{t}", (w,), two, wide(t)))
            cases.append(Case(f"mad.wide.{t}", (w,), (t, t, w), wide(t)))
    s = "s32"
    cases += [
        Case("add.sat.s32", (s,), (s, s), saturating(lambda a, b: a + b)),
        Case("sub.sat.s32", (s,), (s, s), saturating(lambda a, b: a - b)),
        Case("mad.hi.sat.s32", (s,), (s, s, s), saturating(lambda a, b, c: (a * b >> 32) + c)),
        Case("min.relu.s32", (s,), (s, s), on(s, lambda a, b: max(min(a, b), 0))),
        Case("max.relu.s32", (s,), (s, s), on(s, lambda a, b: max(a, b, 0))),
    ]
    for t in ("u16x2", "s16x2"):
        half = t[:3]
        cases += [
            Case(f"add.{t}", (t,), (t, t), both(on(half, lambda a, b: a + b))),
            Case(f"min.{t}", (t,), (t, t), both(on(half, min))),
            Case(f"max.{t}", (t,), (t, t), both(on(half, max))),
        ]
    cases += [
        Case(
            "min.relu.s16x2",
            ("s16x2",),
            ("s16x2",) * 2,
            both(on("s16", lambda a, b: max(min(a, b), 0))),
        ),
        Case(
            "max.relu.s16x2", ("s16x2",), ("s16x2",) * 2, both(on("s16", lambda a, b: max(a, b, 0)))
        ),
    ]
    return cases


def both(function: Callable[..., int]) -> Callable[..., int]:
    """Applies a reference to both halves of packed operands."""

    def packed(*operands: int) -> int:
        low = function(*(v & 0xFFFF for v in operands))
        return low | function(*(v >> 16 for v in operands)) << 16

    return packed


def high(t: str) -> Callable[..., int]:
    """mul.hi, and mad.hi with a third operand."""

    def reference(a: int, b: int, c: int = 0) -> int:
        product = integer(t, a) * integer(t, b)
        return wrap(t, (product >> width_of(t)) + integer(t, c))

    return reference


def wide(t: str) -> Callable[..., int]:
    def reference(a: int, b: int, c: int = 0) -> int:
        return wrap(wide_of(t), integer(t, a) * integer(t, b) + c)

    return reference


def saturating(function: Callable[..., int]) -> Callable[..., int]:
    return lambda *bits: wrap("s32", clamp("s32", function(*(integer("s32", b) for b in bits))))


def division(t: str, quotient: bool) -> Callable[[int, int], Expected]:
    """Rounds towards zero; what a division by zero yields is left open (9.7.1.8)."""

    def reference(a_bits: int, b_bits: int) -> Expected:
        a, b = integer(t, a_bits), integer(t, b_bits)
        if b == 0:
            return ANYTHING
        q = abs(a) // abs(b)
        if (a < 0) != (b < 0):
            q = -q
        return wrap(t, q if quotient else a - q * b)

    return reference


def multiply24() -> list[Case]:
    """The product of 24-bit integers has 48 bits; .hi takes bits 47..16 (9.7.1.5, 9.7.1.6)."""
    cases = []
    for t in ("u32", "s32"):

        def product(a: int, b: int, t: str = t) -> int:
            narrow = [v & 0xFFFFFF for v in (a, b)]
            if t == "s32":
                narrow = [v - (1 << 24) if v >> 23 else v for v in narrow]
            return narrow[0] * narrow[1]

        for part, shift in (("lo", 0), ("hi", 16)):

            def mul(a: int, b: int, c: int = 0, t: str = t, shift: int = shift) -> int:
                return wrap(t, (product(a, b, t) >> shift) + integer(t, c))

            cases.append(Case(f"mul24.{part}.{t}", (t,), (t, t), mul))
            cases.append(Case(f"mad24.{part}.{t}", (t,), (t, t, t), mul))

    def saturated(a: int, b: int, c: int) -> int:
        high_part = integer("s32", (product(a, b, "s32") >> 16) & 0xFFFFFFFF)
        return wrap("s32", clamp("s32", high_part + integer("s32", c)))

    cases.append(Case("mad24.hi.sat.s32", ("s32",), ("s32",) * 3, saturated))
    return cases


def logic() -> list[Case]:
    cases = []
    for t in ("b16", "b32", "b64", "pred"):
        ones = (1 << (1 if t == "pred" else width_of(t))) - 1
        cases += [
            Case(f"and.{t}", (t,), (t, t), lambda a, b: a & b),
            Case(f"or.{t}", (t,), (t, t), lambda a, b: a | b),
            Case(f"xor.{t}", (t,), (t, t), lambda a, b: a ^ b),
            Case(f"not.{t}", (t,), (t,), lambda a, ones=ones: a ^ ones),
        ]
        if t != "pred":
            cases.append(Case(f"cnot.{t}", (t,), (t,), lambda a: int(a == 0)))
    for t in ("b16", "b32", "b64", *NUMBERS):
        width = width_of(t)
        # Shift amounts above the width are clamped to it (9.7.8.8, 9.7.8.9).
        if t[0] == "b":
            cases.append(Case(f"shl.{t}", (t,), (t, "u32"), shift(t, True)))
        cases.append(Case(f"shr.{t}", (t,), (t, "u32"), shift(t, False)))
        amounts = f"choices32:0,1,{width - 1:x},{width:x},{width + 1:x},40,100,80000000,ffffffff"
        cases.append(Case(f"shr.{t}", (t,), (t, amounts), shift(t, False)))
        if t[0] == "b":
            cases.append(Case(f"shl.{t}", (t,), (t, amounts), shift(t, True)))
    return cases


def shift(t: str, left: bool) -> Callable[[int, int], int]:
    def reference(a: int, amount: int) -> int:
        amount = min(amount, width_of(t))
        value = integer(t, a) if t[0] == "s" else a
        return wrap(t, value << amount if left else value >> amount)

    return reference


def carries() -> list[Case]:
    """Chains of add, sub and mad over several words, against longer integers (9.7.2)."""
    cases = []
    for t in ("u32", "s32", "u64", "s64"):
        width = width_of(t)
        ones = (1 << width) - 1

        def split(value: int, words: int, width: int = width, ones: int = ones) -> tuple[int, ...]:
            return tuple(value >> (k * width) & ones for k in range(words))

        def joined(*words: int, width: int = width) -> int:
            return sum(w << (k * width) for k, w in enumerate(words))

        def add3(*v: int, split=split, joined=joined) -> tuple[int, ...]:
            return split(joined(*v[:3]) + joined(*v[3:]), 3)

        def sub3(*v: int, split=split, joined=joined) -> tuple[int, ...]:
            return split(joined(*v[:3]) - joined(*v[3:]), 3)

        for name, reference in (("add", add3), ("sub", sub3)):
            body = (
                f"{name}.cc.{t} {{d0}}, {{a0}}, {{a3}};\n{name}c.cc.{t} {{d1}}, {{a1}}, {{a4}};\n"
                f"{name}c.{t} {{d2}}, {{a2}}, {{a5}};"
            )
            for first in (f"{name}.cc.{t}", f"{name}c.{t}"):
                cases.append(Case(first, (t,) * 3, (t,) * 6, reference, body))
        # The carry itself: what the chain leaves for a following addc of zeros.
        body = f"add.cc.{t} {{d0}}, {{a0}}, {{a1}};\naddc.{t} {{d1}}, 0, 0;"
        cases.append(Case(f"addc.{t}", (t, t), (t, t), lambda a, b, s=split: s(a + b, 2), body))
        # Cards keep the adder's carry, which compilers use where chains of both kinds meet: after a
        # subtraction 1 says that there was no borrow.
        body = f"sub.cc.{t} {{d0}}, {{a0}}, {{a1}};\naddc.{t} {{d1}}, 0, 0;"

        def no_borrow(a: int, b: int, ones: int = ones) -> tuple[int, ...]:
            return a - b & ones, int(a >= b)

        cases.append(Case(f"sub.cc.{t}", (t, t), (t, t), no_borrow, body))
        body = f"add.cc.{t} {{d0}}, {{a0}}, {{a1}};\nsubc.{t} {{d1}}, 0, 0;"

        def no_carry(a: int, b: int, ones: int = ones) -> tuple[int, ...]:
            return a + b & ones, 0 if a + b > ones else ones

        cases.append(Case(f"subc.{t}", (t, t), (t, t), no_carry, body))

        def mad_chain(
            a: int, b: int, c: int, d: int, t: str = t, split=split, joined=joined
        ) -> tuple[int, ...]:
            product = integer(t, a) * integer(t, b)
            return split(product + joined(c, d), 2)

        body = (
            f"mad.lo.cc.{t} {{d0}}, {{a0}}, {{a1}}, {{a2}};\n"
            f"madc.hi.{t} {{d1}}, {{a0}}, {{a1}}, {{a3}};"
        )
        for first in (f"mad.lo.cc.{t}", f"madc.hi.{t}"):
            cases.append(Case(first, (t, t), (t,) * 4, mad_chain, body))

        def each_part(a: int, b: int, c: int, carry: int, t: str = t, width: int = width) -> object:
            """Both halves with a carry in and out; each adds its half, c and the carry."""
            ones = (1 << width) - 1
            product = integer(t, a) * integer(t, b)
            flag = int(carry != 0)
            low = (product & ones) + c + flag
            upper = (product >> width & ones) + c + (low >> width)
            return low & ones, upper & ones, upper >> width

        body = (
            f"{{ .reg .pred %p; .reg .b{width} %c; setp.ne.u{width} %p, {{a3}}, 0;\n"
            f"selp.b{width} %c, -1, 0, %p;\nadd.cc.u{width} %c, %c, 1;\n"
            f"madc.lo.cc.{t} {{d0}}, {{a0}}, {{a1}}, {{a2}};\n"
            f"madc.hi.cc.{t} {{d1}}, {{a0}}, {{a1}}, {{a2}};\naddc.{t} {{d2}}, 0, 0; }}"
        )
        cases.append(Case(f"madc.lo.cc.{t}", (t,) * 3, (t,) * 4, each_part, body))
    return cases


COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def comparisons_of(t: str) -> list[tuple[str, Callable[[int, int], bool]]]:
    if t[0] == "b":
        return [(n, COMPARE[n]) for n in ("eq", "ne")]
    found = list(COMPARE.items())
    if t[0] == "u":
        found += [(n, COMPARE[same]) for n, same in UNSIGNED.items()]
    return found


BOOLEAN: dict[str, Callable[[bool, bool], bool]] = {
    "and": lambda t, c: t and c,
    "or": lambda t, c: t or c,
    "xor": lambda t, c: t != c,
}


def setp_cases(t: str, name: str, holds: Callable[[int, int], bool], mods: str = "") -> list[Case]:
    """setp with one result, with two, and with each boolean operation (9.7.6.2)."""
    count = 128
    cases = [Case(f"setp.{name}{mods}.{t}", ("pred",), (t, t), lambda a, b: int(holds(a, b)))]
    body = f"setp.{name}{mods}.{t} {{d0}}|{{d1}}, {{a0}}, {{a1}};"
    pair = lambda a, b: (int(holds(a, b)), int(not holds(a, b)))  # noqa: E731
    cases.append(
        Case(f"setp.{name}{mods}.{t} p|q", ("pred", "pred"), (t, t), pair, body, count=count)
    )
    for boolean, combine in BOOLEAN.items():
        for negated in (False, True):

            def reference(a: int, b: int, c: int, combine=combine, negated=negated) -> object:
                third = bool(c) != negated
                test = holds(a, b)
                return int(combine(test, third)), int(combine(not test, third))

            mark = "!" if negated else ""
            full = f"setp.{name}.{boolean}{mods}.{t}"
            body = f"{full} {{d0}}|{{d1}}, {{a0}}, {{a1}}, {mark}{{a2}};"
            cases.append(Case(full, ("pred",) * 2, (t, t, "pred"), reference, body, count=count))
    return cases


def set_cases(
    t: str, name: str, holds: Callable[[int, int], bool], mods: str, results: tuple[str, ...]
) -> list[Case]:
    """set: all ones for an integer result, 1.0 for a floating-point one (9.7.6.1)."""
    true = {"u32": 0xFFFFFFFF, "s32": 0xFFFFFFFF, "f32": 0x3F800000, "f16": 0x3C00, "bf16": 0x3F80}
    true |= {"u16": 0xFFFF, "s16": 0xFFFF}
    cases = []
    for d in results:
        one = true[d]
        cases.append(
            Case(
                f"set.{name}{mods}.{d}.{t}",
                (d,),
                (t, t),
                lambda a, b, one=one: one if holds(a, b) else 0,
            )
        )
        boolean = ("and", "or", "xor")[len(name) % 3]

        def combined(a: int, b: int, c: int, one=one, combine=BOOLEAN[boolean]) -> int:
            return one if combine(holds(a, b), bool(c)) else 0

        cases.append(
            Case(f"set.{name}.{boolean}{mods}.{d}.{t}", (d,), (t, t, "pred"), combined, count=128)
        )
    return cases


def comparisons() -> list[Case]:
    cases = []
    for t in (*NUMBERS, "b16", "b32", "b64"):
        for name, compare in comparisons_of(t):

            def holds(a: int, b: int, t: str = t, compare=compare) -> bool:
                return compare(integer(t, a), integer(t, b))

            cases += setp_cases(t, name, holds)
            if name in ("eq", "ne", "lt", "ls", "ge"):
                cases += set_cases(t, name, holds, "", ("u32", "s32", "f32"))
    return cases


def selections() -> list[Case]:
    cases = []
    for t in ("b16", "b32", "b64", *NUMBERS, "f32", "f64"):
        cases.append(Case(f"selp.{t}", (t,), (t, t, "pred"), lambda a, b, c: a if c else b))
        by_sign = lambda a, b, c: a if integer("s32", c) >= 0 else b  # noqa: E731
        cases.append(Case(f"slct.{t}.s32", (t,), (t, t, "s32"), by_sign))
    return cases


def literals() -> list[Case]:
    """Constants among the operands take the width of the instruction's type."""
    cases = []
    for t in NUMBERS:
        low, high_end = limits(t)
        for value in (1, high_end, low, low + 1, high_end // 3):
            body = f"sub.{t} {{d0}}, {{a0}}, {value};"
            cases.append(
                Case(
                    f"sub.{t} immediate",
                    (t,),
                    (t,),
                    on(t, lambda a, v=value: a - v),
                    body,
                    count=128,
                )
            )
    return cases


def cases() -> list[Case]:
    return [
        *arithmetic(),
        *multiply24(),
        *logic(),
        *carries(),
        *comparisons(),
        *selections(),
        *literals(),
    ]
