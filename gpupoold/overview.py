"""Things together with what is going on in them, as lists show them."""

from __future__ import annotations

from dataclasses import dataclass

from gpupoold.model import GpuState, Health, Lease, Slice
from gpupoold.slices.planning import Room


@dataclass(frozen=True)
class SliceView:
    """A slice with what is going on in it."""

    piece: Slice
    lease: Lease | None
    used_bytes: int
    sessions: int
    gpu_health: Health


@dataclass(frozen=True)
class GpuView:
    """A card with what it has promised."""

    state: GpuState
    room: Room
    slices: int
    sessions: int
