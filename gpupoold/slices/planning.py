"""Which card a slice goes to, and whether there is room. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpupoold.errors import Conflict, InvalidRequest, NoCapacity, NoRoom, NotFound, NotInThisRelease
from gpupoold.model import (
    NAME_PATTERN,
    PRIORITY_RANGE,
    GpuMode,
    GpuState,
    Health,
    Slice,
    SliceKind,
    SliceMode,
)

#: a UUID, also as a GPU's, in any case of the letters
_UUID_LIKE = re.compile(
    r"(?:(?:GPU|MIG)-)?[0-9a-f]{8}(?:-?[0-9a-f]{4}){3}-?[0-9a-f]{12}", re.IGNORECASE
)
MEMORY_MAX_MIB = 1 << 34  # 16 PiB: above any card, below any overflow


@dataclass(frozen=True)
class Request:
    """What is asked for. gpu: uuid, an unambiguous beginning of one, an index, or empty."""

    name: str
    compute_percent: int
    memory_mib: int
    kind: str = SliceKind.SHARED.value
    gpu: str = ""
    mode: str = SliceMode.HARD.value
    priority: int = 5
    profile: str = ""


@dataclass(frozen=True)
class Room:
    """What a card has promised and what is left."""

    usable_mib: int
    allocated_mib: int
    allocated_percent: int

    @property
    def free_mib(self) -> int:
        """MiB that can still be promised, never below 0."""
        return max(0, self.usable_mib - self.allocated_mib)

    @property
    def free_percent(self) -> int:
        """Percent that can still be promised, never below 0."""
        return max(0, 100 - self.allocated_percent)


@dataclass(frozen=True)
class Plan:
    """Where the slice goes."""

    gpu_uuid: str
    kind: SliceKind
    mode: SliceMode


def is_reserved(name: str) -> bool:
    """Whether a name could be mistaken for a slice's id or virtual UUID, of now or later."""
    return _UUID_LIKE.fullmatch(name) is not None


def find_slice(slices: Iterable[Slice], wanted: str) -> Slice | None:
    """The slice of this id or virtual UUID; else, and only then, of this name."""
    pieces = list(slices)
    for piece in pieces:
        if wanted in (piece.id, piece.virtual_uuid):
            return piece
    return next((piece for piece in pieces if piece.name == wanted), None)


def check_name(name: str) -> None:
    """Raises InvalidRequest if a slice cannot have this name."""
    if not NAME_PATTERN.fullmatch(name):
        raise InvalidRequest(
            f"{name!r} cannot be a slice's name: 1 to 63 of A-Z a-z 0-9 . _ - are allowed, the "
            "first a letter or digit"
        )
    if is_reserved(name):
        raise InvalidRequest(
            f"{name!r} cannot be a slice's name: it has the form of a UUID, by which slices are "
            "found too"
        )


def check_size(compute_percent: int, memory_mib: int) -> None:
    """Raises InvalidRequest if no card could have a slice of this size."""
    if not 1 <= compute_percent <= 100:
        raise InvalidRequest(
            f"compute is a whole percentage of one GPU from 1 to 100, not {compute_percent}"
        )
    if not 1 <= memory_mib <= MEMORY_MAX_MIB:
        raise InvalidRequest(f"memory is at least 1 MiB, not {memory_mib}")


def check_request(request: Request) -> tuple[SliceKind, SliceMode]:
    """The kind and mode asked for; raises InvalidRequest or NotInThisRelease."""
    check_name(request.name)
    try:
        kind = SliceKind(request.kind or SliceKind.SHARED.value)
    except ValueError:
        raise InvalidRequest(f"no kind of slice is called {request.kind}") from None
    if kind != SliceKind.SHARED:
        raise NotInThisRelease(f"slices of kind {kind.value} are not in this release, only shared")
    if request.profile:
        raise InvalidRequest("a profile belongs to kind mig; a shared slice has none")
    try:
        mode = SliceMode(request.mode or SliceMode.HARD.value)
    except ValueError:
        raise InvalidRequest(f"no mode is called {request.mode}: hard or elastic") from None
    low, high = PRIORITY_RANGE
    if not low <= request.priority <= high:
        raise InvalidRequest(f"a priority is from {low} to {high}, not {request.priority}")
    check_size(request.compute_percent, request.memory_mib)
    return kind, mode


def room_of(state: GpuState, slices: Iterable[Slice]) -> Room:
    """What the card has promised to those of the slices that are on it."""
    mine = [piece for piece in slices if piece.gpu_uuid == state.gpu.uuid]
    return Room(
        state.usable_mib,
        sum(piece.memory_mib for piece in mine),
        sum(piece.compute_percent for piece in mine),
    )


def find_gpu(states: Sequence[GpuState], wanted: str) -> GpuState:
    """The card meant by a uuid, an unambiguous beginning of it, or an index; raises NotFound."""
    if wanted.isdecimal() and len(wanted) < 4:
        found = [s for s in states if s.gpu.index == int(wanted) and s.health != Health.MISSING]
    else:
        found = [s for s in states if s.gpu.uuid == wanted] or [
            s for s in states if len(wanted) >= 4 and s.gpu.uuid.lower().startswith(wanted.lower())
        ]
    if not found:
        raise NotFound(f"there is no GPU {wanted} on this host; `gpu list` shows those there are")
    if len(found) > 1:
        raise NotFound(f"{wanted} is the beginning of more than one GPU's UUID")
    return found[0]


def _obstacle(state: GpuState, room: Room, compute: int, memory: int) -> str:
    """Why the card does not take it; empty: it does."""
    if state.health in (Health.FAILED, Health.MISSING):
        return f"is {state.health.value} ({state.health_reason})"
    if state.drained:
        return "is drained"
    if state.mode != GpuMode.SHARED:
        return f"is in mode {state.mode.value}"
    if room.free_mib < memory and room.free_percent < compute:
        return f"has {room.free_mib} MiB and {room.free_percent} % left"
    if room.free_mib < memory:
        return f"has {room.free_mib} MiB left"
    if room.free_percent < compute:
        return f"has {room.free_percent} % of its compute left"
    return ""


def plan_slice(
    request: Request, states: Sequence[GpuState], slices: Sequence[Slice], policy: str = "pack"
) -> Plan:
    """Chooses the card. policy: pack (fullest card with room) or spread (emptiest).

    Raises InvalidRequest, NotInThisRelease, NotFound (no such card), Conflict (the named card
    takes none now), NoCapacity. Whether the name is free is for the store to say.
    """
    kind, mode = check_request(request)
    if not states:
        raise NoRoom("this host has no GPU")
    what = f"{request.compute_percent} % and {request.memory_mib} MiB"
    if request.gpu:
        state = find_gpu(states, request.gpu)
        room = room_of(state, slices)
        why = _obstacle(state, room, request.compute_percent, request.memory_mib)
        if why:
            error = NoCapacity if why.startswith("has ") else Conflict
            raise error(f"GPU {state.gpu.uuid} does not take {what}: it {why}")
        return Plan(state.gpu.uuid, kind, mode)

    fitting = []
    reasons = []
    for state in states:
        room = room_of(state, slices)
        why = _obstacle(state, room, request.compute_percent, request.memory_mib)
        if why:
            reasons.append(f"GPU {state.gpu.index} {why}")
        else:
            fitting.append((_free_share(room), state.gpu.index, state))
    if not fitting:
        raise NoRoom(f"no GPU has room for {what}: {'; '.join(reasons)}")
    if policy == "spread":
        chosen = min(fitting, key=lambda entry: (-entry[0], entry[1]))
    else:
        chosen = min(fitting, key=lambda entry: (entry[0], entry[1]))
    return Plan(chosen[2].gpu.uuid, kind, mode)


def _free_share(room: Room) -> float:
    """How empty a card is, 0 to 1: the scarcer of its two resources."""
    memory = room.free_mib / room.usable_mib if room.usable_mib else 0.0
    return min(memory, room.free_percent / 100)


def check_resize(
    piece: Slice,
    compute_percent: int,
    memory_mib: int,
    state: GpuState,
    slices: Sequence[Slice],
    used_bytes: int,
) -> None:
    """Raises if the slice cannot have the new size now.

    A slice shrinks on any card; it grows only on one that would take a new slice.
    """
    check_size(compute_percent, memory_mib)
    if memory_mib << 20 < used_bytes:
        raise Conflict(
            f"slice {piece.name} uses {-(-used_bytes // (1 << 20))} MiB now and cannot shrink to "
            f"{memory_mib} MiB"
        )
    if compute_percent <= piece.compute_percent and memory_mib <= piece.memory_mib:
        return
    others = [other for other in slices if other.id != piece.id]
    room = room_of(state, others)
    why = _obstacle(state, room, compute_percent, memory_mib)
    if why:
        error = NoCapacity if why.startswith("has ") else Conflict
        raise error(
            f"slice {piece.name} cannot grow to {compute_percent} % and {memory_mib} MiB: without "
            f"it GPU {state.gpu.uuid} {why}"
        )
