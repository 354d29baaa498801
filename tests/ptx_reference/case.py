"""One instruction with its operands, and what its results may be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from .formats import Format


@dataclass(frozen=True)
class Accept:
    """A result of which the ISA leaves something open."""

    what: str
    test: Callable[[int], bool] = field(compare=False)

    def __call__(self, bits: int) -> bool:
        return self.test(bits)

    def __str__(self) -> str:
        return self.what


Expected = int | Accept
#: For operands for which the ISA defines no result.
ANYTHING = Accept("anything", lambda bits: True)


def a_nan(fmt: Format) -> Accept:
    return Accept("a NaN", fmt.is_nan)


def one_of(values: Sequence[int]) -> Accept:
    allowed = frozenset(values)
    return Accept(" or ".join(f"{v:#x}" for v in sorted(allowed)), lambda bits: bits in allowed)


def between(fmt: Format, low: Fraction, high: Fraction, flushed: bool = False) -> Accept:
    """A number in [low, high]; infinite where the end lies beyond the format's largest number.

    `flushed`: or zero, where subnormal numbers lie in the interval.
    """
    smallest = Fraction(2) ** fmt.min_exponent

    def test(bits: int) -> bool:
        number = fmt.decode(bits)
        if number.nan:
            return False
        if number.infinite:
            return low < -fmt.largest if number.negative else high > fmt.largest
        if flushed and number.value == 0:
            return low < smallest and high > -smallest
        return low <= number.value <= high

    return Accept(f"in [{float(low)!r}, {float(high)!r}]", test)


@dataclass
class Case:
    """An instruction, the types of its operands and results, and its reference.

    The reference takes the operands as bits and returns the result, or a tuple of them. Of a
    `group` it takes the mask of active lanes and a list of 32 rows of operands, and returns a list
    of 32 results. `body`: PTX with {d0}, {d1} ... for results, {a0}, {a1} ... for operands, {cell}
    and {shared} for addresses of 32 bytes of the lane's own, {mask} for the mask of active lanes.
    """

    instruction: str
    results: tuple[str, ...]
    operands: tuple[str, ...]
    reference: Callable[..., object]
    body: str = ""
    group: bool = False
    count: int = 384

    def text(self) -> str:
        if self.body:
            return self.body
        names = [f"{{d{k}}}" for k in range(len(self.results))]
        names += [f"{{a{k}}}" for k in range(len(self.operands))]
        return f"{self.instruction} {', '.join(names)};"

    @property
    def opcode(self) -> str:
        return self.instruction.split(".")[0].split()[0]
