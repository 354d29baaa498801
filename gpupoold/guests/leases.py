"""Grants and ends the leases of virtual machines: each change is one transaction with the store.

Talks to no hypervisor: the hook's question is answered here while libvirt waits.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Iterable, Sequence

from gpupoold.errors import Conflict, NotFound, PoolError
from gpupoold.guests.region import Regions
from gpupoold.guests.request import GuestRequest, region_name
from gpupoold.leases.new import new_lease
from gpupoold.model import (
    Caller,
    Guest,
    Lease,
    LeaseKind,
    ProcessIdentity,
    Slice,
    printable,
)
from gpupoold.pool import Pool
from gpupoold.store.transaction import Transaction

LOG = logging.getLogger(__name__)

#: slices that are made for a virtual machine belong to root
ROOT = Caller(0, 0, True)
#: whose sessions need the guest's service, which has the port open
PORT_CARRIERS = ("virtio-serial", "ivshmem")
NAME_PART = 40  # of a slice's 63 characters


class GuestLeases:
    """Safe to use from several threads."""

    def __init__(self, pool: Pool, regions: Regions, *, with_region: bool) -> None:
        """with_region: make the shared region of each lease."""
        self._pool = pool
        self._store = pool.store
        self._regions = regions
        self._with_region = with_region

    # ---- reading --------------------------------------------------------------------------------

    def guests(self) -> list[Guest]:
        """All leases of virtual machines, with those of which something is left."""
        return self._store.guests()

    def live(self, domain_uuid: str) -> Guest | None:
        """The lease that the domain has."""
        return _live(self._store.guests(), domain_uuid)

    def lease_ids(self) -> set[str]:
        """The leases that exist."""
        return {lease.id for lease in self._store.leases()}

    # ---- changes --------------------------------------------------------------------------------

    def grant(
        self, domain_uuid: str, domain_name: str, request: GuestRequest, *, anew: bool = False
    ) -> Guest:
        """The domain's lease: the one it has, or a new one.

        anew: the domain starts, so a lease that it had is over and is ended in the same step.
        Raises NotFound, Conflict (the slice is in use), NoCapacity, RegionError.
        """
        with self._pool.lock:
            _, slices, leases, _ = self._store.snapshot()
            before = _live(self._store.guests(), domain_uuid)
            if before is not None and not anew:
                return before
            lease_id_before = before.id if before is not None else ""
            if request.name:
                piece = self._hand_made(request.name, slices, leases, lease_id_before)
            else:
                piece = self._made_for(domain_uuid, domain_name, request, slices, leases, before)
            self._pool.check_usable(piece)
            lease = new_lease(LeaseKind.VM, piece.owner_uid, piece.id)
            path, inode = "", 0
            if self._with_region:
                path, inode = self._regions.make(region_name(domain_uuid), lease.id)
            guest = Guest(
                id=lease.id,
                domain_uuid=domain_uuid,
                domain_name=printable(domain_name),
                slice_name=piece.name,
                owner_uid=piece.owner_uid,
                temporary=not request.name,
                region_path=path,
                region_inode=inode,
                epoch=1,
                created_at=lease.created_at,
            )
            try:
                with self._store.change() as change:
                    if before is not None:
                        self._end(change, before, "the virtual machine starts anew")
                    if guest.temporary:
                        change.add_slice(piece)
                    else:
                        # As it is now, not as it was before the line above.
                        change.execute(
                            "DELETE FROM leases WHERE id IN"
                            " (SELECT lease_id FROM lease_slices WHERE slice_id = ?)",
                            piece.id,
                        )
                    change.add_lease(lease)
                    change.add_guest(guest)
                    change.event(
                        "guest.granted",
                        piece.name,
                        f"the virtual machine {guest.domain_name} has the slice",
                        owner_uid=piece.owner_uid,
                        lease=lease.id,
                        domain=domain_uuid,
                    )
            except BaseException:
                if path:
                    self._regions.remove(path, inode)
                raise
        self._changed()
        return guest

    def _hand_made(
        self, name: str, slices: Sequence[Slice], leases: Sequence[Lease], lease_before: str
    ) -> Slice:
        piece = next((piece for piece in slices if piece.name == name), None)
        if piece is None:
            raise NotFound(f"there is no slice {name} on host {self._pool.settings.host}")
        lease = next((lease for lease in leases if piece.id in lease.slice_ids), None)
        if lease is None or lease.id == lease_before:
            return piece
        if lease.kind == LeaseKind.VM:
            holder = next((g for g in self._store.guests() if g.id == lease.id), None)
            raise Conflict(
                f"slice {name} is leased to the virtual machine "
                f"{holder.domain_name if holder else 'of another lease'}"
            )
        if lease.kind == LeaseKind.RUN:
            raise Conflict(f"slice {name} belongs to one running program")
        if lease.kind == LeaseKind.PEER:
            raise Conflict(f"slice {name} is lent to another host")
        sessions = self._pool.book.count(lease.id)
        if sessions:
            raise Conflict(
                f"slice {name} has {sessions} running session{'s' if sessions > 1 else ''} of its "
                "owner; end them first"
            )
        return piece

    def _made_for(
        self,
        domain_uuid: str,
        domain_name: str,
        request: GuestRequest,
        slices: Sequence[Slice],
        leases: Sequence[Lease],
        before: Guest | None,
    ) -> Slice:
        going: set[str] = set()
        if before is not None and before.temporary:
            going = {
                piece for lease in leases if lease.id == before.id for piece in lease.slice_ids
            }
        plain = re.sub(r"[^A-Za-z0-9._-]", "-", domain_name)[:NAME_PART]
        name = f"vm-{plain}-{uuid.uuid4().hex[:8]}"
        staying = [piece for piece in slices if piece.id not in going]
        return self._pool.plan(ROOT, request.sized(name), staying, temporary=True)

    def end(self, guest: Guest, why: str) -> bool:
        """Ends the lease; a hand-made slice goes back to its owner. False if it had ended."""
        with self._pool.lock, self._store.change() as change:
            ended = self._end(change, guest, why)
        if ended:
            self._regions_ended(guest)
            self._changed()
        return ended

    def end_of_domain(self, domain_uuid: str, why: str) -> bool:
        """Ends the lease that the domain has; False if it has none."""
        guest = self.live(domain_uuid)
        return guest is not None and self.end(guest, why)

    def _end(self, change: Transaction, guest: Guest, why: str) -> bool:
        if not change.end_guest(guest.id, time.time()):
            return False
        rows = change.execute(
            "SELECT slice_id FROM lease_slices WHERE lease_id = ?", guest.id
        ).fetchall()
        change.delete_lease(guest.id)
        for (slice_id,) in rows:
            if guest.temporary:
                change.delete_slice(slice_id)
            else:
                change.add_lease(new_lease(LeaseKind.OWNER, guest.owner_uid, slice_id))
        change.event(
            "guest.ended",
            guest.slice_name,
            f"the virtual machine {guest.domain_name} has the slice no more: {why}",
            owner_uid=guest.owner_uid,
            lease=guest.id,
            domain=guest.domain_uuid,
        )
        return True

    def _regions_ended(self, guest: Guest) -> None:
        if guest.region_path:
            self._regions.write_header(
                guest.region_path, guest.region_inode, guest.id, guest.epoch, ended=True
            )

    def rebooted(self, domain_uuid: str) -> Guest | None:
        """The guest starts from scratch under its lease: a new epoch, and its sessions end.

        None if it has no lease.
        """
        guest = self.live(domain_uuid)
        if guest is None:
            return None
        with self._pool.lock, self._store.change() as change:
            if not change.raise_epoch(guest.id):
                return None
            change.event(
                "guest.rebooted",
                guest.slice_name,
                f"the virtual machine {guest.domain_name} boots again",
                owner_uid=guest.owner_uid,
                lease=guest.id,
                domain=domain_uuid,
            )
        guest = self.live(domain_uuid)
        if guest is None:
            return None
        if guest.region_path:
            self._regions.write_header(guest.region_path, guest.region_inode, guest.id, guest.epoch)
        ids = [entry.id for entry in self._pool.book.sessions() if entry.lease_id == guest.id]
        self.end_sessions(ids, "the virtual machine boots again")
        return guest

    def end_sessions(self, sessions: Iterable[str], why: str) -> None:
        """Ends sessions, by their ids."""
        for session in sessions:
            try:
                self._pool.broker.client.kill_session(uuid.UUID(session).bytes, why)
            except PoolError as error:  # it has ended by itself, or ends with the broker
                LOG.info("session %s was not ended: %s", session, error)
        self._pool.notify()

    def carried(self, domain_uuid: str) -> list[str]:
        """The sessions whose calls or bells go through the domain's port."""
        guest = self.live(domain_uuid)
        return [
            entry.id
            for entry in self._pool.book.sessions()
            if guest is not None and entry.lease_id == guest.id and entry.carrier in PORT_CARRIERS
        ]

    def set_port(
        self, guest: Guest, path: str, vsock_cid: int, qemu: ProcessIdentity | None
    ) -> None:
        """The broker is to serve the guest at this socket, and what comes from this vsock context
        id while that process runs; empty, 0: nowhere."""
        with self._pool.lock, self._store.change() as change:
            change.set_port(guest.id, path, vsock_cid, qemu)
        self._changed()

    def stale_headers(self, guests: Sequence[Guest]) -> set[str]:
        """Those whose region has not the right header."""
        return {
            guest.id
            for guest in guests
            if guest.ended_at is None
            and guest.region_path
            and not self._regions.is_current(
                guest.region_path, guest.region_inode, guest.id, guest.epoch
            )
        }

    def write_header(self, guest: Guest) -> bool:
        """Writes it; False if the region's file is gone."""
        return self._regions.write_header(
            guest.region_path, guest.region_inode, guest.id, guest.epoch
        )

    def forget(self, guest: Guest) -> None:
        """Removes the region of an ended lease and its last trace."""
        if guest.region_path:
            self._regions.remove(guest.region_path, guest.region_inode)
        with self._store.change(new_generation=False) as change:
            change.forget_guest(guest.id)

    def refused(self, domain_uuid: str, domain_name: str, why: str) -> None:
        """Records that a request was not met."""
        name = printable(domain_name)
        self._pool.broker.tell(
            "guest.refused", name, f"the virtual machine {name} ({domain_uuid}) got no slice: {why}"
        )

    def clean_up(self) -> None:
        """At the start: removes regions that an earlier gpupoold left half made."""
        known = {guest.region_path for guest in self._store.guests()}
        for path in self._regions.remove_strangers(known):
            LOG.info("removed the region %s of an earlier run", path)

    def _changed(self) -> None:
        self._pool.notify()
        self._pool.broker.sync_soon()


def _live(guests: Sequence[Guest], domain_uuid: str) -> Guest | None:
    return next((g for g in guests if g.domain_uuid == domain_uuid and g.ended_at is None), None)
