"""The pool of one host: every operation on GPUs, slices, leases and sessions.

`lock` makes plan and store of one change one step. The broker's news come in a thread of their
own and never take it, so the broker may be asked while it is held.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gpupoold.conf import Settings
from gpupoold.errors import (
    BrokerUnavailable,
    Conflict,
    InvalidRequest,
    NoCapacity,
    NotFound,
    NotPermitted,
    PoolError,
)
from gpupoold.gpus import Driver, HealthReport
from gpupoold.health import HealthMonitor
from gpupoold.leases.desired import virtual_uuid_bytes
from gpupoold.leases.link import BrokerLink
from gpupoold.leases.new import new_lease
from gpupoold.model import (
    BorrowedState,
    Caller,
    Event,
    Gpu,
    GpuState,
    Health,
    Lease,
    LeaseKind,
    Run,
    Session,
    Slice,
)
from gpupoold.overview import GpuView, SliceView
from gpupoold.programs import Programs
from gpupoold.slices import identity, planning
from gpupoold.slices.planning import Request
from gpupoold.store import Store

if TYPE_CHECKING:
    from gpupoold.hosts.borrowing import Borrowing

LOG = logging.getLogger(__name__)

RETRY_SECONDS = 5.0


class Pool:
    """Safe to use from several threads."""

    def __init__(self, settings: Settings, store: Store, driver: Driver) -> None:
        self.settings = settings
        self.store = store
        self.driver = driver
        self.programs = Programs(self)
        self.runs = self.programs.runs
        self.broker = BrokerLink(settings, store, self.runs, driver, self._gpu_uuids, self.notify)
        self.book = self.broker.book
        self.lock = threading.RLock()
        self._gpus: list[Gpu] = []  # those that the driver has now
        self._reports: dict[str, HealthReport] = {}
        self._monitor: HealthMonitor | None = None
        self._listeners: list[Callable[[], None]] = []
        #: called when a slice was made or removed by request, before that is answered
        self.after_slices_change: list[Callable[[], None]] = []
        #: slices of other hosts; None: this one has nothing to do with others
        self.borrowing: Borrowing | None = None

    # ---- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Takes stock, repairs what an earlier end left half done, and goes to work."""
        self._gpus = self.driver.inventory()
        if not self._gpus:
            LOG.warning(
                "a host without GPUs (%s): slices cannot be made here",
                self.driver.absence or "the driver reports none",
            )
        self._take_stock()
        self._repair()
        self._monitor = HealthMonitor(
            self.driver,
            [gpu.uuid for gpu in self._gpus],
            self.settings.health_interval,
            self._take_report,
        )
        self._monitor.look()
        self._monitor.start()
        self.runs.start()
        self.programs.resume()
        self.broker.start()

    def stop(self) -> None:
        """Stops working; running programs do not notice."""
        self.programs.stopping = True
        if self._monitor:
            self._monitor.stop()
        self.runs.stop()
        self.broker.stop()

    def _take_stock(self) -> None:
        present = {gpu.uuid for gpu in self._gpus}
        slices = self.store.slices()
        known = {gpu.uuid for gpu, _, _ in self.store.gpus()}
        with self.store.change() as change:
            for gpu in self._gpus:
                change.put_gpu(gpu)
                if gpu.uuid not in known:
                    change.event(
                        "gpu.added", gpu.uuid, f"{gpu.name} with {gpu.memory_mib} MiB was found"
                    )
            for gone in known - present:
                if any(piece.gpu_uuid == gone for piece in slices):
                    LOG.warning("GPU %s has slices and is missing", gone)
                else:
                    change.forget_gpu(gone)
                    change.event("gpu.removed", gone, "the card is gone; it had no slices")

    def _repair(self) -> None:
        """Makes slices without lease usable again and drops leases without purpose."""
        _, slices, leases, runs = self.store.snapshot()
        leased = {slice_id for lease in leases for slice_id in lease.slice_ids}
        running = {run.lease_id for run in runs}
        with self.store.change() as change:
            for lease in leases:
                if lease.kind == LeaseKind.RUN and lease.id not in running:
                    for slice_id in lease.slice_ids:
                        change.delete_slice(slice_id)
                    change.delete_lease(lease.id)
            for piece in slices:
                if piece.id in leased:
                    continue
                if piece.temporary or piece.host:  # or it was asked for only
                    change.delete_slice(piece.id)
                else:
                    LOG.warning("slice %s had no lease and gets a new one", piece.name)
                    change.add_lease(new_lease(LeaseKind.OWNER, piece.owner_uid, piece.id))

    def _gpu_uuids(self) -> tuple[str, ...]:
        return tuple(gpu.uuid for gpu in self._gpus)

    # ---- reading --------------------------------------------------------------------------------

    def gpu_states(self) -> list[GpuState]:
        """Every card that is here or has slices, in the driver's order."""
        present = {gpu.uuid: gpu for gpu in self._gpus}
        states = []
        for stored, mode, drained in self.store.gpus():
            gpu = present.get(stored.uuid)
            if gpu is None:
                report = HealthReport(Health.MISSING, "the driver does not know this card any more")
            else:
                report = self._reports.get(stored.uuid, HealthReport(Health.OK))
                problem = self.book.device_problem(stored.uuid)
                if report.health == Health.OK and problem:
                    report = HealthReport(Health.WARNING, f"the broker cannot use it: {problem}")
            states.append(
                GpuState(
                    gpu or stored,
                    mode,
                    drained,
                    report.health,
                    report.reason,
                    self.settings.memory_reserve_mib,
                )
            )
        return states

    def gpus(self) -> list[GpuView]:
        """Every card with what it has promised."""
        self.broker.refresh()
        return self._gpu_views()

    def _gpu_views(self) -> list[GpuView]:
        _, slices, leases, _ = self.store.snapshot()
        lease_of = {slice_id: lease.id for lease in leases for slice_id in lease.slice_ids}
        views = []
        for state in self.gpu_states():
            mine = [piece for piece in slices if piece.gpu_uuid == state.gpu.uuid]
            users = {lease_of[piece.id] for piece in mine if piece.id in lease_of}
            views.append(
                GpuView(
                    state,
                    planning.room_of(state, slices),
                    len(mine),
                    sum(self.book.count(lease_id) for lease_id in users),
                )
            )
        return views

    def gpu(self, wanted: str) -> GpuView:
        """One card; raises NotFound."""
        views = self.gpus()
        state = planning.find_gpu([view.state for view in views], wanted)
        return next(view for view in views if view.state.gpu.uuid == state.gpu.uuid)

    def slices(self, caller: Caller) -> list[SliceView]:
        """The caller's slices."""
        self.broker.refresh()
        _, slices, leases, _ = self.store.snapshot()
        health = self._health()
        return [
            self._slice_view(piece, leases, health)
            for piece in slices
            if caller.may_use(piece.owner_uid)
        ]

    def _slice_view(
        self, piece: Slice, leases: Sequence[Lease], health: dict[str, Health]
    ) -> SliceView:
        lease = next((lease for lease in leases if piece.id in lease.slice_ids), None)
        return SliceView(
            piece,
            lease,
            self.book.used_bytes(piece.virtual_uuid),
            self.book.count(lease.id) if lease else 0,
            health.get(piece.id if piece.host else piece.gpu_uuid, Health.MISSING),
        )

    def slice(self, caller: Caller, name: str, *, refresh: bool = True) -> SliceView:
        """One slice by name, id or virtual UUID; raises NotFound or NotPermitted."""
        if refresh:
            self.broker.refresh()
        _, slices, leases, _ = self.store.snapshot()
        piece = self.find_slice(caller, slices, name)
        return self._slice_view(piece, leases, self._health())

    def _health(self) -> dict[str, Health]:
        """By GPU; of another host's by slice."""
        return {state.gpu.uuid: state.health for state in self.gpu_states()} | {
            slice_id: Health.MISSING if entry.state == BorrowedState.LOST else Health.OK
            for slice_id, entry in self.store.borrowed().items()
        }

    @staticmethod
    def find_slice(caller: Caller, slices: Sequence[Slice], name: str) -> Slice:
        """By name, id or virtual UUID; raises NotFound or NotPermitted."""
        piece = planning.find_slice(slices, name)
        if piece is None:
            raise NotFound(f"there is no slice {name}; `slice list` shows those there are")
        if not caller.may_use(piece.owner_uid):
            raise NotPermitted(f"slice {name} belongs to another user")
        return piece

    def leases(self, caller: Caller) -> list[Lease]:
        """The caller's leases."""
        self.broker.refresh()
        return [lease for lease in self.store.leases() if caller.may_use(lease.owner_uid)]

    def lease(self, caller: Caller, lease_id: str) -> Lease:
        """One lease by id or an unambiguous beginning of 4 characters or more."""
        leases = self.leases(caller)
        found = [lease for lease in leases if lease.id == lease_id] or [
            lease for lease in leases if len(lease_id) >= 4 and lease.id.startswith(lease_id)
        ]
        if len(found) != 1:
            raise NotFound(f"there is no lease {lease_id}; `lease list` shows those there are")
        return found[0]

    def sessions(self, caller: Caller) -> list[tuple[Session, Lease]]:
        """The caller's sessions with their leases."""
        self.broker.refresh()
        leases = {lease.id: lease for lease in self.store.leases()}
        return [
            (session, leases[session.lease_id])
            for session in self.book.sessions()
            if session.lease_id in leases and caller.may_use(leases[session.lease_id].owner_uid)
        ]

    def slice_names(self) -> dict[str, str]:
        """The name of each slice by id."""
        return {piece.id: piece.name for piece in self.store.slices()}

    def events(self, caller: Caller, after_id: int, limit: int) -> tuple[list[Event], int]:
        """The stored events after `after_id` that the caller may see, and the last one's id.

        With `limit` only so many of the newest.
        """
        last = self.store.last_event_id()  # before: what comes in between is found here or later
        found = self.store.events(after_id, limit, None if caller.is_admin else caller.uid)
        return found, max(after_id, last, found[-1].id if found else 0)

    def listen(self, listener: Callable[[], None]) -> None:
        """Calls it, in some thread, whenever there may be new events."""
        self._listeners = [*self._listeners, listener]

    def unlisten(self, listener: Callable[[], None]) -> None:
        """Calls it no more."""
        self._listeners = [other for other in self._listeners if other is not listener]

    def notify(self) -> None:
        """Wakes those who follow the events."""
        for listener in self._listeners:
            listener()

    def slices_changed(self, *, pushed: bool = False) -> None:
        """Slices were made or removed: the broker, unless it knows, and all others hear of it."""
        self.notify()
        if not pushed:
            self.broker.sync()
        for follower in self.after_slices_change:
            follower()

    # ---- changes: GPUs --------------------------------------------------------------------------

    def set_drained(self, caller: Caller, wanted: str, drained: bool) -> GpuView:
        """Sets the drain mark; only for administrators."""
        if not caller.is_admin:
            raise NotPermitted("only root may drain a GPU")
        with self.lock:
            state = planning.find_gpu(self.gpu_states(), wanted)
            if state.drained != drained:
                with self.store.change() as change:
                    change.set_drained(state.gpu.uuid, drained)
                    if drained:
                        change.event("gpu.drained", state.gpu.uuid, "the card takes no new slices")
                    else:
                        change.event("gpu.undrained", state.gpu.uuid, "the card takes slices again")
        self.notify()
        return self.gpu(state.gpu.uuid)

    def _take_report(self, gpu_uuid: str, report: HealthReport) -> None:
        before = self._reports.get(gpu_uuid, HealthReport(Health.OK))
        self._reports[gpu_uuid] = report
        if report.health == before.health and report.reason == before.reason:
            return
        text = f"health is {report.health.value}" + (f": {report.reason}" if report.reason else "")
        LOG.warning("GPU %s: %s", gpu_uuid, text)
        self.broker.tell("gpu.health", gpu_uuid, text)

    # ---- changes: slices ------------------------------------------------------------------------

    def create_slice(self, caller: Caller, request: Request, host: str = "") -> SliceView:
        """Makes a slice, here or on another host, and leases it to the caller.

        Raises what planning and the store raise, and what the other host says.
        """
        if host and host != self.settings.host:
            if self.borrowing is None:
                raise NotFound(f"there is no host {host}: this one has no peers ([relay] peer)")
            piece, _ = self.borrowing.borrow(
                caller, request, host, LeaseKind.OWNER, temporary=False
            )
            self.slices_changed()
            return self.slice(caller, piece.id)
        with self.lock:
            slices = self.store.slices()
            planning.check_request(request)
            self.check_count(caller, slices)
            piece = self.plan(caller, request, slices, temporary=False)
            lease = new_lease(LeaseKind.OWNER, caller.uid, piece.id)
            with self.store.change() as change:
                change.add_slice(piece)
                change.add_lease(lease)
                change.event("slice.created", piece.name, piece.summary(), owner_uid=caller.uid)
        self.slices_changed()
        return self.slice(caller, piece.id)

    def check_count(self, caller: Caller, slices: Sequence[Slice]) -> None:
        """Raises NoCapacity if the caller has as many slices as a user may."""
        most = self.settings.max_slices_per_user
        if caller.is_admin:
            return
        if sum(piece.owner_uid == caller.uid for piece in slices) >= most:
            raise NoCapacity(f"a user may have at most {most} slices at once on this host")

    def check_new(self, caller: Caller, request: Request, slices: Sequence[Slice]) -> None:
        """Raises Conflict (the name is taken) or NoCapacity (the caller has the most it may)."""
        self.check_count(caller, slices)
        self._check_name(request, slices)

    @staticmethod
    def _check_name(request: Request, slices: Sequence[Slice]) -> None:
        # Also checked by the store; here the sentence can be better.
        if any(other.name == request.name for other in slices):
            raise Conflict(f"there is already a slice named {request.name}")

    def plan(
        self, caller: Caller, request: Request, slices: Sequence[Slice], *, temporary: bool
    ) -> Slice:
        """The slice that a request leads to; the caller holds `lock`. Raises what planning does."""
        self._check_name(request, slices)
        plan = planning.plan_slice(
            request, self.gpu_states(), slices, self.settings.placement_policy
        )
        return Slice(
            id=str(uuid.uuid4()),
            name=request.name,
            kind=plan.kind,
            gpu_uuid=plan.gpu_uuid,
            compute_percent=request.compute_percent,
            memory_mib=request.memory_mib,
            mode=plan.mode,
            priority=request.priority,
            virtual_uuid=identity.new_virtual_uuid(),
            pci_address=identity.free_pci_address(piece.pci_address for piece in slices),
            owner_uid=caller.uid,
            temporary=temporary,
            created_at=time.time(),
        )

    def resize_slice(self, caller: Caller, name: str, compute: int, memory: int) -> SliceView:
        """Gives a slice another size; 0 leaves that part as it is.

        Raises Conflict when more memory is in use than the new size, NoCapacity when the card has
        no room for it, BrokerUnavailable when nobody can tell how much is in use.
        """
        if not compute and not memory:
            raise InvalidRequest("neither a new compute share nor a new memory size is given")
        with self.lock:
            piece = self.find_slice(caller, self.store.slices(), name)
        if piece.host:
            raise Conflict(
                f"slice {piece.name} is of host {piece.host}, and such a slice keeps its size: "
                "make another one"
            )
        if memory and memory < piece.memory_mib and not self.broker.connected:
            raise BrokerUnavailable(
                f"slice {piece.name} cannot shrink now: the broker, which knows what is in use, is "
                f"not connected: {self.broker.problem}"
            )
        self.broker.refresh()
        with self.lock:
            slices = self.store.slices()
            piece = self.find_slice(caller, slices, name)
            compute = compute or piece.compute_percent
            memory = memory or piece.memory_mib
            states = {state.gpu.uuid: state for state in self.gpu_states()}
            planning.check_resize(
                piece,
                compute,
                memory,
                states[piece.gpu_uuid],
                slices,
                self.book.used_bytes(piece.virtual_uuid),
            )
            # Shrinking: the broker decides, since memory is charged while we talk.
            if memory < piece.memory_mib:
                # A slice that was not pushed yet has nothing in use.
                with contextlib.suppress(NotFound):
                    self.broker.client.resize_slice(
                        virtual_uuid_bytes(piece.virtual_uuid), memory << 20, compute
                    )
            try:
                with self.store.change() as change:
                    change.resize_slice(piece.id, compute, memory)
                    change.event(
                        "slice.resized",
                        piece.name,
                        f"from {piece.compute_percent} % and {piece.memory_mib} MiB to {compute} % "
                        f"and {memory} MiB",
                        owner_uid=piece.owner_uid,
                    )
            except PoolError:
                self.broker.sync_soon()  # the broker goes back to the old size
                raise
        self.notify()
        self.broker.sync()
        return self.slice(caller, piece.id)

    def delete_slice(self, caller: Caller, name: str, force: bool) -> None:
        """Removes a slice; with force, its sessions end with it. Raises Conflict if it has any."""
        view = self.slice(caller, name)
        if view.sessions and not force:
            raise Conflict(
                f"slice {view.piece.name} has {view.sessions} running "
                f"session{'s' if view.sessions > 1 else ''}; end them first, or use --force"
            )
        with self.lock:
            piece = self.find_slice(caller, self.store.slices(), view.piece.id)
            mine = [lease for lease in self.store.leases() if piece.id in lease.slice_ids]
            lease_ids = {lease.id for lease in mine}
            if not force and any(lease.kind == LeaseKind.VM for lease in mine):
                raise Conflict(
                    f"slice {piece.name} is leased to a virtual machine; detach it first (`guest "
                    "list`), or use --force"
                )
            if not force and any(lease.kind == LeaseKind.PEER for lease in mine):
                raise Conflict(
                    f"slice {piece.name} is lent to another host (`lease list`); delete it there, "
                    "or use --force"
                )
            run_ids = [run.id for run in self.store.runs() if run.lease_id in lease_ids]
            with self.store.change() as change:
                change.delete_slice(piece.id)
                change.event(
                    "slice.deleted", piece.name, "the slice is gone", owner_uid=piece.owner_uid
                )
        for run_id in run_ids:
            self.runs.remove_file(run_id)
        self.slices_changed()

    # ---- changes: runs --------------------------------------------------------------------------

    def start_run(
        self, caller: Caller, slice_name: str, request: Request | None, command: str
    ) -> tuple[Run, Slice]:
        """Prepares the calling process for its program (Programs.start)."""
        return self.programs.start(caller, slice_name, request, command)

    def check_usable(self, piece: Slice) -> None:
        """Raises Conflict where no program could use the slice."""
        if piece.host:
            entry = self.store.borrowed().get(piece.id)
            if entry is None or entry.state != BorrowedState.HELD:
                raise Conflict(
                    f"slice {piece.name} cannot be used: host {piece.host} does not know of it any "
                    "more; delete it"
                )
            return
        for state in self.gpu_states():
            if state.gpu.uuid != piece.gpu_uuid:
                continue
            if state.health in (Health.FAILED, Health.MISSING):
                raise Conflict(
                    f"slice {piece.name} cannot be used: its GPU {state.gpu.uuid} is "
                    f"{state.health.value} ({state.health_reason})"
                )

    def kill_session(self, caller: Caller, session_id: str) -> tuple[Session, Lease]:
        """Ends a session; raises NotFound, BrokerUnavailable."""
        sessions = self.sessions(caller)
        found = [entry for entry in sessions if entry[0].id == session_id] or [
            entry
            for entry in sessions
            if len(session_id) >= 4 and entry[0].id.startswith(session_id)
        ]
        if len(found) != 1:
            raise NotFound(
                f"there is no session {session_id}; `session list` shows those there are"
            )
        session, lease = found[0]
        self.broker.client.kill_session(uuid.UUID(session.id).bytes, f"killed by user {caller.uid}")
        return session, lease
