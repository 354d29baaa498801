"""Rounding of exact values to a format, in each direction that PTX has."""

from __future__ import annotations

from fractions import Fraction
from math import isqrt

from .formats import Format, floor_log2, power_of_two


def round_up(whole: int, rest: Fraction | int, unit: int, mode: str, negative: bool) -> bool:
    """Whether a magnitude of `whole` + `rest`/`unit` is rounded away from zero."""
    if mode == "rz" or not rest:
        return False
    if mode == "rn":
        return 2 * rest > unit or (2 * rest == unit and bool(whole & 1))
    if mode == "rna":
        return 2 * rest >= unit
    if mode == "rm":
        return negative
    if mode == "rp":
        return not negative
    raise ValueError(f"no rounding mode: {mode}")


def round_to(fmt: Format, value: Fraction, mode: str = "rn", negative_zero: bool = False) -> int:
    """The bits of a value in a format; a zero is negative where the caller says so."""
    if value == 0:
        return fmt.sign if negative_zero else 0
    negative = value < 0
    magnitude = -value if negative else value
    exponent = max(floor_log2(magnitude), fmt.min_exponent) - fmt.fraction_bits
    n, d = magnitude.numerator, magnitude.denominator
    if exponent >= 0:
        d <<= exponent
    else:
        n <<= -exponent
    whole, rest = divmod(n, d)
    whole += round_up(whole, rest, d, mode, negative)
    bits = ((exponent - fmt.quantum) << fmt.fraction_bits) + whole
    if bits >= fmt.infinity:
        away = mode in ("rn", "rna") or mode == ("rm" if negative else "rp")
        bits = fmt.infinity if away else fmt.infinity - 1
    return bits | (fmt.sign if negative else 0)


def round_to_integer(value: Fraction, mode: str) -> int:
    """A value rounded to an integer; modes as of `cvt`: rni, rzi, rmi, rpi."""
    negative = value < 0
    magnitude = abs(value)
    whole, rest = divmod(magnitude.numerator, magnitude.denominator)
    whole += round_up(whole, rest, magnitude.denominator, mode.removesuffix("i"), negative)
    return -whole if negative else whole


def square_root(value: Fraction, bits: int = 80) -> Fraction:
    """The root of a positive value, exact or with `bits` bits and one more that says "not exact".

    Rounding that to any format with fewer bits gives what rounding the root itself would give.
    """
    scale = 2 * bits - floor_log2(value)
    scale += scale & 1
    scaled = value * power_of_two(scale)
    whole, rest = divmod(scaled.numerator, scaled.denominator)
    root = isqrt(whole)
    exact = root * root == whole and not rest
    return (Fraction(root) if exact else Fraction(2 * root + 1, 2)) * power_of_two(-scale // 2)
