"""Operands: the extreme values of each type in every combination, and random ones."""

from __future__ import annotations

import itertools
from random import Random

from .formats import FORMATS, Format, width_of


def float_extremes(fmt: Format) -> list[int]:
    """Zeros, subnormals, the ends of the normal range, infinities, NaNs with payloads."""
    one, quiet = fmt.one, fmt.quiet
    half_exponent = 1 << fmt.fraction_bits
    magnitudes = [
        0,
        1,
        (1 << fmt.fraction_bits) - 1,
        1 << fmt.fraction_bits,
        (1 << fmt.fraction_bits) + 1,
        one - half_exponent,
        one - 1,
        one,
        one + 1,
        one + half_exponent // 2,
        one + half_exponent,
        fmt.infinity - half_exponent,
        fmt.infinity - 1,
        fmt.infinity,
        fmt.infinity | quiet,
        fmt.infinity | quiet | 5,
        fmt.infinity | 3,
    ]
    return [m | s for m in magnitudes for s in (0, fmt.sign)]


def integer_extremes(width: int) -> list[int]:
    """The ends of both ranges, small numbers, single bits and patterns."""
    top = 1 << (width - 1)
    ones = (1 << width) - 1
    pattern = ones // 3
    values = [0, 1, 2, 3, ones, ones - 1, top, top - 1, top + 1, pattern, ones ^ pattern, top >> 1]
    values += [width - 1, width, width + 1, 0xFF & ones, (ones // 255) & ones, 1 << (width // 2)]
    return list(dict.fromkeys(values))


def extremes(type_name: str) -> list[int]:
    if type_name in FORMATS:
        return float_extremes(FORMATS[type_name])
    if type_name == "pred":
        return [0, 1]
    if type_name in ("f16x2", "bf16x2"):
        single = float_extremes(FORMATS[type_name[:-2]])
        return [low | high << 16 for low, high in zip(single, reversed(single), strict=True)]
    return integer_extremes(width_of(type_name))


def random_float(fmt: Format, random: Random) -> int:
    kind = random.random()
    if kind < 0.25:
        return random.getrandbits(fmt.width)
    sign = random.getrandbits(1) * fmt.sign
    if kind < 0.3:  # subnormal
        return sign | random.getrandbits(fmt.fraction_bits)
    spread = fmt.fraction_bits + 3 if kind < 0.7 else 3
    bias = fmt.one >> fmt.fraction_bits
    exponent = min(max(bias + random.randint(-spread, spread), 1), 2 * bias)
    fraction = random.getrandbits(fmt.fraction_bits)
    if random.random() < 0.3:  # few bits, so that sums cancel and halves meet
        fraction &= ~((1 << random.randint(0, fmt.fraction_bits)) - 1)
    return sign | exponent << fmt.fraction_bits | fraction


def random_value(type_name: str, random: Random) -> int:
    if type_name in FORMATS:
        return random_float(FORMATS[type_name], random)
    if type_name == "pred":
        return random.getrandbits(1)
    if type_name in ("f16x2", "bf16x2"):
        fmt = FORMATS[type_name[:-2]]
        return random_float(fmt, random) | random_float(fmt, random) << 16
    width = width_of(type_name)
    if random.random() < 0.5:
        return random.getrandbits(width)
    value = random.getrandbits(random.randint(1, width))
    return -value & ((1 << width) - 1) if random.random() < 0.3 else value


def operand_rows(types: tuple[str, ...], count: int, seed: str) -> list[tuple[int, ...]]:
    """`count` rows of operands: about two thirds from the extremes, the rest random.

    Besides PTX's types there are "choices32:1,2a" (a register of 32 bits that holds one of these,
    in hexadecimal) and "wide32:s8" (the type in the low part of such a register).
    """
    random = Random(seed)
    pools = [_pool(t) for t in types]
    total = 1
    for pool in pools:
        total *= len(pool)
    wanted = count * 2 // 3
    if total <= wanted:
        rows = list(itertools.product(*pools))
    else:
        rows = [tuple(random.choice(pool) for pool in pools) for _ in range(wanted)]
    while len(rows) < count:
        row = [_random(t, random) for t in types]
        if len(row) > 1 and types[0] == types[1] and random.random() < 0.1:
            row[1] = row[0]
        rows.append(tuple(row))
    random.shuffle(rows)
    return rows


def register_width(type_name: str) -> int:
    """Bits of the register that holds an operand or a result."""
    for prefix in ("choices", "wide"):
        if type_name.startswith(prefix):
            return int(type_name.removeprefix(prefix).partition(":")[0])
    return max(16, width_of(type_name)) if type_name != "pred" else 32


def _widen(type_name: str, value: int, above: int) -> int:
    low, width = width_of(type_name.partition(":")[2]), register_width(type_name)
    return value | (above << low) & ((1 << width) - 1)


def _pool(type_name: str) -> list[int]:
    if type_name.startswith("choices"):
        return [int(v, 16) for v in type_name.partition(":")[2].split(",")]
    if type_name.startswith("wide"):
        inner = extremes(type_name.partition(":")[2])
        patterns = (0, -1, 0x5A5A5A5A5A5A5A5A)
        return [_widen(type_name, v, above) for above in patterns for v in inner]
    return extremes(type_name)


def _random(type_name: str, random: Random) -> int:
    if type_name.startswith("choices"):
        return random.choice(_pool(type_name))
    if type_name.startswith("wide"):
        inner = random_value(type_name.partition(":")[2], random)
        return _widen(type_name, inner, random.getrandbits(64))
    return random_value(type_name, random)
