"""How much of a pool's free capacity an expected mix of requests cannot use.

The measure is that of Weng et al., "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with
Fragmentation Gradient Descent" (USENIX ATC 2023), for shared slices: the free part of a card counts
as unusable for a request that does not fit it; the mean over the mix, weighted by how often each
shape occurs, is the card's fragmentation. A request goes where it raises the sum least.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Free:
    """What is free on one card: compute in percent of it, memory in MiB."""

    compute_percent: int
    memory_mib: int


@dataclass(frozen=True)
class Shape:
    """A request and how often it is expected; only the weights' ratios matter."""

    compute_percent: int
    memory_mib: int
    weight: float = 1.0


def fits(free: Free, shape: Shape) -> bool:
    """Whether the card has room for the request."""
    return shape.compute_percent <= free.compute_percent and shape.memory_mib <= free.memory_mib


def fragmentation(free: Free, mix: Sequence[Shape]) -> float:
    """Percent of the card's compute that is free and, over the mix, not usable: 0 to 100.

    Raises ValueError if the mix is empty or its weights do not add up to more than 0.
    """
    total = sum(shape.weight for shape in mix)
    if total <= 0 or any(shape.weight < 0 for shape in mix):
        raise ValueError("the mix needs weights that are not negative and not all 0")
    unusable = sum(shape.weight for shape in mix if not fits(free, shape))
    return free.compute_percent * unusable / total


def increase(free: Free, request: Shape, mix: Sequence[Shape]) -> float:
    """By how much the card's fragmentation changes if it takes the request.

    Raises ValueError if the request does not fit.
    """
    if not fits(free, request):
        raise ValueError("the request does not fit the card")
    after = Free(
        free.compute_percent - request.compute_percent, free.memory_mib - request.memory_mib
    )
    return fragmentation(after, mix) - fragmentation(free, mix)


def best(cards: Iterable[Free], request: Shape, mix: Sequence[Shape]) -> int | None:
    """The position of the card that the request should go to; None if it fits none.

    Of equal ones the fullest, then the first.
    """
    candidates = [
        (increase(free, request, mix), free.compute_percent, free.memory_mib, position)
        for position, free in enumerate(cards)
        if fits(free, request)
    ]
    return min(candidates)[3] if candidates else None
