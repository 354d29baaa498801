"""f16, bf16 and their packed forms (9.7.4, 9.7.5, 9.7.7)."""

from __future__ import annotations

from collections.abc import Callable

from ..arithmetic import Arithmetic
from ..case import Accept, Case, Expected
from ..formats import FORMATS
from .floating import FLOAT_COMPARISONS, float_holds, sign_case
from .integer import set_cases, setp_cases


def both(function: Callable[..., Expected]) -> Callable[..., Expected]:
    """A reference of one half, for both halves of packed operands."""

    def packed(*operands: int) -> Expected:
        low = function(*(v & 0xFFFF for v in operands))
        high = function(*(v >> 16 for v in operands))
        if isinstance(low, int) and isinstance(high, int):
            return low | high << 16

        def test(bits: int) -> bool:
            return fits(low, bits & 0xFFFF) and fits(high, bits >> 16)

        return Accept(f"{high} beside {low}", test)

    return packed


def fits(expected: Expected, bits: int) -> bool:
    return expected == bits if isinstance(expected, int) else expected(bits)


def relu(a: Arithmetic) -> Callable[..., Expected]:
    """fma.relu: negative results become 0, NaN stays (9.7.4.4)."""

    def reference(x: int, y: int, z: int) -> Expected:
        result = a.fma(x, y, z)
        assert isinstance(result, int)
        return result if a.fmt.is_nan(result) or not result & a.fmt.sign else 0

    return reference


def forms(t: str) -> list[tuple[str, Callable[..., Callable[..., Expected]]]]:
    return [(t, lambda f: f), (f"{t}x2", both)]


def arithmetic(t: str) -> list[Case]:
    cases = []
    fmt = FORMATS[t]
    for form, lift in forms(t):
        for ftz in (False, True)[: 2 if t == "f16" else 1]:
            f = ".ftz" if ftz else ""
            for sat in (False, True)[: 2 if t == "f16" else 1]:
                a = Arithmetic(fmt, ftz=ftz, sat=sat)
                for rnd in ("", ".rn"):
                    end = f"{rnd}{f}{'.sat' if sat else ''}.{form}"
                    cases += [
                        Case(f"add{end}", (form,), (form,) * 2, lift(a.add)),
                        Case(f"sub{end}", (form,), (form,) * 2, lift(a.sub)),
                        Case(f"mul{end}", (form,), (form,) * 2, lift(a.mul)),
                    ]
                    if rnd:
                        cases.append(
                            Case(f"fma{end}", (form,), (form,) * 3, lift(a.fma), count=768)
                        )
            a = Arithmetic(fmt, ftz=ftz)
            cases.append(Case(f"fma.rn{f}.relu.{form}", (form,), (form,) * 3, lift(relu(a))))
            negate = sign_case(fmt, ftz, lambda v, s: v ^ s)
            magnitude = sign_case(fmt, ftz, lambda v, s: v & ~s)
            cases.append(Case(f"neg{f}.{form}", (form,), (form,), lift(negate)))
            cases.append(Case(f"abs{f}.{form}", (form,), (form,), lift(magnitude)))
            for name in ("min", "max"):
                for nan in (False, True):
                    for xorsign in (False, True):
                        mods = f + (".NaN" if nan else "") + (".xorsign.abs" if xorsign else "")

                        def two(
                            x: int, y: int, a=a, name=name, nan=nan, xorsign=xorsign
                        ) -> Expected:
                            return a.extreme(x, y, name == "max", nan, xorsign)

                        cases.append(Case(f"{name}{mods}.{form}", (form,), (form,) * 2, lift(two)))
    return cases


def comparisons(t: str) -> list[Case]:
    cases = []
    fmt = FORMATS[t]
    for ftz in (False, True)[: 2 if t == "f16" else 1]:
        mods = ".ftz" if ftz else ""
        for name in FLOAT_COMPARISONS:
            holds = float_holds(fmt, name, ftz)
            cases += setp_cases(t, name, holds, mods)
            if ftz and name not in ("lt", "neu"):
                continue
            cases += set_cases(t, name, holds, mods, ("u32", "s32", t))

            def pair(a: int, b: int, holds=holds) -> object:
                return int(holds(a & 0xFFFF, b & 0xFFFF)), int(holds(a >> 16, b >> 16))

            body = f"setp.{name}{mods}.{t}x2 {{d0}}|{{d1}}, {{a0}}, {{a1}};"
            cases.append(
                Case(
                    f"setp.{name}{mods}.{t}x2",
                    ("pred",) * 2,
                    (f"{t}x2",) * 2,
                    pair,
                    body,
                    count=128,
                )
            )
    return cases


def cases() -> list[Case]:
    return [c for t in ("f16", "bf16") for c in (*arithmetic(t), *comparisons(t))]
