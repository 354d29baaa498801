"""Floating-point arithmetic in any format: exact, then rounded once."""

from __future__ import annotations

from fractions import Fraction

from .case import Accept, Expected, a_nan, one_of
from .formats import F64, Format, Number
from .rounding import round_to, square_root


class Arithmetic:
    """The operations of one format under one set of modifiers.

    NaN results are canonical, or +0 under .sat; double precision hands on the payload of an operand
    (9.7.3: payloads are supported there). .ftz makes subnormal operands and results zeros of their
    sign, .sat clamps to [+0, 1].
    """

    def __init__(self, fmt: Format, mode: str = "rn", ftz: bool = False, sat: bool = False) -> None:
        self.fmt, self.mode, self.ftz, self.sat = fmt, mode, ftz, sat

    def take(self, bits: int) -> Number:
        return self.fmt.decode(self.fmt.flush(bits) if self.ftz else bits)

    def nan(self, *operands: int) -> Expected:
        if self.sat:
            return 0
        if self.fmt is F64:
            return nan_of(operands)
        return self.fmt.canonical_nan

    def give(self, bits: int) -> int:
        if self.ftz:
            bits = self.fmt.flush(bits)
        if self.sat:
            value = self.fmt.decode(bits)
            if value.negative or value.zero:
                return 0
            if value.infinite or value.value > 1:
                return self.fmt.one
        return bits

    def infinity(self, negative: bool) -> int:
        return self.give(self.fmt.infinity | (self.fmt.sign if negative else 0))

    def rounded(self, value: Fraction, negative_zero: bool = False) -> int:
        return self.give(round_to(self.fmt, value, self.mode, negative_zero))

    def sum(self, a: Number, b: Number) -> Expected | None:
        """a + b; None where it is not a number."""
        if a.infinite or b.infinite:
            if a.infinite and b.infinite and a.negative != b.negative:
                return None
            return self.infinity(a.negative if a.infinite else b.negative)
        total = a.value + b.value
        if a.zero and b.zero and a.negative == b.negative:
            return self.rounded(total, a.negative)
        return self.rounded(total, self.mode == "rm")

    def add(self, a: int, b: int) -> Expected:
        x, y = self.take(a), self.take(b)
        result = None if x.nan or y.nan else self.sum(x, y)
        return self.nan(a, b) if result is None else result

    def sub(self, a: int, b: int) -> Expected:
        x, y = self.take(a), self.take(b)
        if x.nan or y.nan:
            return self.nan(a, b)
        result = self.sum(x, y._replace(negative=not y.negative, value=-y.value))
        return self.nan(a, b) if result is None else result

    def product(self, x: Number, y: Number) -> Number | None:
        negative = x.negative != y.negative
        if x.infinite or y.infinite:
            if x.zero or y.zero:
                return None
            return Number(False, True, negative, Fraction(0))
        return Number(False, False, negative, x.value * y.value)

    def mul(self, a: int, b: int) -> Expected:
        x, y = self.take(a), self.take(b)
        p = None if x.nan or y.nan else self.product(x, y)
        if p is None:
            return self.nan(a, b)
        return self.infinity(p.negative) if p.infinite else self.rounded(p.value, p.negative)

    def fma(self, a: int, b: int, c: int) -> Expected:
        x, y, z = self.take(a), self.take(b), self.take(c)
        p = None if x.nan or y.nan or z.nan else self.product(x, y)
        result = None if p is None else self.sum(p, z)
        return self.nan(a, b, c) if result is None else result

    def div(self, a: int, b: int) -> Expected:
        x, y = self.take(a), self.take(b)
        negative = x.negative != y.negative
        if x.nan or y.nan or (x.infinite and y.infinite) or (x.zero and y.zero):
            return self.nan(a, b)
        if x.infinite or y.zero:
            return self.infinity(negative)
        if y.infinite:
            return self.rounded(Fraction(0), negative)
        return self.rounded(x.value / y.value, negative)

    def rcp(self, a: int) -> Expected:
        return self.div(self.fmt.one, a)

    def sqrt(self, a: int) -> Expected:
        x = self.take(a)
        if x.zero:
            return self.give(a & self.fmt.sign)
        if x.nan or x.negative:
            return self.nan(a)
        if x.infinite:
            return self.infinity(False)
        return self.rounded(square_root(x.value))

    def extreme(self, a: int, b: int, largest: bool, nan: bool, xorsign: bool = False) -> Expected:
        """min and max (9.7.3.11): a number beats a NaN unless `nan`; -0 is less than +0."""
        if self.ftz:
            a, b = self.fmt.flush(a), self.fmt.flush(b)
        sign = (a ^ b) & self.fmt.sign
        if xorsign:
            a, b = a & ~self.fmt.sign, b & ~self.fmt.sign
        x, y = self.fmt.decode(a), self.fmt.decode(b)
        if (x.nan and y.nan) or (nan and (x.nan or y.nan)):
            return a_nan(self.fmt) if self.fmt is F64 else self.fmt.canonical_nan
        if x.nan or y.nan:
            result = b if x.nan else a
        else:
            result = max((a, b), key=self.order) if largest else min((a, b), key=self.order)
        if xorsign:
            result = result & ~self.fmt.sign | sign
        return result

    def order(self, bits: int) -> int:
        """Grows with the number, -0 before +0."""
        magnitude = bits & (self.fmt.sign - 1)
        return -magnitude - 1 if bits & self.fmt.sign else magnitude


def nan_of(operands: tuple[int, ...]) -> Accept:
    """A double-precision NaN: an operand's, made quiet; any if no operand is one."""
    payloads = [v | F64.quiet for v in operands if F64.is_nan(v)]
    return one_of(payloads) if payloads else a_nan(F64)
