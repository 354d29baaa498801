"""What this host has of others.

A slice of another host is stored before that is asked for it, so that whatever ends this process
leaves nothing behind: what is only asked for is forgotten at the next start, and the other host
ends a loan that this one does not name. A loan that is given back is remembered until the other
host knows.
"""

from __future__ import annotations

import ipaddress
import logging
import secrets
import socket
import threading
import time
import uuid
from dataclasses import dataclass

from gpupoold.api.gpupool_pb2 import Gpu
from gpupoold.conf import PeerSettings
from gpupoold.errors import Conflict, NoCapacity, NoRoom, NotFound, PoolError
from gpupoold.hosts import peer_pb2 as pb
from gpupoold.hosts.client import PeerClient, PeerUnavailable
from gpupoold.leases.new import new_lease
from gpupoold.model import (
    BorrowedState,
    Caller,
    GpuMode,
    Grant,
    Health,
    Lease,
    LeaseKind,
    Slice,
    SliceKind,
    SliceMode,
)
from gpupoold.pool import Pool
from gpupoold.slices import identity
from gpupoold.slices.planning import Request, check_request

LOG = logging.getLogger(__name__)

LOOK_SECONDS = 10.0  #: between two looks at another host
DESCRIBE_SECONDS = 5.0


@dataclass(frozen=True)
class PeerState:
    """What is known of another host."""

    peer: PeerSettings
    problem: str = "it was not asked yet"  # empty: it answered
    cards: tuple[Gpu, ...] = ()
    lends: bool = False
    seconds: float = 0.0  # that it took to answer

    def has_room(self, request: Request) -> bool:
        """Whether one of its cards would take the slice, as it seemed when it was asked last."""
        return self.lends and any(
            card.mode == GpuMode.SHARED
            and not card.drained
            and card.health in (Health.OK, Health.WARNING)
            and card.memory_free_mib >= request.memory_mib
            and 100 - card.compute_allocated_percent >= request.compute_percent
            for card in self.cards
        )


def relay_address(told: str, peer: str) -> str:
    """Where the relays' door of a host is, as a number: where it says, or, if it listens
    everywhere, at the address by which it is known. Raises PeerUnavailable."""
    host, _, port = told.rpartition(":")
    bare = host.strip("[]")
    if not bare or not port.isdecimal():
        raise PeerUnavailable(f"it tells no address of its relays' door: {told!r}")
    if ipaddress.ip_address(bare).is_unspecified:
        bare = peer.rpartition(":")[0].strip("[]")
    try:
        found = socket.getaddrinfo(bare, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise PeerUnavailable(f"its address {bare} is not known: {error}") from None
    number = found[0][4][0]
    return f"[{number}]:{port}" if ":" in str(number) else f"{number}:{port}"


class Borrowing:
    """Safe to use from several threads. Never asks another host while it holds the pool's lock."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._clients = {peer.name: PeerClient(pool.settings, peer) for peer in pool.settings.peers}
        self._states = {peer.name: PeerState(peer) for peer in pool.settings.peers}
        self._stop = threading.Event()
        self._wakes = {name: threading.Event() for name in self._clients}
        self._threads = [
            threading.Thread(
                target=self._look_after, args=(name,), name=f"host {name}", daemon=True
            )
            for name in self._clients
        ]

    def start(self) -> None:
        """Begins to look at the other hosts."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """What is borrowed stays so."""
        self._stop.set()
        for wake in self._wakes.values():
            wake.set()
        for thread in self._threads:
            thread.join(timeout=1)

    def states(self) -> list[PeerState]:
        """The other hosts as they were when they were asked last, in the configuration's order."""
        return [self._states[name] for name in self._clients]

    # ---- looking after --------------------------------------------------------------------------

    def slices_changed(self) -> None:
        """There may be something to give back."""
        for wake in self._wakes.values():
            wake.set()

    def _look_after(self, name: str) -> None:
        wake = self._wakes[name]
        while not self._stop.is_set():
            wake.clear()
            try:
                self.look(name)
            except Exception:
                LOG.exception("host %s could not be looked after", name)
            wake.wait(LOOK_SECONDS)

    def look(self, name: str) -> None:
        """Asks a host what it has, gives back what is not needed, and compares."""
        client, before = self._clients[name], self._states[name]
        start = time.monotonic()
        try:
            told = client.describe(DESCRIBE_SECONDS)
            seconds = time.monotonic() - start
            self._give_back(client)
            self._compare(client)
        except PoolError as error:
            self._states[name] = PeerState(before.peer, str(error))
            if before.problem != str(error):
                LOG.warning("%s", error)
            return
        if before.problem:
            LOG.info("host %s is there, version %s", name, told.version)
        self._states[name] = PeerState(before.peer, "", tuple(told.gpus), told.lends, seconds)

    def _give_back(self, client: PeerClient) -> None:
        for lease_id, host in self._pool.store.giving_back():
            if host != client.peer.name:
                continue
            try:
                client.give_back(lease_id)
            except NotFound:
                LOG.info("host %s did not have lease %s any more", host, lease_id)
            with self._pool.store.change(new_generation=False) as change:
                change.given_back(lease_id)

    def _compare(self, client: PeerClient) -> None:
        store, name = self._pool.store, client.peer.name
        held = {
            entry.grant.lease_id: entry.slice_id
            for entry in store.borrowed().values()
            if entry.host == name and entry.state == BorrowedState.HELD and entry.grant
        }
        unknown = [held[lease_id] for lease_id in client.compare(list(held)) if lease_id in held]
        if not unknown:
            return
        slices = {piece.id: piece for piece in store.slices()}
        with self._pool.lock, store.change() as change:
            for slice_id in unknown:
                if change.lose(slice_id) and slice_id in slices:
                    piece = slices[slice_id]
                    change.event(
                        "slice.lost",
                        piece.name,
                        f"host {name} does not know of it any more: its sessions end",
                        owner_uid=piece.owner_uid,
                    )
        self._pool.slices_changed()

    # ---- borrowing ------------------------------------------------------------------------------

    def nearest(self, request: Request) -> list[str]:
        """Hosts with room, those first that answered fastest."""
        fitting = [state for state in self.states() if state.has_room(request)]
        return [state.peer.name for state in sorted(fitting, key=lambda state: state.seconds)]

    def borrow(
        self, caller: Caller, request: Request, host: str, kind: LeaseKind, *, temporary: bool
    ) -> tuple[Slice, Lease]:
        """A slice of another host, leased to the caller.

        Raises NotFound (no such host), PeerUnavailable, and what the host says.
        """
        client = self._clients.get(host)
        if client is None:
            known = ", ".join(self._clients) or "there is none"
            raise NotFound(f"there is no host {host} among the peers of this one: {known}")
        _, mode = check_request(request)
        pool = self._pool
        with pool.lock:
            slices = pool.store.slices()
            pool.check_new(caller, request, slices)
            piece = Slice(
                id=str(uuid.uuid4()),
                name=request.name,
                kind=SliceKind.SHARED,
                gpu_uuid="",
                compute_percent=request.compute_percent,
                memory_mib=request.memory_mib,
                mode=SliceMode(mode),
                priority=request.priority,
                virtual_uuid=identity.new_virtual_uuid(),
                pci_address=identity.free_pci_address(other.pci_address for other in slices),
                owner_uid=caller.uid,
                temporary=temporary,
                created_at=time.time(),
                host=host,
            )
            with pool.store.change() as change:
                change.add_slice(piece)
                change.ask_for(piece.id)
        try:
            grant = self._ask(client, piece, request.gpu)
        except PoolError:
            # What the host may have made all the same ends, since it is not named to it.
            with pool.lock, pool.store.change() as change:
                change.delete_slice(piece.id)
            raise
        lease = new_lease(kind, caller.uid, piece.id)
        with pool.lock, pool.store.change() as change:
            wanted = change.hold(piece.id, grant)
            if wanted:
                change.add_lease(lease)
                change.event(
                    "slice.created",
                    piece.name,
                    f"{piece.compute_percent} % and {piece.memory_mib} MiB of GPU "
                    f"{grant.gpu_uuid} of host {host}",
                    owner_uid=caller.uid,
                )
            else:
                change.give_back(grant.lease_id, host)
        if not wanted:
            self.slices_changed()
            raise Conflict(f"slice {piece.name} was deleted before host {host} gave it")
        return next(other for other in pool.store.slices() if other.id == piece.id), lease

    def _ask(self, client: PeerClient, piece: Slice, gpu: str) -> Grant:
        loan = client.borrow(
            pb.BorrowRequest(
                request=secrets.token_bytes(16),
                time=time.time(),
                consumer=f"{piece.name} of user {piece.owner_uid}",
                compute_percent=piece.compute_percent,
                memory_mib=piece.memory_mib,
                mode=piece.mode.value,
                priority=piece.priority,
                gpu=gpu,
            )
        )
        try:
            address = relay_address(loan.relay_address, client.peer.address)
            lease_id = str(uuid.UUID(loan.lease))
        except (PeerUnavailable, ValueError) as error:
            raise PeerUnavailable(f"host {client.peer.name}: {error}") from None
        return Grant(lease_id, address, loan.gpu_uuid, loan.key, loan.snapshot)

    def borrow_anywhere(
        self, caller: Caller, request: Request, local: NoRoom
    ) -> tuple[Slice, Lease]:
        """A slice for one process on the nearest host that has one. `local`: why this host has
        none. Raises NoCapacity with what each said."""
        reasons: list[str] = [str(local)]
        for host in self.nearest(request):
            try:
                return self.borrow(caller, request, host, LeaseKind.RUN, temporary=True)
            except (NoCapacity, PeerUnavailable, Conflict) as error:
                reasons.append(str(error))
        asked = len(reasons) > 1
        for state in self.states():
            if state.problem:
                reasons.append(state.problem)
            elif not asked:
                reasons.append(f"host {state.peer.name} has no room for it, or lends nothing")
        raise NoRoom("; ".join(dict.fromkeys(reasons)))
