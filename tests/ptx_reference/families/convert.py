"""cvt between all types, with every rounding and saturation; cvt.pack (9.7.9.21, 9.7.9.22)."""

from __future__ import annotations

from collections.abc import Callable

from ..case import Accept, Case, Expected, a_nan, one_of
from ..formats import (
    F32,
    F64,
    FORMATS,
    TF32,
    Format,
    clamp,
    integer,
    is_float,
    is_signed,
    limits,
    to_signed,
    width_of,
    wrap,
)
from ..rounding import round_to, round_to_integer

INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
FLOATS = ("f16", "bf16", "f32", "f64")
ROUND = ("rn", "rz", "rm", "rp")
INTEGRAL = ("rni", "rzi", "rmi", "rpi")


def register(t: str) -> int:
    return max(16, width_of(t))


def in_register(t: str, value: int, width: int) -> int:
    """A result of a narrow type fills a wider register by its sign (9.4.1)."""
    bits = wrap(t, value)
    return (to_signed(bits, width_of(t)) if is_signed(t) else bits) & ((1 << width) - 1)


def case(
    mods: str,
    d: str,
    s: str,
    reference: Callable[..., Expected],
    into: int,
    of: int,
    count: int = 128,
) -> Case:
    """cvt{mods}.d.s from a register of `of` bits into one of `into` bits."""
    result = d if into == register(d) and not d.endswith("8") else f"b{into}"
    operand = s if of == width_of(s) else f"wide{of}:{s}"
    name = f"cvt{mods}.{d}.{s}"
    return Case(name, (result,), (operand,), reference, f"{name} {{d0}}, {{a0}};", count=count)


def between_integers() -> list[Case]:
    cases = []
    for d in INTEGERS:
        for s in INTEGERS:
            shapes = [(register(d), register(s))]
            shapes += [(w, register(s)) for w in (32, 64) if w > register(d)]
            shapes += [(register(d), w) for w in (32, 64) if w > register(s)]
            shapes += [(64, 64)] if shapes[0] != (64, 64) else []
            low, high = limits(d)
            inside = low <= limits(s)[0] and limits(s)[1] <= high
            for sat in (False, True)[: 1 if inside else 2]:
                for into, of in dict.fromkeys(shapes):

                    def reference(a: int, d=d, s=s, sat=sat, into=into) -> int:
                        value = integer(s, a)
                        return in_register(d, clamp(d, value) if sat else value, into)

                    cases.append(case(".sat" if sat else "", d, s, reference, into, of))
    return cases


def to_integers() -> list[Case]:
    """Clamped to the destination's range. A NaN becomes 0, or 1 << (width - 1) where the source is
    f64 or the destination has 64 bits."""
    cases = []
    for s in FLOATS:
        fmt = FORMATS[s]
        for d in INTEGERS:
            shapes = [register(d)] + ([64] if register(d) < 64 else [])
            for mode in INTEGRAL:
                for ftz in (False, True)[: 2 if s == "f32" else 1]:
                    for sat in (False, True)[: 2 if mode == "rzi" else 1]:
                        for into in shapes[: None if mode == "rni" else 1]:

                            def reference(
                                a: int, d=d, s=s, fmt=fmt, mode=mode, ftz=ftz, into=into
                            ) -> int:
                                x = fmt.decode(fmt.flush(a) if ftz else a)
                                if x.nan:
                                    top = s == "f64" or width_of(d) == 64
                                    value = 1 << (width_of(d) - 1) if top else 0
                                elif x.infinite:
                                    value = limits(d)[0 if x.negative else 1]
                                else:
                                    value = clamp(d, round_to_integer(x.value, mode))
                                return in_register(d, value, into)

                            mods = f".{mode}{'.ftz' if ftz else ''}{'.sat' if sat else ''}"
                            cases.append(case(mods, d, s, reference, into, width_of(s), 256))
    return cases


def saturated(fmt: Format, bits: int) -> int:
    x = fmt.decode(bits)
    if x.nan or x.negative or x.zero:
        return 0
    return fmt.one if x.infinite or x.value > 1 else bits


def from_integers() -> list[Case]:
    cases = []
    for d in FLOATS:
        fmt = FORMATS[d]
        for s in INTEGERS:
            for mode in ROUND:
                for sat in (False, True)[: 2 if mode in ("rn", "rp") and d != "bf16" else 1]:

                    def reference(a: int, s=s, fmt=fmt, mode=mode, sat=sat) -> int:
                        from fractions import Fraction

                        bits = round_to(fmt, Fraction(integer(s, a)), mode)
                        return saturated(fmt, bits) if sat else bits

                    mods = f".{mode}{'.sat' if sat else ''}"
                    cases.append(case(mods, d, s, reference, width_of(d), register(s)))
                    if d == "f32" and mode in ("rn", "rm"):
                        mods = mods.replace(mode, f"{mode}.ftz")
                        cases.append(case(mods, d, s, reference, width_of(d), register(s)))
    return cases


class Conversion:
    """One conversion between floating-point formats."""

    def __init__(self, d: str, s: str, mode: str = "", **flags: bool) -> None:
        self.d, self.s, self.mode, self.flags = d, s, mode, flags

    def has(self, flag: str) -> bool:
        return self.flags.get(flag, False)

    @property
    def mods(self) -> str:
        words = [self.mode, *(f for f in ("ftz", "relu", "sat", "satfinite") if self.has(f))]
        return "".join(f".{w}" for w in words if w)

    def __call__(self, a: int) -> Expected:
        source, target = FORMATS[self.s], FORMATS[self.d]
        if self.has("ftz") and source is F32:
            a = source.flush(a)
        x = source.decode(a)
        if x.nan:
            if self.has("sat"):
                return 0
            return a_nan(F64) if target is F64 else target.canonical_nan
        sign = target.sign if x.negative else 0
        if x.infinite:
            bits = target.infinity | sign
            if self.has("satfinite"):
                bits -= 1
        elif self.mode in INTEGRAL:
            whole = round_to_integer(x.value, self.mode)
            from fractions import Fraction

            bits = round_to(target, Fraction(whole), "rn", x.negative)
        else:
            bits = round_to(target, x.value, self.mode or "rn", x.negative)
            if self.has("satfinite") and bits & (target.sign - 1) == target.infinity:
                bits -= 1
        if self.has("ftz") and target is F32:
            bits = target.flush(bits)
        if self.has("relu") and bits & target.sign:
            return 0 if bits != target.sign else one_of([0, bits])
        return saturated(target, bits) if self.has("sat") else bits


def between_floats() -> list[Case]:
    conversions = []
    for d in FLOATS:
        for s in FLOATS:
            narrowing = width_of(d) < width_of(s) or {d, s} == {"f16", "bf16"}
            modes = ROUND if narrowing else ("",)
            if (d, s) == ("f32", "bf16"):
                modes = ("", *ROUND)
            single = "f32" in (d, s)
            for mode in modes:
                for ftz in (False, True)[: 2 if single else 1]:
                    for sat in (False, True)[: 2 if "bf16" not in (d,) else 1]:
                        conversions.append(Conversion(d, s, mode, ftz=ftz, sat=sat))
            if d == s:
                for mode in INTEGRAL:
                    for ftz in (False, True)[: 2 if single else 1]:
                        for sat in (False, True)[: 2 if d != "bf16" else 1]:
                            conversions.append(Conversion(d, s, mode, ftz=ftz, sat=sat))
            if s == "f32" and d in ("f16", "bf16"):
                for mode in ("rn", "rz"):
                    conversions.append(Conversion(d, s, mode, relu=True))
                    conversions.append(Conversion(d, s, mode, satfinite=True))
                    conversions.append(Conversion(d, s, mode, relu=True, satfinite=True))
    return [case(c.mods, c.d, c.s, c, width_of(c.d), width_of(c.s), 256) for c in conversions]


def packed() -> list[Case]:
    """Two f32 to a packed pair: the first operand becomes the upper half."""
    cases = []
    for d in ("f16", "bf16"):
        for mode in ("rn", "rz"):
            for relu in (False, True):
                for satfinite in (False, True):
                    one = Conversion(d, "f32", mode, relu=relu, satfinite=satfinite)

                    def reference(a: int, b: int, one=one) -> Expected:
                        high, low = one(a), one(b)
                        if isinstance(high, int) and isinstance(low, int):
                            return high << 16 | low
                        return Accept(
                            f"{high} beside {low}",
                            lambda bits: fits(high, bits >> 16) and fits(low, bits & 0xFFFF),
                        )

                    name = f"cvt{one.mods}.{d}x2.f32"
                    cases.append(Case(name, (f"{d}x2",), ("f32", "f32"), reference))
    return cases


def fits(expected: Expected, bits: int) -> bool:
    return expected == bits if isinstance(expected, int) else expected(bits)


def tensor_float() -> list[Case]:
    """tf32: an f32 with 10 bits after the point; the other 13 are zeros here."""
    cases = []
    for mode, relu in (("rna", False), ("rn", False), ("rz", False), ("rn", True), ("rz", True)):
        for satfinite in (False, True):

            def reference(a: int, mode=mode, relu=relu, satfinite=satfinite) -> Expected:
                x = F32.decode(a)
                if x.nan:
                    return a_nan(F32)
                sign = 1 << 18 if x.negative else 0
                bits = TF32.infinity | sign
                if not x.infinite:
                    bits = round_to(TF32, x.value, mode, x.negative)
                if satfinite and bits & ~sign == TF32.infinity:
                    bits -= 1
                if relu and sign:
                    return 0 if bits != sign else one_of([0, sign << 13])
                return bits << 13

            mods = f".{mode}{'.relu' if relu else ''}{'.satfinite' if satfinite else ''}"
            name = f"cvt{mods}.tf32.f32"
            cases.append(Case(name, ("b32",), ("f32",), reference))
    return cases


def integer_packs() -> list[Case]:
    cases = []
    for t in ("u16", "s16", "u8", "s8"):
        width = width_of(t)
        name = f"cvt.pack.sat.{t}.s32" + (".b32" if width == 8 else "")

        def reference(a: int, b: int, c: int = 0, t=t, width=width) -> int:
            ta, tb = (wrap(t, clamp(t, integer("s32", v))) for v in (a, b))
            return (c << 2 * width | ta << width | tb) & 0xFFFFFFFF

        cases.append(Case(name, ("b32",), ("s32",) * (2 if width == 16 else 3), reference))
    return cases


def cases() -> list[Case]:
    assert is_float("f32")
    return [
        *between_integers(),
        *to_integers(),
        *from_integers(),
        *between_floats(),
        *packed(),
        *tensor_float(),
        *integer_packs(),
    ]
