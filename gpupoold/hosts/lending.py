"""What this host lends to others."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass

from gpupoold.conf import PeerSettings
from gpupoold.errors import (
    AlreadyExists,
    BrokerUnavailable,
    Conflict,
    InvalidRequest,
    NoCapacity,
    NotFound,
    PoolError,
)
from gpupoold.leases.new import new_lease
from gpupoold.model import Caller, Lease, LeaseKind, Lent, Slice, printable
from gpupoold.pool import Pool
from gpupoold.slices.planning import Request, check_request

LOG = logging.getLogger(__name__)

REQUEST_SECONDS = 60.0  #: a request that is older, or from the future, is not answered
NEW_SECONDS = 60.0  #: a loan whose answer may still be on its way to the borrower
CONSUMER_MAX = 200
ROOT = Caller(0, 0, True)


@dataclass(frozen=True)
class Wish:
    """What another host asks for."""

    request_id: bytes  # 16 bytes
    time: float  # seconds since the epoch
    consumer: str
    request: Request  # its name does not count


class Requests:
    """Those that were answered. Thread-safe."""

    def __init__(self, started_at: float) -> None:
        """started_at: what was seen before that is not known any more."""
        self._started_at = started_at
        self._lock = threading.Lock()
        self._seen: dict[bytes, float] = {}

    def take(self, wish: Wish, now: float) -> None:
        """Each once: raises AlreadyExists, Conflict (its time is wrong) or InvalidRequest."""
        if len(wish.request_id) != 16:
            raise InvalidRequest("a request's id has 16 bytes")
        if abs(now - wish.time) > REQUEST_SECONDS:
            raise Conflict(
                f"the request is {abs(now - wish.time):.0f} s "
                f"{'old' if now > wish.time else 'early'}: is one of the two clocks wrong?"
            )
        if wish.time < self._started_at:
            raise Conflict("the request is from before this gpupoold started: ask again")
        with self._lock:
            self._seen = {
                key: at for key, at in self._seen.items() if now - at <= 2 * REQUEST_SECONDS
            }
            if wish.request_id in self._seen:
                raise AlreadyExists("the request was answered already")
            self._seen[wish.request_id] = now


def check_limits(peer: PeerSettings, wish: Request, lent: Collection[Slice]) -> None:
    """Raises NoCapacity if the peer would have more than it may. lent: what it has."""
    if len(lent) >= peer.slices:
        raise NoCapacity(
            f"host {peer.name} has {len(lent)} slices of this host, and may have {peer.slices}"
        )
    for what, unit, most, have, more in (
        (
            "compute",
            " %",
            peer.compute_percent,
            sum(piece.compute_percent for piece in lent),
            wish.compute_percent,
        ),
        (
            "memory",
            " MiB",
            peer.memory_mib,
            sum(piece.memory_mib for piece in lent),
            wish.memory_mib,
        ),
    ):
        if most and have + more > most:
            raise NoCapacity(
                f"host {peer.name} has {have}{unit} of {what} of this host and may have "
                f"{most}{unit}: {more}{unit} more are too much"
            )


class Lending:
    """Grants and ends loans; safe to use from several threads."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._requests = Requests(time.time())

    def lend(self, peer: PeerSettings, wish: Wish) -> tuple[Lease, Slice, bytes]:
        """A slice and its lease for another host, and the device's snapshot.

        Raises what planning does, and AlreadyExists, Conflict, NoCapacity, BrokerUnavailable.
        """
        pool = self._pool
        self._requests.take(wish, time.time())
        lease_id = uuid.uuid4()
        request = Request(
            name=f"lent-{lease_id.hex[:16]}",
            compute_percent=wish.request.compute_percent,
            memory_mib=wish.request.memory_mib,
            gpu=wish.request.gpu,
            mode=wish.request.mode,
            priority=wish.request.priority,
        )
        check_request(request)
        if not pool.broker.connected or not pool.broker.relay_address:
            raise BrokerUnavailable(
                f"host {pool.settings.host} lends nothing now: "
                + (pool.broker.problem or "its relays' door is not open ([relay] listen)")
            )
        consumer = printable(wish.consumer)[:CONSUMER_MAX]
        with pool.lock:
            _, slices, leases, _ = pool.store.snapshot()
            lent = pool.store.lent()
            theirs = {
                slice_id
                for lease in leases
                if lease.id in lent and lent[lease.id].peer == peer.name
                for slice_id in lease.slice_ids
            }
            check_limits(peer, request, [piece for piece in slices if piece.id in theirs])
            piece = pool.plan(ROOT, request, slices, temporary=True)
            snapshot = pool.book.snapshot(piece.gpu_uuid)
            if not snapshot:
                raise BrokerUnavailable(
                    f"the broker of host {pool.settings.host} cannot use GPU {piece.gpu_uuid} yet: "
                    f"{pool.book.device_problem(piece.gpu_uuid) or 'it has not looked at it'}"
                )
            lease = new_lease(LeaseKind.PEER, ROOT.uid, piece.id)
            with pool.store.change() as change:
                change.add_slice(piece)
                change.add_lease(lease)
                change.lend(Lent(lease.id, peer.name, consumer))
                change.event(
                    "slice.lent",
                    piece.name,
                    f"to host {peer.name} for {consumer}: {piece.summary()}",
                    lease=lease.id,
                    host=peer.name,
                )
        try:
            applied = pool.broker.client.push()
            for refused in applied.refused:
                if refused.id == uuid.UUID(lease.id).bytes:
                    raise Conflict(
                        f"the broker of host {pool.settings.host} refused: {refused.sentence}"
                    )
        except PoolError:
            self.end(peer.name, lease.id, "the broker did not take it")
            raise
        pool.slices_changed(pushed=True)
        return lease, piece, snapshot

    def end(self, peer: str, lease_id: str, why: str) -> None:
        """Ends a loan; raises NotFound if the host has none of that id."""
        pool = self._pool
        with pool.lock:
            lent = pool.store.lent().get(lease_id)
            if lent is None or lent.peer != peer:
                raise NotFound(f"host {peer} has no lease {lease_id} of host {pool.settings.host}")
            lease = next(lease for lease in pool.store.leases() if lease.id == lease_id)
            names = pool.slice_names()
            with pool.store.change() as change:
                for slice_id in lease.slice_ids:
                    change.delete_slice(slice_id)
                change.delete_lease(lease_id)
                change.event(
                    "slice.given_back",
                    ",".join(names[slice_id] for slice_id in lease.slice_ids),
                    f"by host {peer}: {why}",
                    lease=lease_id,
                    host=peer,
                )
        pool.slices_changed()

    def compare(self, peer: str, theirs: Collection[str]) -> list[str]:
        """Ends what the host has and does not name; returns those named that it has not."""
        lent = {entry.lease_id for entry in self._pool.store.lent().values() if entry.peer == peer}
        made_at = {lease.id: lease.created_at for lease in self._pool.store.leases()}
        for lease_id in lent - set(theirs):
            if time.time() - made_at.get(lease_id, 0.0) > NEW_SECONDS:
                LOG.warning("host %s does not know its lease %s: it ends", peer, lease_id)
                try:
                    self.end(peer, lease_id, "it does not know of it")
                except NotFound:
                    continue
        return [lease_id for lease_id in theirs if lease_id not in lent]
