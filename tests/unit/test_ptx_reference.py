"""The reference of PTX's instructions itself: its rounding and arithmetic against NumPy's."""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2]))

from tests.ptx_reference.arithmetic import Arithmetic
from tests.ptx_reference.formats import F16, F32, F64, Format
from tests.ptx_reference.operands import operand_rows
from tests.ptx_reference.rounding import round_to, round_to_integer, square_root

KINDS: dict[str, tuple[Format, Any, Any]] = {
    "f16": (F16, np.float16, np.uint16),
    "f32": (F32, np.float32, np.uint32),
    "f64": (F64, np.float64, np.uint64),
}


def as_floats(values: list[int], name: str) -> Any:
    _, floating, bits = KINDS[name]
    return np.array(values, bits).view(floating)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("operation", ["add", "sub", "mul", "div"])
def test_arithmetic_is_ieee(name: str, operation: str) -> None:
    fmt, _, bits = KINDS[name]
    rows = operand_rows((name, name), 800, operation)
    a, b = (as_floats([r[k] for r in rows], name) for k in (0, 1))
    with np.errstate(all="ignore"):
        results = {
            "add": lambda: a + b,
            "sub": lambda: a - b,
            "mul": lambda: a * b,
            "div": lambda: a / b,
        }[operation]()
    function = getattr(Arithmetic(fmt), operation)
    for row, want in zip(rows, results.view(bits).tolist(), strict=True):
        got = function(*row)
        if fmt.is_nan(want):
            assert not isinstance(got, int) or fmt.is_nan(got)
        else:
            assert got == want, [hex(v) for v in (*row, got, want)]


@pytest.mark.parametrize("name", ["f32", "f64"])
def test_roots_are_ieee(name: str) -> None:
    fmt, _, bits = KINDS[name]
    rows = operand_rows((name,), 800, "sqrt")
    with np.errstate(all="ignore"):
        results = np.sqrt(as_floats([r[0] for r in rows], name)).view(bits).tolist()
    for (value,), want in zip(rows, results, strict=True):
        if not fmt.is_nan(want):
            assert Arithmetic(fmt).sqrt(value) == want


@pytest.mark.parametrize("name", ["f16", "f32"])
def test_narrowing_is_ieee(name: str) -> None:
    fmt, floating, bits = KINDS[name]
    rows = operand_rows(("f64",), 800, name)
    values = as_floats([r[0] for r in rows], "f64")
    # Numbers around the narrow format's, too.
    with np.errstate(all="ignore"):
        values = np.concatenate([values, values * 1e-5])
        results = values.astype(floating).view(bits).tolist()
    for value, want in zip(values.tolist(), results, strict=True):
        if np.isfinite(value):
            assert round_to(fmt, Fraction(value), "rn", np.signbit(value)) == want


def test_directed_rounding_encloses_the_value() -> None:
    random = Random(3)
    for _ in range(2000):
        value = Fraction(random.getrandbits(80) - (1 << 79), random.getrandbits(60) + 1)
        down, up = (F32.decode(round_to(F32, value, m)).value for m in ("rm", "rp"))
        zero = F32.decode(round_to(F32, value, "rz")).value
        assert down <= value <= up
        assert up - down in (0, F32.ulp(down), F32.ulp(up))
        assert zero == (down if value > 0 else up)


def test_overflow_goes_where_the_mode_says() -> None:
    huge = Fraction(2) ** 200
    infinity, largest = F32.infinity, F32.infinity - 1
    assert [round_to(F32, huge, m) for m in ("rn", "rz", "rm", "rp")] == [
        infinity,
        largest,
        largest,
        infinity,
    ]
    assert [round_to(F32, -huge, m) & ~F32.sign for m in ("rn", "rz", "rm", "rp")] == [
        infinity,
        largest,
        infinity,
        largest,
    ]


def test_integers_round_halves_to_even() -> None:
    halves = [Fraction(n, 2) for n in (-5, -3, -1, 1, 3, 5)]
    assert [round_to_integer(v, "rni") for v in halves] == [-2, -2, 0, 0, 2, 2]
    assert [round_to_integer(v, "rzi") for v in halves] == [-2, -1, 0, 0, 1, 2]
    assert [round_to_integer(v, "rmi") for v in halves] == [-3, -2, -1, 0, 1, 2]
    assert [round_to_integer(v, "rpi") for v in halves] == [-2, -1, 0, 1, 2, 3]


def test_a_root_is_exact_where_it_can_be() -> None:
    assert square_root(Fraction(9, 4)) == Fraction(3, 2)
    root = square_root(Fraction(2))
    assert root != 0 and abs(root * root - 2) < Fraction(1, 1 << 70)
