"""Single and double precision: arithmetic in every mode, comparisons, signs (9.7.3, 9.7.6)."""

from __future__ import annotations

from collections.abc import Callable

from ..arithmetic import Arithmetic
from ..case import Case, Expected, a_nan
from ..formats import F32, F64, FORMATS, Format
from .integer import BOOLEAN, set_cases, setp_cases

MODES = ("", "rn", "rz", "rm", "rp")


def modifiers(t: str, mode: str, ftz: bool, sat: bool) -> str:
    return "".join(f".{m}" for m in (mode, "ftz" if ftz else "", "sat" if sat else "", t) if m)


def flags(t: str) -> list[tuple[bool, bool]]:
    """(.ftz, .sat) as a type has them."""
    return (
        [(False, False)] if t == "f64" else [(f, s) for f in (False, True) for s in (False, True)]
    )


def arithmetic() -> list[Case]:
    cases = []
    for t in ("f32", "f64"):
        fmt = FORMATS[t]
        for mode in MODES:
            for ftz, sat in flags(t):
                a = Arithmetic(fmt, mode or "rn", ftz, sat)
                end = modifiers(t, mode, ftz, sat)
                cases += [
                    Case(f"add{end}", (t,), (t, t), a.add),
                    Case(f"sub{end}", (t,), (t, t), a.sub),
                    Case(f"mul{end}", (t,), (t, t), a.mul),
                ]
                if mode:
                    cases.append(Case(f"fma{end}", (t,), (t,) * 3, a.fma))
                    cases.append(Case(f"mad{end}", (t,), (t,) * 3, a.fma, count=128))
                if mode and not sat:
                    cases += [
                        Case(f"div{end}", (t,), (t, t), a.div),
                        Case(f"rcp{end}", (t,), (t,), a.rcp),
                        Case(f"sqrt{end}", (t,), (t,), a.sqrt),
                    ]
    return cases


def signs_and_extremes() -> list[Case]:
    cases = []
    for t in ("f32", "f64"):
        fmt = FORMATS[t]
        for ftz in (False, True)[: 2 if t == "f32" else 1]:
            f = ".ftz" if ftz else ""
            cases.append(Case(f"neg{f}.{t}", (t,), (t,), sign_case(fmt, ftz, lambda v, s: v ^ s)))
            cases.append(Case(f"abs{f}.{t}", (t,), (t,), sign_case(fmt, ftz, lambda v, s: v & ~s)))
            a = Arithmetic(fmt, ftz=ftz)
            for name in ("min", "max"):
                for nan in (False, True)[: 2 if t == "f32" else 1]:
                    for xorsign in (False, True)[: 2 if t == "f32" else 1]:
                        mods = f + (".NaN" if nan else "") + (".xorsign.abs" if xorsign else "")

                        def two(
                            x: int, y: int, a=a, name=name, nan=nan, xorsign=xorsign
                        ) -> Expected:
                            return a.extreme(x, y, name == "max", nan, xorsign)

                        cases.append(Case(f"{name}{mods}.{t}", (t,), (t, t), two))
                    if t == "f32":
                        cases += three_operands(name, f + (".NaN" if nan else ""), a, nan)
        cases.append(
            Case(f"copysign.{t}", (t,), (t, t), lambda x, y, s=fmt.sign: (x & s) | (y & ~s))
        )
    return cases


def three_operands(name: str, mods: str, a: Arithmetic, nan: bool) -> list[Case]:
    def three(x: int, y: int, z: int, absolute: bool = False) -> Expected:
        if absolute:
            x, y, z = (v & ~F32.sign for v in (x, y, z))
        first = a.extreme(x, y, name == "max", nan)
        assert isinstance(first, int)
        return a.extreme(first, z, name == "max", nan)

    t = "f32"
    return [
        Case(
            f"{name}{mods}.f32 of three",
            (t,),
            (t,) * 3,
            three,
            f"{name}{mods}.f32 {{d0}}, {{a0}}, {{a1}}, {{a2}};",
        ),
        Case(f"{name}{mods}.abs.f32", (t,), (t,) * 3, lambda x, y, z: three(x, y, z, True)),
    ]


def sign_case(fmt: Format, ftz: bool, change: Callable[[int, int], int]) -> Callable[..., Expected]:
    """neg and abs; of a NaN they yield some NaN (9.7.3.9, 9.7.3.10)."""

    def reference(bits: int) -> Expected:
        if fmt.is_nan(bits):
            return a_nan(fmt)
        return change(fmt.flush(bits) if ftz else bits, fmt.sign)

    return reference


PROPERTIES: dict[str, Callable[[Format, int], bool]] = {
    "finite": lambda f, v: f.decode(v).finite,
    "infinite": lambda f, v: f.decode(v).infinite,
    "number": lambda f, v: not f.is_nan(v),
    "notanumber": lambda f, v: f.is_nan(v),
    "normal": lambda f, v: f.decode(v).finite and not f.is_subnormal(v),
    "subnormal": lambda f, v: f.is_subnormal(v),
}


def float_holds(fmt: Format, name: str, ftz: bool) -> Callable[[int, int], bool]:
    """A comparison by its name: ordered, unordered (..u), num and nan (9.7.6, tables)."""
    ordered: dict[str, Callable[[object, object], bool]] = {
        "eq": lambda a, b: a == b,
        "ne": lambda a, b: a != b,
        "lt": lambda a, b: a < b,  # type: ignore[operator]
        "le": lambda a, b: a <= b,  # type: ignore[operator]
        "gt": lambda a, b: a > b,  # type: ignore[operator]
        "ge": lambda a, b: a >= b,  # type: ignore[operator]
    }

    def holds(a: int, b: int) -> bool:
        if ftz:
            a, b = fmt.flush(a), fmt.flush(b)
        unordered = fmt.is_nan(a) or fmt.is_nan(b)
        if name in ("num", "nan"):
            return unordered == (name == "nan")
        if unordered:
            return name.endswith("u")
        return ordered[name.removesuffix("u")](rank(fmt, a), rank(fmt, b))

    return holds


def rank(fmt: Format, bits: int) -> int:
    """Grows with the number; both zeros are 0."""
    magnitude = bits & (fmt.sign - 1)
    return -magnitude if bits & fmt.sign else magnitude


FLOAT_COMPARISONS = (
    *("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"),
)


def comparisons() -> list[Case]:
    cases = []
    for t in ("f32", "f64"):
        fmt = FORMATS[t]
        for what, has in PROPERTIES.items():
            reference = lambda v, f=fmt, has=has: int(has(f, v))  # noqa: E731
            cases.append(Case(f"testp.{what}.{t}", ("pred",), (t,), reference, count=128))
        for ftz in (False, True)[: 2 if t == "f32" else 1]:
            mods = ".ftz" if ftz else ""
            for name in FLOAT_COMPARISONS:
                holds = float_holds(fmt, name, ftz)
                cases += setp_cases(t, name, holds, mods)
                cases += set_cases(t, name, holds, mods, ("u32", "s32", "f32"))
    return cases


def selections() -> list[Case]:
    """slct by a number: -0 selects like +0, a NaN the second operand (9.7.6.4)."""
    cases = []
    for t in ("b16", "b32", "b64", "u16", "s16", "u32", "s32", "u64", "s64", "f32", "f64"):
        for ftz in (False, True):

            def reference(a: int, b: int, c: int, ftz: bool = ftz) -> int:
                c = F32.flush(c) if ftz else c
                return b if F32.is_nan(c) or rank(F32, c) < 0 else a

            mods = ".ftz" if ftz else ""
            cases.append(Case(f"slct{mods}.{t}.f32", (t,), (t, t, "f32"), reference, count=128))
    return cases


def cases() -> list[Case]:
    assert set(BOOLEAN) == {"and", "or", "xor"} and F64 is FORMATS["f64"]
    return [*arithmetic(), *signs_and_extremes(), *comparisons(), *selections()]
