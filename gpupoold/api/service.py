"""The methods of gpupool.proto: who asks, what the pool says, and errors as status codes."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

import gpupoold
from gpupoold import paths
from gpupoold.api import gpupool_pb2 as pb
from gpupoold.api import gpupool_pb2_grpc as pb_grpc
from gpupoold.api import views
from gpupoold.api.peers import PeerGate
from gpupoold.api.turns import Turns
from gpupoold.errors import Conflict, NoCapacity, NotPermitted, PoolError
from gpupoold.gpus.topology import Surveyor
from gpupoold.guests.manager import Guests
from gpupoold.model import PRIORITY_DEFAULT, Caller, LeaseKind, SliceKind, printable
from gpupoold.overview import SliceView
from gpupoold.pool import Pool
from gpupoold.programs import Waits
from gpupoold.slices.planning import Request

LOG = logging.getLogger(__name__)

COMMAND_MAX = 4096
SENTENCE_MAX = 1000
ID_MAX = (1 << 63) - 1  # SQLite's largest number
FOLLOWERS_MAX = 256  # at once; one user other than root may have a quarter of them
LOOK_SECONDS = 1.0  # followers look for events at least that often


async def _abort(context: grpc.aio.ServicerContext, error: Exception) -> None:
    if isinstance(error, PoolError):
        # One line, and short enough for an HTTP/2 header: it may repeat what the caller said.
        sentence = printable(str(error))
        if len(sentence) > SENTENCE_MAX:
            sentence = sentence[: SENTENCE_MAX - 3] + "..."
        await context.abort(grpc.StatusCode[error.status], sentence)  # raises
    LOG.exception("a request failed", exc_info=error)
    await context.abort(
        grpc.StatusCode.INTERNAL, f"gpupoold failed: {type(error).__name__}: {error}"
    )


def _answers(method: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """Runs a method in a thread, when it is the caller's turn; errors become status codes."""

    @functools.wraps(method)
    async def wrapper(
        self: PoolService, request: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Any:
        try:
            caller = self.caller(context)
            return await self.turns.take(caller, functools.partial(method, self, caller, request))
        except Exception as error:
            await _abort(context, error)
            raise  # never reached: abort raises

    return wrapper


class PoolService(pb_grpc.PoolServicer):
    """The service; all decisions are the pool's."""

    def __init__(
        self, pool: Pool, gate: PeerGate, turns: Turns, guests: Guests | None = None
    ) -> None:
        """guests: None where no virtual machines are served."""
        self.turns = turns
        self._pool = pool
        self._guests = guests
        self._gate = gate
        self._surveyor = Surveyor(pool.settings.peers)
        self._followers: Counter[int] = Counter()  # by user
        self._news = asyncio.Event()

    def caller(self, context: grpc.aio.ServicerContext[Any, Any]) -> Caller:
        """Who calls; raises NotPermitted if that is not known."""
        found = self._gate.caller(context.peer())
        if found is None:
            raise NotPermitted("the caller is not known")
        return found

    def wake_followers(self) -> None:
        """There may be new events. Called in the event loop."""
        self._news.set()
        self._news = asyncio.Event()

    @_answers
    def GetHost(self, caller: Caller, request: pb.GetHostRequest) -> pb.Host:
        pool = self._pool
        return pb.Host(
            host=pool.settings.host,
            version=gpupoold.version(),
            broker_connected=pool.broker.connected,
            generation=pool.store.generation(),
            driver_directory=pool.settings.driver_directory,
            driver_version=pool.driver.version,
            broker_problem=pool.broker.problem,
        )

    @_answers
    def ListGpus(self, caller: Caller, request: pb.ListGpusRequest) -> pb.ListGpusReply:
        pool = self._pool
        host = pool.settings.host
        reply = pb.ListGpusReply(gpus=[views.gpu(view, host) for view in pool.gpus()])
        if request.all_hosts and pool.borrowing is not None:
            for state in pool.borrowing.states():
                reply.gpus.extend(
                    views.foreign_gpu(entry, state.peer.name) for entry in state.cards
                )
                if state.problem:
                    reply.problems.append(state.problem)
        return reply

    @_answers
    def GetGpu(self, caller: Caller, request: pb.GetGpuRequest) -> pb.Gpu:
        return views.gpu(self._pool.gpu(request.uuid), self._pool.settings.host)

    @_answers
    def SetGpuDrained(self, caller: Caller, request: pb.SetGpuDrainedRequest) -> pb.Gpu:
        view = self._pool.set_drained(caller, request.uuid, request.drained)
        return views.gpu(view, self._pool.settings.host)

    def _piece(self, view: SliceView) -> pb.Slice:
        return views.piece(view, self._pool.settings.host)

    @_answers
    def GetTopology(self, caller: Caller, request: pb.GetTopologyRequest) -> pb.Topology:
        cards = [state.gpu for state in self._pool.gpu_states()]
        return views.topology(self._surveyor.look(cards))

    @_answers
    def CreateSlice(self, caller: Caller, request: pb.CreateSliceRequest) -> pb.Slice:
        wanted = Request(
            name=request.name,
            compute_percent=request.compute_percent,
            memory_mib=request.memory_mib,
            kind=request.kind or SliceKind.SHARED.value,
            gpu=request.gpu,
            mode=request.mode,
            priority=request.priority if request.has_priority else PRIORITY_DEFAULT,
            profile=request.profile,
        )
        return self._piece(self._pool.create_slice(caller, wanted, request.host))

    @_answers
    def ListSlices(self, caller: Caller, request: pb.ListSlicesRequest) -> pb.ListSlicesReply:
        return pb.ListSlicesReply(slices=[self._piece(view) for view in self._pool.slices(caller)])

    @_answers
    def GetSlice(self, caller: Caller, request: pb.GetSliceRequest) -> pb.Slice:
        return self._piece(self._pool.slice(caller, request.name))

    @_answers
    def ResizeSlice(self, caller: Caller, request: pb.ResizeSliceRequest) -> pb.Slice:
        view = self._pool.resize_slice(
            caller, request.name, request.compute_percent, request.memory_mib
        )
        return self._piece(view)

    @_answers
    def DeleteSlice(self, caller: Caller, request: pb.DeleteSliceRequest) -> pb.DeleteSliceReply:
        self._pool.delete_slice(caller, request.name, request.force)
        return pb.DeleteSliceReply()

    @_answers
    def StartRun(self, caller: Caller, request: pb.StartRunRequest) -> pb.Run:
        temporary = None
        if not request.slice:
            temporary = Request(
                name="run",
                compute_percent=request.compute_percent,
                memory_mib=request.memory_mib,
                gpu=request.gpu,
                mode=request.mode,
                priority=request.priority if request.has_priority else PRIORITY_DEFAULT,
            )
        command = printable(request.command[:COMMAND_MAX])
        if temporary is not None and request.ticket:
            started = self._pool.programs.wait(caller, temporary, command, request.ticket[:64])
            if isinstance(started, Waits):
                return pb.Run(place=started.place, why=started.why)
            run, piece = started
        else:
            run, piece = self._pool.start_run(caller, request.slice, temporary, command)
        return pb.Run(
            id=run.id,
            lease=run.lease_id,
            slice=piece.name,
            lease_file=run.lease_file,
            client_directory=str(paths.search_directory(self._pool.settings.run_dir)),
        )

    def _lease(self, entry: Any) -> pb.Lease:
        pool = self._pool
        runs = {run.lease_id: run for run in pool.store.runs() if entry.kind == LeaseKind.RUN}
        domain = ""
        if entry.kind == LeaseKind.VM:
            found = (guest for guest in pool.store.guests() if guest.id == entry.id)
            domain = next((guest.domain_name for guest in found), "")
        lent = pool.store.lent().get(entry.id) if entry.kind == LeaseKind.PEER else None
        return views.lease(entry, pool.slice_names(), pool.book, runs, domain, lent)

    @_answers
    def ListLeases(self, caller: Caller, request: pb.ListLeasesRequest) -> pb.ListLeasesReply:
        return pb.ListLeasesReply(
            leases=[self._lease(entry) for entry in self._pool.leases(caller)]
        )

    @_answers
    def GetLease(self, caller: Caller, request: pb.GetLeaseRequest) -> pb.Lease:
        return self._lease(self._pool.lease(caller, request.id))

    @_answers
    def ListSessions(self, caller: Caller, request: pb.ListSessionsRequest) -> pb.ListSessionsReply:
        names = self._pool.slice_names()
        return pb.ListSessionsReply(
            sessions=[
                views.session(entry, lease, names) for entry, lease in self._pool.sessions(caller)
            ]
        )

    @_answers
    def KillSession(self, caller: Caller, request: pb.KillSessionRequest) -> pb.Session:
        entry, lease = self._pool.kill_session(caller, request.id)
        return views.session(entry, lease, self._pool.slice_names())

    def _need_guests(self) -> Guests:
        if self._guests is None:
            raise Conflict(
                "this gpupoold serves no virtual machines: [libvirt] uri is not set in its "
                "configuration"
            )
        return self._guests

    @_answers
    def AttachGuest(self, caller: Caller, request: pb.AttachGuestRequest) -> pb.Guest:
        return views.guest(self._need_guests().attach(caller, request.domain, request.slice))

    @_answers
    def DetachGuest(self, caller: Caller, request: pb.DetachGuestRequest) -> pb.Guest:
        return views.guest(self._need_guests().detach(caller, request.domain, request.force))

    @_answers
    def ListGuests(self, caller: Caller, request: pb.ListGuestsRequest) -> pb.ListGuestsReply:
        guests = self._need_guests()
        return pb.ListGuestsReply(
            guests=[views.guest(view) for view in guests.list(caller)], problem=guests.problem
        )

    async def WatchEvents(
        self, request: pb.WatchEventsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.Event]:
        """Streams; with `follow` it does not end by itself. Holds no thread while it waits."""
        followed: Caller | None = None
        try:
            caller = self.caller(context)
            if request.follow:
                self._begin_to_follow(caller)
                followed = caller
            last, limit = min(request.after_id, ID_MAX), request.limit
            while True:
                news = self._news  # before the look, so that nothing is missed in between
                found, last = await self.turns.take(
                    caller, functools.partial(self._pool.events, caller, last, limit)
                )
                for entry in found:
                    yield views.event(entry)
                if not request.follow:
                    return
                limit = 0  # it holds for the stored ones only
                try:
                    await asyncio.wait_for(news.wait(), LOOK_SECONDS)
                except TimeoutError:
                    continue
        except PoolError as error:
            await _abort(context, error)
        finally:
            if followed is not None:
                self._followers[followed.uid] -= 1

    def _begin_to_follow(self, caller: Caller) -> None:
        mine = self._followers[caller.uid]
        if not caller.is_admin and (
            self._followers.total() >= FOLLOWERS_MAX or mine >= FOLLOWERS_MAX // 4
        ):
            raise NoCapacity("too many clients follow the events already")
        self._followers[caller.uid] += 1
