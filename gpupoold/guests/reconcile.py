"""What is to be done for one domain, from what is and what should be. Pure functions.

A domain has a lease exactly while it runs and asks for a slice in its (live) metadata. Events play
no part: whatever was missed or told twice, the same state leads to the same actions, and when they
are done there are none left.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gpupoold.guests.request import GuestRequest, Held
from gpupoold.model import Guest, ProcessIdentity


@dataclass(frozen=True)
class Seen:
    """A domain that is active (its QEMU process is there), as libvirt says.

    crashed: its guest panicked and it is kept for a look. settled: it runs or is paused by
    somebody, and nothing long (a migration, a save) is under way: devices can be changed.
    """

    uuid: str
    name: str
    asks: bool
    request: GuestRequest | None
    grant: str = ""
    channel: Held = Held.NONE
    region: Held = Held.NONE
    crashed: bool = False
    settled: bool = True
    port_path: str = ""  # of a channel that is ours: the host's socket
    port_unused: bool = False  # nobody in the guest has it open
    vsock: Held = Held.NONE
    vsock_cid: int = 0
    qemu: ProcessIdentity | None = None  # None: not known


@dataclass(frozen=True)
class End:
    """The lease ends."""

    guest: Guest
    why: str


@dataclass(frozen=True)
class Grant:
    """The domain gets a lease."""

    seen: Seen


@dataclass(frozen=True)
class DropRequest:
    """The live request goes, so that what an operator took is not granted again."""

    seen: Seen


@dataclass(frozen=True)
class Attach:
    """A device of the lease is missing: "region", "vsock" or "channel"."""

    seen: Seen
    guest: Guest
    what: str


@dataclass(frozen=True)
class Detach:
    """A device of ours is left: "region", "vsock" or "channel"."""

    seen: Seen
    what: str


@dataclass(frozen=True)
class WriteGrant:
    """The grant in the metadata is not that of the lease."""

    seen: Seen
    guest: Guest


@dataclass(frozen=True)
class RemoveGrant:
    """A grant in the metadata of which the lease is gone."""

    seen: Seen


@dataclass(frozen=True)
class WriteHeader:
    """The region's header is not that of the lease."""

    guest: Guest


@dataclass(frozen=True)
class SetPort:
    """The guest's port is at another path than the broker was told, or gone; or its vsock cid."""

    guest: Guest
    path: str
    vsock_cid: int
    qemu: ProcessIdentity | None = None  # that has it


@dataclass(frozen=True)
class EndSessions:
    """Sessions of programs that nobody in the guest carries any more."""

    guest: Guest
    sessions: tuple[str, ...]


@dataclass(frozen=True)
class Forget:
    """The region of an ended lease is in use no more: remove it, and the last trace."""

    guest: Guest


Action = (
    End
    | Grant
    | DropRequest
    | Attach
    | Detach
    | WriteGrant
    | RemoveGrant
    | WriteHeader
    | SetPort
    | EndSessions
    | Forget
)


def decide(
    seen: Seen | None,
    guests: Sequence[Guest],
    leases: Collection[str],
    *,
    attach_devices: bool,
    attach_vsock: bool = False,
    stale_headers: Collection[str] = (),
    carried: Sequence[str] = (),
) -> list[Action]:
    """The next actions for one domain, in order; what follows from them comes at the next look.

    seen: None if the domain is not active. guests: the domain's, read before the domain was looked
    at (a lease that is granted in between is not to be judged by the older look). leases: those
    that exist. stale_headers: the guests whose region has not the right header. carried: the
    sessions whose calls or bells go through the domain's port, read before the domain was looked
    at: whoever carried them then has gone, if the port is unused now.
    """
    live = next((guest for guest in guests if guest.ended_at is None), None)
    gone = [guest for guest in guests if guest.ended_at is not None]
    if live is not None and live.id not in leases:
        drop: list[Action] = [DropRequest(seen)] if seen is not None and seen.asks else []
        return [*drop, End(live, "its slice was deleted")]
    if live is not None:
        why = _why_over(seen, live)
        if why:
            return [End(live, why)]
        assert seen is not None
        actions: list[Action] = [Forget(guest) for guest in gone]
        if live.id in stale_headers and seen.settled:
            actions.append(WriteHeader(live))
        if attach_devices and seen.settled:
            if seen.region == Held.NONE and live.region_path:
                actions.append(Attach(seen, live, "region"))
            # The guest's service looks for its host as soon as one of these is there: the better
            # one first.
            if attach_vsock and seen.vsock == Held.NONE:
                actions.append(Attach(seen, live, "vsock"))
            if seen.channel == Held.NONE:
                actions.append(Attach(seen, live, "channel"))
        # As soon as QEMU ends, its CID may be another machine's: the CID counts only together with
        # the process, of which the broker sees the end at once.
        cid = seen.vsock_cid if seen.qemu is not None else 0
        where = SetPort(live, seen.port_path, cid, seen.qemu if cid else None)
        if where != SetPort(live, live.port_path, live.vsock_cid, live.qemu):
            actions.append(where)
        if seen.port_unused and seen.settled and carried:
            actions.append(EndSessions(live, tuple(carried)))
        if seen.grant != live.id and seen.settled:
            actions.append(WriteGrant(seen, live))
        return actions
    if seen is None:
        return [Forget(guest) for guest in gone]
    return _without_lease(seen, gone)


def _why_over(seen: Seen | None, live: Guest) -> str:
    if seen is None:
        return "the virtual machine is off"
    if None not in (live.qemu, seen.qemu) and live.qemu != seen.qemu:
        return "the virtual machine was off in between"
    if seen.crashed:
        return "the virtual machine crashed"
    if not seen.asks:
        return "the request was taken from the virtual machine"
    return ""


def _without_lease(seen: Seen, gone: Sequence[Guest]) -> list[Action]:
    actions: list[Action] = []
    if seen.settled:
        if seen.region == Held.OURS:
            actions.append(Detach(seen, "region"))
        if seen.channel == Held.OURS:
            actions.append(Detach(seen, "channel"))
        if seen.vsock == Held.OURS:
            actions.append(Detach(seen, "vsock"))
        if seen.grant:
            actions.append(RemoveGrant(seen))
    if seen.region != Held.OURS:
        # Until then the file stays: a new region of this name could not be told from the old one.
        actions += [Forget(guest) for guest in gone]
        if seen.request is not None and not seen.crashed:
            actions.append(Grant(seen))
    return actions
