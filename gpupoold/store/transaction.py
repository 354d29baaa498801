"""The changes of one transaction."""

from __future__ import annotations

import json
import sqlite3
import time
from typing import Any

from gpupoold.errors import AlreadyExists
from gpupoold.model import (
    BorrowedState,
    Event,
    Gpu,
    Grant,
    Guest,
    Lease,
    Lent,
    ProcessIdentity,
    Run,
    Slice,
    printable,
)


def _columns(process: ProcessIdentity | None) -> tuple[int, int, str]:
    return (process.pid, process.start_ticks, process.boot_id) if process else (0, 0, "")


class Transaction:
    """The changes of one transaction; made by Store.change."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection
        self.events: list[Event] = []

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        """One statement, inside the transaction."""
        return self._db.execute(statement, values)

    def put_gpu(self, gpu: Gpu) -> None:
        """Remembers a GPU that the driver reports; its mode and drain mark stay."""
        self._db.execute(
            "INSERT INTO gpus (uuid, position, name, memory_mib, driver_reserved_mib,"
            " compute_capability, pci_address, numa_node) VALUES (?,?,?,?,?,?,?,?)"
            " ON CONFLICT (uuid) DO UPDATE SET position = excluded.position, name = excluded.name,"
            " memory_mib = excluded.memory_mib,"
            " driver_reserved_mib = excluded.driver_reserved_mib,"
            " compute_capability = excluded.compute_capability,"
            " pci_address = excluded.pci_address, numa_node = excluded.numa_node",
            (
                gpu.uuid,
                gpu.index,
                gpu.name,
                gpu.memory_mib,
                gpu.driver_reserved_mib,
                gpu.compute_capability,
                gpu.pci_address,
                gpu.numa_node,
            ),
        )

    def forget_gpu(self, uuid: str) -> None:
        """Drops a GPU that is gone and has no slices."""
        self._db.execute("DELETE FROM gpus WHERE uuid = ?", (uuid,))

    def set_drained(self, uuid: str, drained: bool) -> None:
        """Sets the drain mark of a GPU."""
        self._db.execute("UPDATE gpus SET drained = ? WHERE uuid = ?", (int(drained), uuid))

    def add_slice(self, piece: Slice) -> None:
        """Adds a slice; raises AlreadyExists if the name is taken."""
        try:
            self._db.execute(
                "INSERT INTO slices VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
                (
                    piece.id,
                    piece.name,
                    piece.kind.value,
                    piece.gpu_uuid,
                    piece.compute_percent,
                    piece.memory_mib,
                    piece.mode.value,
                    piece.priority,
                    piece.virtual_uuid,
                    piece.pci_address,
                    piece.owner_uid,
                    int(piece.temporary),
                    piece.created_at,
                    piece.host,
                ),
            )
        except sqlite3.IntegrityError as error:
            if "slices.name" in str(error):
                raise AlreadyExists(f"there is already a slice named {piece.name}") from None
            raise

    def resize_slice(self, slice_id: str, compute_percent: int, memory_mib: int) -> None:
        """Sets the size of a slice."""
        self._db.execute(
            "UPDATE slices SET compute_percent = ?, memory_mib = ? WHERE id = ?",
            (compute_percent, memory_mib, slice_id),
        )

    def add_lease(self, lease: Lease) -> None:
        """Adds a lease of slices that are in no lease."""
        self._db.execute(
            "INSERT INTO leases (id, kind, owner_uid, key, created_at) VALUES (?,?,?,?,?)",
            (lease.id, lease.kind.value, lease.owner_uid, lease.key, lease.created_at),
        )
        for ordinal, slice_id in enumerate(lease.slice_ids):
            self._db.execute(
                "INSERT INTO lease_slices (lease_id, ordinal, slice_id) VALUES (?,?,?)",
                (lease.id, ordinal, slice_id),
            )

    def delete_lease(self, lease_id: str) -> None:
        """Removes a lease and its runs; its slices stay."""
        self._db.execute("DELETE FROM leases WHERE id = ?", (lease_id,))

    def ask_for(self, slice_id: str) -> None:
        """The slice is on another host, which is about to be asked for it."""
        self._db.execute(
            "INSERT INTO borrowed (slice_id, state) VALUES (?, ?)",
            (slice_id, BorrowedState.ASKING.value),
        )

    def hold(self, slice_id: str, grant: Grant) -> bool:
        """The other host has given it; False: nobody wants it any more."""
        cursor = self._db.execute(
            "UPDATE borrowed SET state = ?, lease_id = ?, key = ?, address = ?, snapshot = ?"
            " WHERE slice_id = ? AND state = ?",
            (
                BorrowedState.HELD.value,
                grant.lease_id,
                grant.key,
                grant.address,
                grant.snapshot,
                slice_id,
                BorrowedState.ASKING.value,
            ),
        )
        self._db.execute("UPDATE slices SET gpu_uuid = ? WHERE id = ?", (grant.gpu_uuid, slice_id))
        return cursor.rowcount == 1

    def lose(self, slice_id: str) -> bool:
        """The other host does not know of it; False: that was known."""
        cursor = self._db.execute(
            "UPDATE borrowed SET state = ? WHERE slice_id = ? AND state = ?",
            (BorrowedState.LOST.value, slice_id, BorrowedState.HELD.value),
        )
        return cursor.rowcount == 1

    def give_back(self, lease_id: str, host: str) -> None:
        """A lease of another host is not needed: it is to be told."""
        self._db.execute("INSERT OR IGNORE INTO giving_back VALUES (?, ?)", (lease_id, host))

    def given_back(self, lease_id: str) -> None:
        """The other host knows."""
        self._db.execute("DELETE FROM giving_back WHERE lease_id = ?", (lease_id,))

    def lend(self, lent: Lent) -> None:
        """A lease goes to another host."""
        self._db.execute(
            "INSERT INTO lent VALUES (?, ?, ?)", (lent.lease_id, lent.peer, lent.consumer)
        )

    def delete_slice(self, slice_id: str) -> None:
        """Removes a slice, and its lease if it was the last one in it. One of another host is to be
        given back."""
        self._db.execute(
            "INSERT OR IGNORE INTO giving_back SELECT borrowed.lease_id, slices.host FROM borrowed"
            " JOIN slices ON slices.id = borrowed.slice_id"
            " WHERE borrowed.slice_id = ? AND borrowed.state = ?",
            (slice_id, BorrowedState.HELD.value),
        )
        row = self._db.execute(
            "SELECT lease_id FROM lease_slices WHERE slice_id = ?", (slice_id,)
        ).fetchone()
        self._db.execute("DELETE FROM lease_slices WHERE slice_id = ?", (slice_id,))
        if row:
            self._db.execute(
                "DELETE FROM leases WHERE id = ? AND NOT EXISTS"
                " (SELECT 1 FROM lease_slices WHERE lease_id = ?)",
                (row[0], row[0]),
            )
        self._db.execute("DELETE FROM slices WHERE id = ?", (slice_id,))

    def add_run(self, run: Run) -> None:
        """Remembers a process that was prepared for its program."""
        self._db.execute(
            "INSERT INTO runs VALUES (?,?,?,?,?,?,?,?,?)",
            (
                run.id,
                run.lease_id,
                run.uid,
                run.process.pid,
                run.process.start_ticks,
                run.process.boot_id,
                run.command,
                run.lease_file,
                run.created_at,
            ),
        )

    def delete_run(self, run_id: str) -> None:
        """Forgets a process."""
        self._db.execute("DELETE FROM runs WHERE id = ?", (run_id,))

    def add_guest(self, guest: Guest) -> None:
        """Remembers a virtual machine's lease."""
        self._db.execute(
            "INSERT INTO guests VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
            (
                guest.id,
                guest.domain_uuid,
                guest.domain_name,
                guest.slice_name,
                guest.owner_uid,
                int(guest.temporary),
                guest.region_path,
                guest.region_inode,
                guest.epoch,
                guest.created_at,
                guest.ended_at,
                guest.port_path,
                guest.vsock_cid,
                *_columns(guest.qemu),
            ),
        )

    def end_guest(self, guest_id: str, at: float) -> bool:
        """Marks a virtual machine's lease as ended; False if it was so already."""
        cursor = self._db.execute(
            "UPDATE guests SET ended_at = ? WHERE id = ? AND ended_at IS NULL", (at, guest_id)
        )
        return cursor.rowcount == 1

    def raise_epoch(self, guest_id: str) -> bool:
        """The virtual machine boots again under its lease; False if that has ended."""
        cursor = self._db.execute(
            "UPDATE guests SET epoch = epoch + 1 WHERE id = ? AND ended_at IS NULL", (guest_id,)
        )
        return cursor.rowcount == 1

    def set_port(
        self, guest_id: str, path: str, vsock_cid: int, qemu: ProcessIdentity | None
    ) -> bool:
        """The host's socket of a virtual machine's port, and its vsock context id with the process
        that has it; False if the lease has ended. Who was said to have that id has it no more."""
        self._db.execute(
            "UPDATE guests SET vsock_cid = 0, qemu_pid = 0, qemu_start = 0, qemu_boot = ''"
            " WHERE vsock_cid = ? AND vsock_cid != 0 AND id != ?",
            (vsock_cid, guest_id),
        )
        cursor = self._db.execute(
            "UPDATE guests SET port_path = ?, vsock_cid = ?, qemu_pid = ?, qemu_start = ?,"
            " qemu_boot = ? WHERE id = ? AND ended_at IS NULL",
            (path, vsock_cid, *_columns(qemu), guest_id),
        )
        return cursor.rowcount == 1

    def forget_guest(self, guest_id: str) -> None:
        """Nothing is left of a virtual machine's ended lease."""
        self._db.execute("DELETE FROM guests WHERE id = ? AND ended_at IS NOT NULL", (guest_id,))

    def event(
        self,
        kind: str,
        subject: str,
        text: str,
        *,
        owner_uid: int | None = None,
        at: float | None = None,
        **data: Any,
    ) -> None:
        """Records an event with the change that it tells of."""
        moment = time.time() if at is None else at
        text = printable(text)
        cursor = self._db.execute(
            "INSERT INTO events (time, kind, subject, text, data, owner_uid) VALUES (?,?,?,?,?,?)",
            (moment, kind, subject, text, json.dumps(data), owner_uid),
        )
        self.events.append(
            Event(int(cursor.lastrowid or 0), moment, kind, subject, text, data, owner_uid)
        )
