"""Programs that gpupoolctl run prepared: their lease files, and their slices where these are theirs
alone.
"""

from __future__ import annotations

import logging
import threading
import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpupoold.errors import BrokerUnavailable, Conflict, NoCapacity, NoRoom, PoolError
from gpupoold.leases.new import new_lease, new_run
from gpupoold.leases.runs import Runs
from gpupoold.model import Caller, Lease, LeaseKind, ProcessIdentity, Run, Slice
from gpupoold.slices.planning import Request
from gpupoold.slices.waiting import WaitingLine

if TYPE_CHECKING:
    from gpupoold.pool import Pool

LOG = logging.getLogger(__name__)

RETRY_SECONDS = 5.0


def _temporary_name(caller: Caller) -> str:
    return f"run-{caller.pid}-{uuid.uuid4().hex[:8]}"


@dataclass(frozen=True)
class Waits:
    """There is no room yet; place: in the line, from 1."""

    place: int
    why: str


class Programs:
    """Safe to use from several threads."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.runs = Runs(pool.settings, self.ended)
        self.stopping = False
        self._line = WaitingLine()

    def resume(self) -> None:
        """Takes up those that run since before this start."""
        _, _, leases, runs = self._pool.store.snapshot()
        by_id = {lease.id: lease for lease in leases}
        self.runs.forget_strangers([run.id for run in runs])
        for run in runs:
            if not self.runs.resume(run, by_id[run.lease_id]):
                self.ended(run.id)

    def start(
        self,
        caller: Caller,
        slice_name: str,
        request: Request | None,
        command: str,
    ) -> tuple[Run, Slice]:
        """Prepares the calling process: its lease file, and with `request` a temporary slice.

        Raises what create_slice raises, and BrokerUnavailable when no program could connect now.
        """
        if not self._pool.broker.connected:
            raise BrokerUnavailable(
                "programs cannot start now: the broker is not connected: "
                f"{self._pool.broker.problem}"
            )
        process = self.runs.identify(caller.pid)
        borrowed = None
        try:
            run, lease, piece = self._add(caller, slice_name, request, command, process)
        except NoRoom as error:
            if request is None or request.gpu or self._pool.borrowing is None:
                raise
            request = replace(request, name=_temporary_name(caller))
            borrowed = self._pool.borrowing.borrow_anywhere(caller, request, error)
            try:
                run, lease, piece = self._add(
                    caller, borrowed[0].id, None, command, process, borrowed[1]
                )
            except PoolError:
                with self._pool.lock, self._pool.store.change() as change:
                    change.delete_slice(borrowed[0].id)
                self._pool.slices_changed()
                raise
        self._pool.notify()
        try:
            if not self.runs.resume(run, lease):
                raise Conflict(f"process {caller.pid} has ended already")
            applied = self._pool.broker.client.push()
            for refused in applied.refused:
                if refused.id == uuid.UUID(lease.id).bytes:
                    raise Conflict(f"the broker refused the lease: {refused.sentence}")
        except (PoolError, OSError) as error:
            self.ended(run.id)
            if isinstance(error, OSError):
                raise PoolError(
                    f"the lease file cannot be written: {error.strerror or error}"
                ) from None
            raise
        return run, piece

    def wait(
        self, caller: Caller, request: Request, command: str, ticket: str
    ) -> tuple[Run, Slice] | Waits:
        """As start(), with a slice of its own; where there is no room, its place in the line. Who
        is not first does not try."""
        place = self._line.ask(ticket, caller.uid, request.priority)
        if place > 1:
            return Waits(place, "others wait for room, too")
        try:
            started = self.start(caller, "", request, command)
        except NoRoom as error:
            return Waits(place, str(error))
        except BaseException:
            self._line.leave(ticket)
            raise
        self._line.leave(ticket)
        return started

    def _add(
        self,
        caller: Caller,
        slice_name: str,
        request: Request | None,
        command: str,
        process: ProcessIdentity,
        own: Lease | None = None,
    ) -> tuple[Run, Lease, Slice]:
        """Stores a run, with `request` its temporary slice; own: the slice is this run's alone."""
        with self._pool.lock:
            _, slices, leases, runs = self._pool.store.snapshot()
            most = self._pool.settings.max_runs_per_user
            if not caller.is_admin and sum(run.uid == caller.uid for run in runs) >= most:
                raise NoCapacity(f"a user may have at most {most} programs running at once here")
            run_id = str(uuid.uuid4())
            if request is not None:
                self._pool.check_count(caller, slices)
                request = replace(request, name=_temporary_name(caller))
                piece = self._pool.plan(caller, request, slices, temporary=True)
                lease = new_lease(LeaseKind.RUN, caller.uid, piece.id)
            else:
                piece = self._pool.find_slice(caller, slices, slice_name)
                lease = next(entry for entry in leases if piece.id in entry.slice_ids)
                if lease.kind == LeaseKind.RUN and (own is None or own.id != lease.id):
                    raise Conflict(f"slice {piece.name} belongs to one running program")
                if lease.kind == LeaseKind.VM:
                    raise Conflict(f"slice {piece.name} is leased to a virtual machine")
                if lease.kind == LeaseKind.PEER:
                    raise Conflict(f"slice {piece.name} is lent to another host")
            self._pool.check_usable(piece)
            run = new_run(run_id, lease, caller, process, command, self.runs.file_of(run_id))
            with self._pool.store.change() as change:
                if request is not None:
                    change.add_slice(piece)
                    change.add_lease(lease)
                change.add_run(run)
                change.event(
                    "run.started",
                    piece.name,
                    f"process {caller.pid} runs {command}",
                    owner_uid=caller.uid,
                    pid=caller.pid,
                    temporary=piece.temporary,
                )
        return run, lease, piece

    def ended(self, run_id: str) -> None:
        """Removes what belonged to a process: its lease file and its temporary slice."""
        if self.stopping:
            return  # the next start sees it
        try:
            self._remove(run_id)
        except PoolError as error:
            LOG.error("run %s is over and cannot be removed yet: %s", run_id, error)
            retry = threading.Timer(RETRY_SECONDS, self.ended, (run_id,))
            retry.daemon = True
            retry.start()
            return
        self.runs.remove_file(run_id)
        self._pool.notify()
        self._pool.broker.sync_soon()
        if self._pool.borrowing is not None:  # its slice may have been another host's
            self._pool.borrowing.slices_changed()

    def _remove(self, run_id: str) -> None:
        with self._pool.lock:
            _, slices, leases, runs = self._pool.store.snapshot()
            run = next((run for run in runs if run.id == run_id), None)
            if run is not None:
                lease = next(lease for lease in leases if lease.id == run.lease_id)
                names = {piece.id: piece.name for piece in slices}
                subject = names.get(lease.slice_ids[0], "") if lease.slice_ids else ""
                with self._pool.store.change() as change:
                    change.delete_run(run.id)
                    if lease.kind == LeaseKind.RUN:
                        for slice_id in lease.slice_ids:
                            change.delete_slice(slice_id)
                        change.delete_lease(lease.id)
                    change.event(
                        "run.ended",
                        subject,
                        f"process {run.process.pid} has ended",
                        owner_uid=run.uid,
                        pid=run.process.pid,
                    )
