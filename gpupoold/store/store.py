"""Reads and writes the state. Each change is one transaction, and each raises the generation."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import sqlite3
import threading
import time
from collections.abc import Iterator
from typing import Any

from gpupoold.directories import own_directory
from gpupoold.errors import StateError, StateWriteFailed
from gpupoold.model import (
    Borrowed,
    BorrowedState,
    Event,
    Gpu,
    GpuMode,
    Grant,
    Guest,
    Lease,
    LeaseKind,
    Lent,
    ProcessIdentity,
    Run,
    Slice,
    SliceKind,
    SliceMode,
)
from gpupoold.store import schema
from gpupoold.store.ring import EventRing
from gpupoold.store.transaction import Transaction


def _sentence(path: str, error: sqlite3.Error) -> str:
    code = getattr(error, "sqlite_errorname", "") or ""
    if code.startswith("SQLITE_FULL"):
        return f"the disk that holds {path} is full; free some space and try again"
    if code.startswith("SQLITE_READONLY"):
        return f"{path} cannot be written (read-only file, directory or file system)"
    if code.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return (
            f"{path} is damaged ({error}); restore a copy, or move the file away to start with "
            "an empty state"
        )
    if code.startswith("SQLITE_CANTOPEN"):
        return f"{path} cannot be opened or made"
    if code.startswith("SQLITE_BUSY"):
        return f"{path} is in use by another program"
    if code.startswith("SQLITE_IOERR"):
        return f"{path} cannot be read or written: {error} (disk full or failing?)"
    return f"{path}: {error}"


class Store:
    """The state file. Safe to use from several threads; only one process may have it open."""

    def __init__(self, path: str, event_limit: int = 10000) -> None:
        self.path = path
        self._event_limit = event_limit
        self._ring: EventRing | None = None
        self._lock = threading.RLock()
        self._db: sqlite3.Connection | None = None
        self._lock_fd: int | None = None

    # ---- life -----------------------------------------------------------------------------------

    def open(self) -> None:
        """Opens, checks and upgrades the file; raises StateError with one sentence."""
        directory = os.path.dirname(self.path)
        try:
            own_directory(directory, 0o700, may_be_link=True)
            self._lock_fd = os.open(
                self.path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
            )
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise StateError(f"the state {self.path} is in use by another gpupoold") from None
        except OSError as error:
            self.close()
            raise StateError(self._os_sentence(directory, error)) from None
        try:
            new = not os.path.exists(self.path)
            if new:  # the file holds secrets: nobody else may read it from the first moment on
                os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            self._db = sqlite3.connect(
                self.path, isolation_level=None, check_same_thread=False, timeout=5
            )
            self._prepare()
        except sqlite3.Error as error:
            self.close()
            raise StateError(f"state: {_sentence(self.path, error)}") from None
        except OSError as error:
            self.close()
            raise StateError(self._os_sentence(self.path, error)) from None
        except StateError:
            self.close()
            raise

    @staticmethod
    def _os_sentence(path: str, error: OSError) -> str:
        if error.errno == errno.ENOSPC:
            return f"state: the disk that holds {path} is full; free some space and try again"
        return f"state: {path} cannot be used: {error.strerror}"

    def _prepare(self) -> None:
        db = self._connection()
        db.execute("PRAGMA foreign_keys = ON")
        db.execute("PRAGMA trusted_schema = OFF")
        # The version is read before anything is written: a newer file is left as it is.
        application = db.execute("PRAGMA application_id").fetchone()[0]
        version = db.execute("PRAGMA user_version").fetchone()[0]
        tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if tables and application != schema.APPLICATION_ID:
            raise StateError(f"state: {self.path} is an SQLite file of another program")
        if version > schema.VERSION:
            raise StateError(
                f"state: {self.path} was written by a newer gpupoold (schema {version}, this one "
                f"knows {schema.VERSION}); install that version, or restore an older copy"
            )
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        problem = db.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if problem != "ok":
            raise StateError(
                f"state: {self.path} is damaged ({problem}); restore a copy, or move the file "
                "away to start with an empty state"
            )
        if version:
            row = db.execute("SELECT value FROM meta WHERE key = 'generation'").fetchone()
            if row is None or not re.fullmatch(r"[0-9]{1,18}", row[0]):
                raise StateError(
                    f"state: {self.path} is damaged (no generation); restore a copy, or move the "
                    "file away to start with an empty state"
                )
        if db.execute("PRAGMA foreign_key_check").fetchone() is not None:
            raise StateError(f"state: {self.path} contradicts itself (a foreign key dangles)")
        db.execute("BEGIN IMMEDIATE")
        try:
            for migration in schema.MIGRATIONS[version:]:
                for statement in migration:
                    db.execute(statement)
            if version < schema.VERSION:
                db.execute(f"PRAGMA user_version = {schema.VERSION}")
                db.execute(f"PRAGMA application_id = {schema.APPLICATION_ID}")
            # Writing at every start shows a full or read-only disk now, not at the first request.
            db.execute(
                "INSERT INTO meta (key, value) VALUES ('started_at', ?)"
                " ON CONFLICT (key) DO UPDATE SET value = excluded.value",
                (repr(time.time()),),
            )
            db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            raise

    def close(self) -> None:
        """Closes the file and gives up the lock on it."""
        with self._lock:
            if self._db is not None:
                with contextlib.suppress(sqlite3.Error):
                    self._db.close()
                self._db = None
            if self._lock_fd is not None:
                os.close(self._lock_fd)
                self._lock_fd = None

    def _connection(self) -> sqlite3.Connection:
        if self._db is None:
            raise StateError("the state is not open")
        return self._db

    # ---- changes --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def change(self, *, new_generation: bool = True) -> Iterator[Transaction]:
        """One transaction: all of it is stored, or, when anything raises, nothing.

        Raises StateWriteFailed when the disk does not take it.
        """
        with self._lock:
            db = self._connection()
            counted = False
            try:
                db.execute("BEGIN IMMEDIATE")
                transaction = Transaction(db)
                yield transaction
                if new_generation:
                    db.execute(
                        "UPDATE meta SET value = CAST(CAST(value AS INTEGER) + 1 AS TEXT)"
                        " WHERE key = 'generation'"
                    )
                if transaction.events:
                    counted = True
                    self._drop_events(db, transaction.events)
                db.execute("COMMIT")
            except BaseException as error:
                if counted:  # and not stored
                    self._ring = None
                if db.in_transaction:
                    with contextlib.suppress(sqlite3.Error):
                        db.execute("ROLLBACK")
                if isinstance(error, sqlite3.Error):
                    raise StateWriteFailed(
                        f"nothing was changed: {_sentence(self.path, error)}"
                    ) from error
                raise

    def _drop_events(self, db: sqlite3.Connection, added: list[Event]) -> None:
        if self._ring is None:  # the first time, or a change before was not stored
            rows = db.execute("SELECT id, kind, owner_uid FROM events ORDER BY id")
            self._ring = EventRing(self._event_limit, rows)
        else:
            for event in added:
                self._ring.add(event.id, event.kind, event.owner_uid)
        db.executemany(
            "DELETE FROM events WHERE id = ?", ((gone,) for gone in self._ring.take_excess())
        )

    # ---- reading --------------------------------------------------------------------------------

    def _rows(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock:
            try:
                return self._connection().execute(statement, values).fetchall()
            except sqlite3.Error as error:
                raise StateWriteFailed(
                    f"the state cannot be read: {_sentence(self.path, error)}"
                ) from error

    def generation(self) -> int:
        """The number of the state; it rises with each change."""
        return int(self._rows("SELECT value FROM meta WHERE key = 'generation'")[0][0])

    def snapshot(self) -> tuple[int, list[Slice], list[Lease], list[Run]]:
        """Generation, slices, leases and runs of one moment."""
        with self._lock:
            return self.generation(), self.slices(), self.leases(), self.runs()

    def gpus(self) -> list[tuple[Gpu, GpuMode, bool]]:
        """Every remembered GPU with its mode and drain mark, in the driver's order."""
        rows = self._rows(
            "SELECT uuid, position, name, memory_mib, driver_reserved_mib, compute_capability,"
            " pci_address, numa_node, mode, drained FROM gpus ORDER BY position, uuid"
        )
        return [(Gpu(*row[:8]), GpuMode(row[8]), bool(row[9])) for row in rows]

    def slices(self) -> list[Slice]:
        """All slices, oldest first."""
        rows = self._rows(
            "SELECT id, name, kind, gpu_uuid, compute_percent, memory_mib, mode, priority,"
            " virtual_uuid, pci_address, owner_uid, temporary, created_at, host FROM slices"
            " ORDER BY created_at, id"
        )
        return [
            Slice(
                row[0],
                row[1],
                SliceKind(row[2]),
                row[3],
                row[4],
                row[5],
                SliceMode(row[6]),
                row[7],
                row[8],
                row[9],
                row[10],
                bool(row[11]),
                row[12],
                row[13],
            )
            for row in rows
        ]

    def borrowed(self) -> dict[str, Borrowed]:
        """Those slices that are on other hosts, by id."""
        rows = self._rows(
            "SELECT slices.id, slices.host, borrowed.state, borrowed.lease_id, borrowed.address,"
            " slices.gpu_uuid, borrowed.key, borrowed.snapshot"
            " FROM borrowed JOIN slices ON slices.id = borrowed.slice_id"
        )
        return {
            row[0]: Borrowed(
                row[0], row[1], BorrowedState(row[2]), Grant(*row[3:8]) if row[3] else None
            )
            for row in rows
        }

    def giving_back(self) -> list[tuple[str, str]]:
        """(lease, host) of what other hosts are still to be told."""
        return [(row[0], row[1]) for row in self._rows("SELECT lease_id, host FROM giving_back")]

    def lent(self) -> dict[str, Lent]:
        """Leases that other hosts have, by id."""
        return {
            row[0]: Lent(*row) for row in self._rows("SELECT lease_id, peer, consumer FROM lent")
        }

    def leases(self) -> list[Lease]:
        """All leases, oldest first."""
        with self._lock:
            members: dict[str, list[str]] = {}
            for lease_id, slice_id in self._rows(
                "SELECT lease_id, slice_id FROM lease_slices ORDER BY lease_id, ordinal"
            ):
                members.setdefault(lease_id, []).append(slice_id)
            rows = self._rows(
                "SELECT id, kind, owner_uid, key, created_at FROM leases ORDER BY created_at, id"
            )
        return [
            Lease(row[0], LeaseKind(row[1]), row[2], tuple(members.get(row[0], ())), row[4], row[3])
            for row in rows
        ]

    def runs(self) -> list[Run]:
        """All processes that were prepared and whose end was not yet seen."""
        rows = self._rows(
            "SELECT id, lease_id, uid, pid, start_ticks, boot_id, command, lease_file, created_at"
            " FROM runs ORDER BY created_at, id"
        )
        return [
            Run(row[0], row[1], row[2], ProcessIdentity(*row[3:6]), row[6], row[7], row[8])
            for row in rows
        ]

    def guests(self) -> list[Guest]:
        """All leases of virtual machines, with those of which something is left; oldest first."""
        rows = self._rows(
            "SELECT id, domain_uuid, domain_name, slice_name, owner_uid, temporary, region_path,"
            " region_inode, epoch, created_at, ended_at, port_path, vsock_cid, qemu_pid,"
            " qemu_start, qemu_boot FROM guests"
            " ORDER BY created_at, id"
        )
        values = [
            (
                *row[:5],
                bool(row[5]),
                *row[6:13],
                ProcessIdentity(*row[13:16]) if row[13] else None,
            )
            for row in rows
        ]
        return [Guest(*value) for value in values]

    def events(self, after_id: int = 0, limit: int = 0, uid: int | None = None) -> list[Event]:
        """The stored events after `after_id`, oldest first; the newest `limit` of them if not 0.

        With `uid`, only those of this user and of nobody.
        """
        rows = self._rows(
            "SELECT id, time, kind, subject, text, data, owner_uid FROM events WHERE id > ?"
            " AND (? OR owner_uid IS NULL OR owner_uid = ?) ORDER BY id DESC LIMIT ?",
            after_id,
            uid is None,
            uid,
            limit or -1,
        )
        return [
            Event(row[0], row[1], row[2], row[3], row[4], json.loads(row[5]), row[6])
            for row in reversed(rows)
        ]

    def last_event_id(self) -> int:
        """The number of the latest event; 0 if there is none."""
        return int(self._rows("SELECT coalesce(max(id), 0) FROM events")[0][0])
