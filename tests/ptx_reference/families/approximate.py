"""Approximate functions, within the errors that the ISA states for each (9.7.3.8, .13 to .22)."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

from ..arithmetic import Arithmetic
from ..case import ANYTHING, Accept, Case, Expected, between
from ..formats import BF16, F16, F32, F64, FORMATS, Format, power_of_two
from ..rounding import square_root
from .half import both


def near(fmt: Format, value: Fraction, error: Fraction, ftz: bool = False) -> Expected:
    """A value within an absolute error and the rounding to the format."""
    error += fmt.ulp(value) / 2
    return between(fmt, value - error, value + error, ftz)


def ulps(fmt: Format, value: Fraction, count: int, ftz: bool) -> Expected:
    error = fmt.ulp(value) * count
    return between(fmt, value - error, value + error, ftz)


def relative(fmt: Format, value: Fraction, error: float, ftz: bool = False) -> Expected:
    return near(fmt, value, abs(value) * Fraction(2.0**error), ftz)


def divide(ftz: bool, full: bool) -> Callable[[int, int], Expected]:
    """div.approx computes a * (1/b); a huge divisor makes 0, or NaN of an infinity (9.7.3.8)."""
    exact = Arithmetic(F32, ftz=ftz)

    def reference(a: int, b: int) -> Expected:
        x, y = exact.take(a), exact.take(b)
        if not (x.finite and y.finite) or x.zero or y.zero:
            if not full and x.infinite and y.finite and abs(y.value) > power_of_two(126):
                return F32.canonical_nan
            return exact.div(a, b)
        sign = (a ^ b) & F32.sign
        if not full and abs(y.value) > power_of_two(126):
            return sign
        if not full and abs(y.value) < power_of_two(-126):
            return ANYTHING  # no error is stated for such divisors
        return ulps(F32, x.value / y.value, 2, ftz)

    return reference


def reciprocal(ftz: bool) -> Callable[[int], Expected]:
    exact = Arithmetic(F32, ftz=ftz)

    def reference(a: int) -> Expected:
        x = exact.take(a)
        if not x.finite or x.zero:
            return exact.rcp(a)
        return ulps(F32, 1 / x.value, 1, ftz)

    return reference


def root(ftz: bool) -> Callable[[int], Expected]:
    exact = Arithmetic(F32, ftz=ftz)

    def reference(a: int) -> Expected:
        x = exact.take(a)
        if not x.finite or x.zero or x.negative:
            return exact.sqrt(a)
        return relative(F32, square_root(x.value), -23, ftz)

    return reference


def inverse_root(fmt: Format, ftz: bool, error: float) -> Callable[[int], Expected]:
    exact = Arithmetic(fmt, ftz=ftz)

    def reference(a: int) -> Expected:
        x = exact.take(a)
        if x.zero:
            return fmt.infinity | (a & fmt.sign)
        if x.nan or x.negative:
            return exact.nan(a)
        if x.infinite:
            return 0
        return relative(fmt, 1 / square_root(x.value, 120), error, ftz)

    return reference


def upper_half(
    function: Callable[[Fraction], Fraction], positive_only: bool
) -> Callable[..., Expected]:
    """rcp and rsqrt.approx.ftz.f64 see and give the upper words (9.7.3.14, 9.7.3.17)."""

    def reference(a: int) -> Expected:
        x = F64.decode(F64.flush(a >> 32 << 32))
        if x.nan or (positive_only and x.negative and not x.zero):
            return 0x7FFFFFFF00000000
        if x.zero:
            return F64.infinity | (a & F64.sign)
        if x.infinite:
            return a & F64.sign
        # No error is stated; the result has 20 bits after the point.
        bound = relative(F64, function(x.value), -20 + 0.01, True)
        assert isinstance(bound, Accept)
        return Accept(f"{bound}, lower word 0", lambda b: b & 0xFFFFFFFF == 0 and bound(b))

    return reference


def exponential(fmt: Format, ftz: bool) -> Callable[[int], Expected]:
    """ex2: 2 ulp for f32, relative 2^-9.9 for f16, 2^-7 for bf16 (9.7.3.21, 9.7.4.10)."""
    arithmetic = Arithmetic(fmt, ftz=ftz)

    def reference(a: int) -> Expected:
        x = arithmetic.take(a)
        if x.nan:
            return fmt.canonical_nan
        if x.infinite:
            return 0 if x.negative else fmt.infinity
        if abs(x.value) < 2:
            exact = Fraction(math.exp2(float(x.value)))
        else:
            whole = max(min(math.floor(x.value), 400), -400)
            fraction = float(x.value - math.floor(x.value))
            exact = Fraction(math.exp2(fraction)) * power_of_two(whole)
        if x.zero:
            return fmt.one
        if fmt is F32:
            return ulps(fmt, exact, 2, ftz)
        return relative(fmt, exact, -9.9 if fmt is F16 else -7, ftz)

    return reference


def logarithm(ftz: bool) -> Callable[[int], Expected]:
    arithmetic = Arithmetic(F32, ftz=ftz)

    def reference(a: int) -> Expected:
        x = arithmetic.take(a)
        if x.zero:
            return F32.infinity | F32.sign
        if x.nan or x.negative:
            return F32.canonical_nan
        if x.infinite:
            return F32.infinity
        exact = Fraction(math.log2(float(x.value)))
        if Fraction(1, 2) < x.value < 2:
            return near(F32, exact, power_of_two(-22), ftz)
        return relative(F32, exact, -22, ftz)

    return reference


def circular(function: Callable[[float], float], ftz: bool) -> Callable[[int], Expected]:
    """2^-20.5 in [-2 pi, 2 pi], 2^-14.7 in [-100 pi, 100 pi], beyond a value in [-1, 1]."""
    arithmetic = Arithmetic(F32, ftz=ftz)

    def reference(a: int) -> Expected:
        x = arithmetic.take(a)
        if not x.finite:
            return F32.canonical_nan
        if x.zero:
            return a & F32.sign if function is math.sin else F32.one
        if abs(x.value) > Fraction(100 * math.pi):
            return between(F32, Fraction(-1), Fraction(1))
        error = -20.5 if abs(x.value) <= Fraction(2 * math.pi) else -14.7
        return near(F32, Fraction(function(float(x.value))), Fraction(2.0**error), ftz)

    return reference


def hyperbolic(fmt: Format) -> Callable[[int], Expected]:
    """tanh: relative 2^-11 for f32, absolute 2^-10.987 for f16 and 2^-8 for bf16."""

    def reference(a: int) -> Expected:
        x = fmt.decode(a)
        if x.nan:
            return fmt.canonical_nan
        if x.infinite:
            return fmt.one | (a & fmt.sign)
        if x.zero:
            return a
        exact = Fraction(math.tanh(float(x.value)))
        if fmt is F32:
            return a if fmt.is_subnormal(a) else relative(fmt, exact, -11)
        return near(fmt, exact, Fraction(2.0 ** (-10.987 if fmt is F16 else -8)))

    return reference


#: Around multiples of pi/2 and the ends of the ranges in which an error is stated.
SPECIAL_ANGLES = "choices32:" + ",".join(
    f"{v | s:x}"
    for s in (0, F32.sign)
    for v in (
        *(0x3FC90FDA, 0x3FC90FDB, 0x40490FDA, 0x40490FDB, 0x4096CBE4, 0x40C90FDA, 0x40C90FDB),
        *(0x43987990, 0x439D1462, 0x3F490FDB, 0x40490000, 0x42C80000, 0x41200000, 0x3A83126F),
    )
)
#: Where ex2 overflows, underflows and becomes subnormal.
EXPONENTS = "choices32:" + (
    "42ffffff,43000000,c2fc0000,c2fc0001,c3140000,c3150000,c3158000,c3160000,c3161000,3f7fffff,"
    "bf7fffff,3f000001,33800000,b3800000,43480000,7f7fffff,ff7fffff"
)


def cases() -> list[Case]:
    t = "f32"
    found = []
    for ftz in (False, True):
        f = ".ftz" if ftz else ""
        found += [
            Case(f"div.approx{f}.f32", (t,), (t, t), divide(ftz, False), count=768),
            Case(f"div.full{f}.f32", (t,), (t, t), divide(ftz, True), count=768),
            Case(f"rcp.approx{f}.f32", (t,), (t,), reciprocal(ftz)),
            Case(f"sqrt.approx{f}.f32", (t,), (t,), root(ftz)),
            Case(f"rsqrt.approx{f}.f32", (t,), (t,), inverse_root(F32, ftz, -22.9)),
            Case(f"ex2.approx{f}.f32", (t,), (t,), exponential(F32, ftz), count=768),
            Case(f"ex2.approx{f}.f32", (t,), (EXPONENTS,), exponential(F32, ftz), count=128),
            Case(f"lg2.approx{f}.f32", (t,), (t,), logarithm(ftz), count=768),
        ]
        for name, function in (("sin", math.sin), ("cos", math.cos)):
            reference = circular(function, ftz)
            full = f"{name}.approx{f}.f32"
            found.append(Case(full, (t,), (t,), reference, count=1152))
            found.append(Case(full, (t,), (SPECIAL_ANGLES,), reference, count=128))
    found += [
        Case("tanh.approx.f32", (t,), (t,), hyperbolic(F32)),
        # "Emulated in software": no error is stated, held to that of double rounding.
        Case("rsqrt.approx.f64", ("f64",), ("f64",), inverse_root(F64, False, -52)),
        Case("rcp.approx.ftz.f64", ("f64",), ("f64",), upper_half(lambda v: 1 / v, False)),
        Case(
            "rsqrt.approx.ftz.f64",
            ("f64",),
            ("f64",),
            upper_half(lambda v: 1 / square_root(v, 120), True),
        ),
    ]
    for half in ("f16", "bf16"):
        fmt = FORMATS[half]
        f = ".ftz" if fmt is BF16 else ""  # as the ISA has them
        for form, lift in ((half, lambda g: g), (f"{half}x2", both)):
            found.append(
                Case(f"ex2.approx{f}.{form}", (form,), (form,), lift(exponential(fmt, bool(f))))
            )
            found.append(Case(f"tanh.approx.{form}", (form,), (form,), lift(hyperbolic(fmt))))
    return found
