"""Binary floating-point formats as bits: what they mean, and their special values."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import NamedTuple


class Number(NamedTuple):
    """What the bits of a format stand for."""

    nan: bool
    infinite: bool
    negative: bool
    value: Fraction  # 0 where nan or infinite

    @property
    def finite(self) -> bool:
        return not (self.nan or self.infinite)

    @property
    def zero(self) -> bool:
        return self.finite and self.value == 0


@dataclass(frozen=True)
class Format:
    """An IEEE 754 interchange format or one shaped like it.

    `canonical_nan` is what the simulated GPU's operations return; the ISA leaves single
    precision's NaN open and names 0x7fff for the halves.
    """

    name: str
    exponent_bits: int
    fraction_bits: int
    canonical_nan: int

    @cached_property
    def width(self) -> int:
        return 1 + self.exponent_bits + self.fraction_bits

    @cached_property
    def sign(self) -> int:
        return 1 << (self.width - 1)

    @cached_property
    def infinity(self) -> int:
        return ((1 << self.exponent_bits) - 1) << self.fraction_bits

    @cached_property
    def min_exponent(self) -> int:
        """Of the smallest normal number."""
        return 2 - (1 << (self.exponent_bits - 1))

    @cached_property
    def quantum(self) -> int:
        """The exponent of the smallest subnormal number."""
        return self.min_exponent - self.fraction_bits

    @cached_property
    def quiet(self) -> int:
        """The bit that makes a NaN a quiet one."""
        return 1 << (self.fraction_bits - 1)

    @cached_property
    def one(self) -> int:
        return ((1 << (self.exponent_bits - 1)) - 1) << self.fraction_bits

    @cached_property
    def largest(self) -> Fraction:
        return self.decode(self.infinity - 1).value

    def is_nan(self, bits: int) -> bool:
        return bits & (self.sign - 1) > self.infinity

    def is_subnormal(self, bits: int) -> bool:
        return bits & self.infinity == 0 and bits & (self.sign - 1) != 0

    def flush(self, bits: int) -> int:
        """A subnormal number becomes the zero of its sign."""
        return bits & self.sign if bits & self.infinity == 0 else bits

    def decode(self, bits: int) -> Number:
        return _decode(self, bits)

    def ulp(self, value: Fraction) -> Fraction:
        """The distance of the format's numbers around a value."""
        exponent = self.min_exponent
        if value:
            exponent = max(exponent, floor_log2(abs(value)))
        return power_of_two(exponent - self.fraction_bits)


def power_of_two(exponent: int) -> Fraction:
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)


def floor_log2(value: Fraction) -> int:
    """The exponent e with 2^e <= value < 2^(e+1), for a positive value."""
    n, d = value.numerator, value.denominator
    exponent = n.bit_length() - d.bit_length()
    low = n < d << exponent if exponent >= 0 else n << -exponent < d
    return exponent - 1 if low else exponent


@lru_cache(maxsize=1 << 16)
def _decode(fmt: Format, bits: int) -> Number:
    negative = bool(bits & fmt.sign)
    magnitude = bits & (fmt.sign - 1)
    if magnitude > fmt.infinity:
        return Number(True, False, negative, Fraction(0))
    if magnitude == fmt.infinity:
        return Number(False, True, negative, Fraction(0))
    exponent = magnitude >> fmt.fraction_bits
    fraction = magnitude & ((1 << fmt.fraction_bits) - 1)
    if exponent:
        fraction |= 1 << fmt.fraction_bits
        exponent -= 1
    value = fraction * power_of_two(exponent + fmt.quantum)
    return Number(False, False, negative, -value if negative else value)


F16 = Format("f16", 5, 10, 0x7FFF)
BF16 = Format("bf16", 8, 7, 0x7FFF)
F32 = Format("f32", 8, 23, 0x7FFFFFFF)
F64 = Format("f64", 11, 52, 0x7FF8000000000000)
#: Lives in the upper 19 bits of an f32.
TF32 = Format("tf32", 8, 10, 0x3FFFF)

FORMATS = {f.name: f for f in (F16, BF16, F32, F64)}


def is_float(type_name: str) -> bool:
    return type_name in FORMATS


SPECIAL_WIDTHS = {"pred": 1, "tf32": 32, "bf16": 16} | dict.fromkeys(
    ("f16x2", "bf16x2", "u16x2", "s16x2"), 32
)


def width_of(type_name: str) -> int:
    """Bits of a PTX type; packed types count whole."""
    return SPECIAL_WIDTHS.get(type_name) or int(type_name[1:])


def is_signed(type_name: str) -> bool:
    return type_name[0] == "s"


def to_signed(bits: int, width: int) -> int:
    return bits - (1 << width) if bits >> (width - 1) & 1 else bits


def integer(type_name: str, bits: int) -> int:
    """The integer that the low bits of a register stand for as this type."""
    width = width_of(type_name)
    bits &= (1 << width) - 1
    return to_signed(bits, width) if is_signed(type_name) else bits


def wrap(type_name: str, value: int) -> int:
    """The bits of an integer in this type, higher ones dropped."""
    return value & ((1 << width_of(type_name)) - 1)


def limits(type_name: str) -> tuple[int, int]:
    """The smallest and the largest integer of a type."""
    width = width_of(type_name)
    if is_signed(type_name):
        return -(1 << (width - 1)), (1 << (width - 1)) - 1
    return 0, (1 << width) - 1


def clamp(type_name: str, value: int) -> int:
    low, high = limits(type_name)
    return min(max(value, low), high)
