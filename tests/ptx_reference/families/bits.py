"""Bit fields, permutations, funnel shifts, dot products and packed differences.

Written from the pseudo-code of the ISA (9.7.1.14 to 9.7.1.23, 9.7.8.5 to 9.7.8.7, 9.7.9.7, 9.7.18).
"""

from __future__ import annotations

from random import Random

from ..case import Case
from ..formats import integer, to_signed, width_of

WORD = 0xFFFFFFFF


def counts() -> list[Case]:
    cases = []
    for t in ("b32", "b64"):
        width = width_of(t)

        def clz(a: int, width: int = width) -> int:
            return width - a.bit_length()

        def brev(a: int, width: int = width) -> int:
            return int(f"{a:0{width}b}"[::-1], 2)

        cases += [
            Case(f"popc.{t}", ("u32",), (t,), lambda a: bin(a).count("1")),
            Case(f"clz.{t}", ("u32",), (t,), clz),
            Case(f"brev.{t}", (t,), (t,), brev),
        ]
    for t in ("u32", "s32", "u64", "s64"):
        width = width_of(t)

        def bfind(a: int, t: str = t, amount: bool = False) -> int:
            value = integer(t, a)
            top = (~value if value < 0 else value).bit_length() - 1
            if top < 0:
                return WORD
            return width_of(t) - 1 - top if amount else top

        cases.append(Case(f"bfind.{t}", ("u32",), (t,), bfind))
        shifted = lambda a, f=bfind: f(a, amount=True)  # noqa: E731
        cases.append(Case(f"bfind.shiftamt.{t}", ("u32",), (t,), shifted))
    return cases


#: Positions and lengths around every edge; only the low bytes count for bfe and bfi.
FIELD = "choices32:0,1,2,7,8,10,1f,20,21,3e,3f,40,41,7f,fe,ff,100,101,1ff,80000004,ffffffff"


def fields() -> list[Case]:
    cases = []
    for t in ("u32", "s32", "u64", "s64"):

        def bfe(a: int, b: int, c: int, t: str = t) -> int:
            msb = width_of(t) - 1
            position, length = b & 0xFF, c & 0xFF
            sign = 0
            if t[0] == "s" and length:
                sign = a >> min(position + length - 1, msb) & 1
            d = 0
            for i in range(msb + 1):
                inside = i < length and position + i <= msb
                d |= (a >> (position + i) & 1 if inside else sign) << i
            return d

        cases.append(Case(f"bfe.{t}", (t,), (t, FIELD, FIELD), bfe))
    for t in ("b32", "b64"):

        def bfi(a: int, b: int, c: int, d: int, t: str = t) -> int:
            msb = width_of(t) - 1
            position, length = c & 0xFF, d & 0xFF
            result = b
            for i in range(length):
                if position + i > msb:
                    break
                bit = 1 << (position + i)
                result = result | bit if a >> i & 1 else result & ~bit
            return result

        cases.append(Case(f"bfi.{t}", (t,), (t, t, FIELD, FIELD), bfi))
    for mode in ("clamp", "wrap"):

        def bmsk(a: int, b: int, mode: str = mode) -> int:
            start, width = a & 31, b & 31
            low = WORD << start & WORD
            if mode == "clamp" and a >= 32:
                low = 0
            over = start + width >= 32 or (mode == "clamp" and (a >= 32 or b >= 32))
            above = 0 if over else WORD << (start + width) & WORD
            return low & ~above

        cases.append(Case(f"bmsk.{mode}.b32", ("b32",), (FIELD, FIELD), bmsk))
        for t in ("u32", "s32"):

            def szext(a: int, b: int, mode: str = mode, t: str = t) -> int:
                n = b & 31
                if mode == "clamp" and b >= 32:
                    return a
                kept = a & ((1 << n) - 1)
                if t == "s32" and n and a >> (n - 1) & 1:
                    return kept | WORD << n & WORD
                return kept

            cases.append(Case(f"szext.{mode}.{t}", (t,), (t, FIELD), szext))
    return cases


def words() -> list[Case]:
    cases = []
    for mode in ("clamp", "wrap"):

        def amount(c: int, mode: str = mode) -> int:
            return min(c, 32) if mode == "clamp" else c & 31

        def left(a: int, b: int, c: int, amount=amount) -> int:
            n = amount(c)
            return (b << n | a >> (32 - n)) & WORD

        def right(a: int, b: int, c: int, amount=amount) -> int:
            n = amount(c)
            return (b << (32 - n) | a >> n) & WORD

        cases.append(Case(f"shf.l.{mode}.b32", ("b32",), ("b32", "b32", FIELD), left))
        cases.append(Case(f"shf.r.{mode}.b32", ("b32",), ("b32", "b32", FIELD), right))
    random = Random("lop3")
    for table in (0, 0xFF, 0x80, 0xFE, 0x96, 0xE8, 0x1A, 0xCA, *random.sample(range(256), 8)):

        def lop3(a: int, b: int, c: int, table: int = table) -> int:
            d = 0
            for i in range(32):
                index = (a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)
                d |= (table >> index & 1) << i
            return d

        body = f"lop3.b32 {{d0}}, {{a0}}, {{a1}}, {{a2}}, {table:#x};"
        cases.append(Case("lop3.b32", ("b32",), ("b32",) * 3, lop3, body, count=128))
    cases += permutations()
    bases = "choices32:" + ",".join(f"{v:x}" for v in range(32))
    offsets = "choices32:0,1,2,3,5,1f,20,21,ffffffff,fffffffe,fffffffb,ffffffe0,80000000,7fffffff"
    cases.append(Case("fns.b32", ("b32",), ("b32", bases, offsets), fns))
    return cases


def fns(mask: int, base: int, offset_bits: int) -> int:
    """9.7.1.17."""
    offset = to_signed(offset_bits, 32)
    if offset == 0:
        return base if mask >> base & 1 else WORD
    position, count, step = base, abs(offset) - 1, 1 if offset > 0 else -1
    while 0 <= position < 32:
        if mask >> position & 1:
            if count == 0:
                return position
            count -= 1
        position += step
    return WORD


#: Bytes 3, 2, 1, 0 of the result for the selectors 0 to 3 (9.7.9.7, table of the modes).
PERMUTE = {
    "f4e": ((3, 2, 1, 0), (4, 3, 2, 1), (5, 4, 3, 2), (6, 5, 4, 3)),
    "b4e": ((5, 6, 7, 0), (6, 7, 0, 1), (7, 0, 1, 2), (0, 1, 2, 3)),
    "rc8": ((0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)),
    "ecl": ((3, 2, 1, 0), (3, 2, 1, 1), (3, 2, 2, 2), (3, 3, 3, 3)),
    "ecr": ((0, 0, 0, 0), (1, 1, 1, 0), (2, 2, 1, 0), (3, 2, 1, 0)),
    "rc16": ((1, 0, 1, 0), (3, 2, 3, 2), (1, 0, 1, 0), (3, 2, 3, 2)),
}


def permutations() -> list[Case]:
    def prmt(a: int, b: int, c: int) -> int:
        both = b << 32 | a
        d = 0
        for k in range(4):
            selector = c >> 4 * k & 15
            byte = both >> 8 * (selector & 7) & 0xFF
            if selector & 8:
                byte = 0xFF if byte & 0x80 else 0
            d |= byte << 8 * k
        return d

    cases = [Case("prmt.b32", ("b32",), ("b32",) * 3, prmt)]
    for mode, table in PERMUTE.items():

        def moded(a: int, b: int, c: int, table=table) -> int:
            both = b << 32 | a
            chosen = table[c & 3]
            return sum((both >> 8 * chosen[3 - k] & 0xFF) << 8 * k for k in range(4))

        cases.append(Case(f"prmt.b32.{mode}", ("b32",), ("b32",) * 3, moded))
    return cases


def part(value: int, width: int, index: int, signed: bool) -> int:
    bits = value >> width * index & ((1 << width) - 1)
    return to_signed(bits, width) if signed else bits


def products() -> list[Case]:
    cases = []
    for ta in ("u32", "s32"):
        for tb in ("u32", "s32"):
            sa, sb = ta == "s32", tb == "s32"
            tc = "s32" if sa or sb else "u32"

            def dp4a(a: int, b: int, c: int, sa: bool = sa, sb: bool = sb) -> int:
                total = sum(part(a, 8, k, sa) * part(b, 8, k, sb) for k in range(4))
                return (total + c) & WORD

            cases.append(Case(f"dp4a.{ta}.{tb}", (tc,), (ta, tb, tc), dp4a))
            for half, first in (("lo", 0), ("hi", 2)):

                def dp2a(
                    a: int, b: int, c: int, sa: bool = sa, sb: bool = sb, first: int = first
                ) -> int:
                    total = sum(part(a, 16, k, sa) * part(b, 8, first + k, sb) for k in range(2))
                    return (total + c) & WORD

                cases.append(Case(f"dp2a.{half}.{ta}.{tb}", (tc,), (ta, tb, tc), dp2a))
    return cases


def differences() -> list[Case]:
    """vabsdiff2 and vabsdiff4: |a - b| of each part, side by side or added to c (9.7.18)."""
    cases = []
    for lanes in (2, 4):
        width = 32 // lanes
        for td in ("u32", "s32"):
            for ta in ("u32", "s32"):
                for tb in ("u32", "s32"):
                    cases += difference_cases(lanes, width, td, ta, tb)
    return cases


def difference_cases(lanes: int, width: int, td: str, ta: str, tb: str) -> list[Case]:
    def parts(a: int, b: int) -> list[int]:
        return [
            abs(part(a, width, k, ta == "s32") - part(b, width, k, tb == "s32"))
            for k in range(lanes)
        ]

    def beside(a: int, b: int, c: int) -> int:
        return sum((d & ((1 << width) - 1)) << width * k for k, d in enumerate(parts(a, b)))

    def added(a: int, b: int, c: int) -> int:
        return (sum(parts(a, b)) + c) & WORD

    name, types = f"vabsdiff{lanes}.{td}.{ta}.{tb}", (ta, tb, td)
    return [
        Case(name, (td,), types, beside, count=128),
        Case(f"{name}.add", (td,), types, added, count=128),
    ]


def cases() -> list[Case]:
    return [*counts(), *fields(), *words(), *products(), *differences()]
