"""Scalar and SIMD video instructions, with selectors, masks and second operations.

Written from the pseudo-code of the ISA (9.7.18, 9.7.19). It keeps intermediate results in 34 bits
and hands 33 of them to .min and .max, whose operand c "has the sign of dtype": where an
intermediate result leaves the range of dtype without being saturated, these two may see 32 or 33
bits of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from random import Random

from ..case import ANYTHING, Case, Expected, one_of
from ..formats import to_signed
from .bits import part

WORD = 0xFFFFFFFF
SIGNS = ("u32", "s32")
COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
}
PRIMARY: dict[str, Callable[[int, int], int]] = {
    "vadd": lambda x, y: x + y,
    "vsub": lambda x, y: x - y,
    "vabsdiff": lambda x, y: abs(x - y),
    "vmin": min,
    "vmax": max,
    "vavrg": lambda x, y: (x + y + 1) >> 1 if x + y >= 0 else (x + y) >> 1,
}
#: (text, bits of the part, number of the part)
SELECTORS = [("", 32, 0), *((f".b{k}", 8, k) for k in range(4)), (".h0", 16, 0), (".h1", 16, 1)]


def clamp(value: int, width: int, signed: bool) -> int:
    low = -(1 << (width - 1)) if signed else 0
    high = (1 << (width - 1 if signed else width)) - 1
    return min(max(value, low), high)


def merged(value: int, width: int, index: int, c: int) -> int:
    mask = ((1 << width) - 1) << (width * index)
    return c & ~mask | value << (width * index) & mask


def second(name: str, value: int, c: int, signed: bool) -> Expected:
    if name == "add":
        return (value + c) & WORD
    choose = min if name == "min" else max
    c = to_signed(c, 32) if signed else c
    low = to_signed(value & WORD, 32) if signed else value & WORD
    seen = {choose(v, c) & WORD for v in (value, to_signed(value & ((1 << 33) - 1), 33), low)}
    return seen.pop() if len(seen) == 1 else one_of(sorted(seen))


def body(name: str, selectors: tuple[str, str, str], third: bool, signs: str = "   ") -> str:
    """`name d.sel, a.sel, b.sel[, c];` by way of registers, since operands of cases are whole."""
    d, a, b = selectors
    s, t, u = (sign.strip() for sign in signs)
    return (
        "{ .reg .b32 %p, %q, %r, %s; mov.b32 %p, {a0}; mov.b32 %q, {a1};\n"
        f"mov.b32 %r, {{a2}}; {name} %s{d}, {s}%p{a}, {t}%q{b}"
        + (f", {u}%r" if third else "")
        + ";\n"
        "mov.b32 {d0}, %s; }"
    )


def scalar(
    name: str,
    operation: Callable[[int, int], int],
    types: tuple[str, str, str],
    saturate: bool,
    random: Random,
    form: str,
    b_limit: str = "b32",
) -> Case:
    """`form`: "" the word itself, "merge" a part of c, or a second operation."""
    signed_d, signed_a, signed_b = (t == "s32" for t in types)
    a_text, a_width, a_index = random.choice(SELECTORS)
    b_text, b_width, b_index = random.choice(SELECTORS)
    d_text, d_width, d_index = random.choice(SELECTORS[1:]) if form == "merge" else SELECTORS[0]

    def reference(a: int, b: int, c: int) -> Expected:
        value = operation(part(a, a_width, a_index, signed_a), part(b, b_width, b_index, signed_b))
        if saturate:
            if not -(1 << 33) <= value < 1 << 33:
                return ANYTHING
            value = clamp(value, d_width, signed_d)
        if form == "merge":
            return merged(value, d_width, d_index, c)
        return second(form, value, c, signed_d) if form else value & WORD

    full = name + (f".{form}" if form not in ("", "merge") else "")
    text = body(full, (d_text, a_text, b_text), bool(form))
    return Case(full, ("b32",), ("b32", b_limit, "b32"), reference, text, count=128)


def scalars() -> list[Case]:
    random, cases = Random("scalar video"), []
    forms = ("", "merge", "add", "min", "max")
    for name, operation in PRIMARY.items():
        if name == "vavrg":
            continue
        for types in itertools.product(SIGNS, repeat=3):
            for saturate in (False, True):
                text = f"{name}.{'.'.join(types)}" + ".sat" * saturate
                chosen = ("", "merge", random.choice(forms[2:]))
                cases += [scalar(text, operation, types, saturate, random, f) for f in chosen]
    for shift, mode in itertools.product(("vshl", "vshr"), ("clamp", "wrap")):

        def shifted(x: int, y: int, shift: str = shift, mode: str = mode) -> int:
            n = min(y, 32) if mode == "clamp" else y & 31
            return x << n if shift == "vshl" else x >> n

        amounts = "choices32:0,1,2,7,8,f,10,11,1f,20,21,3f,80,81,ff,100,1001,10005,8000001f"
        for td, ta in itertools.product(SIGNS, repeat=2):
            for saturate in (False, True):
                text = f"{shift}.{td}.{ta}.u32" + ".sat" * saturate + f".{mode}"
                for f in ("", "merge", random.choice(forms[2:])):
                    types = (td, ta, "u32")
                    cases.append(scalar(text, shifted, types, saturate, random, f, amounts))
    for (compare, holds), ta, tb in itertools.product(COMPARE.items(), SIGNS, SIGNS):

        def is_so(x: int, y: int, holds: Callable[[int, int], bool] = holds) -> int:
            return int(holds(x, y))

        for f in ("", "merge", random.choice(forms[2:])):
            types = ("u32", ta, tb)
            cases.append(scalar(f"vset.{ta}.{tb}.{compare}", is_so, types, False, random, f))
    return cases


def products() -> list[Case]:
    random, cases = Random("vmad"), []
    signs = ("   ", "-  ", " - ", "-- ", "  -", "---", "po ")
    for types in itertools.product(SIGNS, repeat=3):
        for saturate, scale in itertools.product((False, True), (0, 7, 15)):
            for sign in random.sample(signs, 3):
                cases.append(product(types, saturate, scale, sign, random))
    return cases


def product(types: tuple[str, ...], saturate: bool, scale: int, sign: str, random: Random) -> Case:
    signed_a, signed_b = (t == "s32" for t in types[1:])
    a_text, a_width, a_index = random.choice(SELECTORS)
    b_text, b_width, b_index = random.choice(SELECTORS)
    plus_one = sign == "po "
    negated_product = not plus_one and (sign[0] == "-") != (sign[1] == "-")
    negated_c = sign[2] == "-"

    def reference(a: int, b: int, c: int) -> int:
        signed = signed_a or signed_b or negated_product or negated_c
        lsb = 0
        value = part(a, a_width, a_index, signed_a) * part(b, b_width, b_index, signed_b)
        addend = to_signed(c, 32) if signed else c
        if plus_one:
            lsb = 1
        elif negated_product:
            value, lsb = ~value, 1
        elif negated_c:
            addend, lsb = ~addend, 1
        value = (value + addend + lsb) >> scale
        return (clamp(value, 32, signed) if saturate else value) & WORD

    name = f"vmad.{'.'.join(types)}" + ".po" * plus_one + ".sat" * saturate
    name += f".shr{scale}" if scale else ""
    text = body(name, ("", a_text, b_text), True, "   " if plus_one else sign)
    return Case(name, ("b32",), ("b32",) * 3, reference, text, count=128)


def simd(
    name: str,
    operation: Callable[[int, int], int],
    lanes: int,
    types: tuple[str, str, str],
    mode: str,
    random: Random,
) -> Case:
    """`mode`: "", "sat" or "add"."""
    width = 32 // lanes
    letter = "h" if lanes == 2 else "b"
    signed_d, signed_a, signed_b = (t == "s32" for t in types)

    def chosen(default: list[int]) -> tuple[str, list[int]]:
        if random.random() < 0.4:
            return "", default
        picked = [random.randrange(2 * lanes) for _ in range(lanes)]
        return f".{letter}" + "".join(str(k) for k in reversed(picked)), picked

    a_text, a_parts = chosen(list(range(lanes)))
    b_text, b_parts = chosen(list(range(lanes, 2 * lanes)))
    wanted = [k for k in range(lanes) if random.random() < 0.6] or [lanes - 1]
    d_text = f".{letter}" + "".join(str(k) for k in reversed(wanted))
    if len(wanted) == lanes and random.random() < 0.5:
        d_text = ""

    def reference(a: int, b: int, c: int) -> int:
        both = b << 32 | a
        total, result = c, c
        for k in wanted:
            x = part(both, width, a_parts[k], signed_a)
            value = operation(x, part(both, width, b_parts[k], signed_b))
            if mode == "sat":
                value = clamp(value, width, signed_d)
            total += value
            result = merged(value, width, k, result)
        return (total if mode == "add" else result) & WORD

    full = name + (f".{mode}" if mode else "")
    text = body(full, (d_text, a_text, b_text), True)
    return Case(full, ("b32",), ("b32",) * 3, reference, text, count=128)


def simds() -> list[Case]:
    random, cases = Random("SIMD video"), []
    for lanes in (2, 4):
        for name, operation in PRIMARY.items():
            for types in itertools.product(SIGNS, repeat=3):
                for mode in ("", "sat", "add"):
                    text = f"{name}{lanes}.{'.'.join(types)}"
                    cases.append(simd(text, operation, lanes, types, mode, random))
        for (compare, holds), ta, tb in itertools.product(COMPARE.items(), SIGNS, SIGNS):

            def is_so(x: int, y: int, holds: Callable[[int, int], bool] = holds) -> int:
                return int(holds(x, y))

            for mode in ("", "add"):
                text = f"vset{lanes}.{ta}.{tb}.{compare}"
                cases.append(simd(text, is_so, lanes, ("u32", ta, tb), mode, random))
    return cases


def cases() -> list[Case]:
    """A part of all combinations, always the same."""
    everything = [*scalars(), *products(), *simds()]
    return Random("a part").sample(everything, 420)
