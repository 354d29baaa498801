"""Serves gpupool.proto, health and reflection on the unix socket."""

from __future__ import annotations

import functools
import logging
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

import gpupoold
from gpupoold import paths
from gpupoold.api import gpupool_pb2 as pb
from gpupoold.api import gpupool_pb2_grpc as pb_grpc
from gpupoold.api import views
from gpupoold.api.peers import PeerGate
from gpupoold.conf import Settings
from gpupoold.errors import NoCapacity, NotPermitted, PoolError, SocketError
from gpupoold.model import PRIORITY_DEFAULT, Caller, LeaseKind, SliceKind, printable
from gpupoold.pool import Pool
from gpupoold.slices.planning import Request

LOG = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["Pool"].full_name
MESSAGE_MAX = 1 << 20
COMMAND_MAX = 4096


def _abort(context: grpc.ServicerContext, error: Exception) -> None:
    if isinstance(error, PoolError):
        context.abort(grpc.StatusCode[error.status], str(error))  # raises
    LOG.exception("a request failed", exc_info=error)
    context.abort(grpc.StatusCode.INTERNAL, f"gpupoold failed: {type(error).__name__}: {error}")


def _answers(method: Callable[..., Any]) -> Callable[..., Any]:
    """Finds the caller and turns errors into status codes."""

    @functools.wraps(method)
    def wrapper(self: PoolService, request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return method(self, self.caller(context), request)
        except Exception as error:
            _abort(context, error)
            raise  # never reached: abort raises

    return wrapper


class PoolService(pb_grpc.PoolServicer):
    """The service; all decisions are the pool's."""

    def __init__(self, pool: Pool, gate: PeerGate) -> None:
        self._pool = pool
        self._gate = gate
        self._most_followers = max(1, pool.settings.worker_threads // 2)
        self._followers: Counter[int] = Counter()  # by user
        self._followers_lock = threading.Lock()

    def caller(self, context: grpc.ServicerContext) -> Caller:
        """Who calls; raises NotPermitted if that is not known."""
        found = self._gate.caller(context.peer())
        if found is None:
            raise NotPermitted("the caller is not known")
        return found

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
        return pb.ListGpusReply(gpus=[views.gpu(view) for view in self._pool.gpus()])

    @_answers
    def GetGpu(self, caller: Caller, request: pb.GetGpuRequest) -> pb.Gpu:
        return views.gpu(self._pool.gpu(request.uuid))

    @_answers
    def SetGpuDrained(self, caller: Caller, request: pb.SetGpuDrainedRequest) -> pb.Gpu:
        return views.gpu(self._pool.set_drained(caller, request.uuid, request.drained))

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
        return views.piece(self._pool.create_slice(caller, wanted))

    @_answers
    def ListSlices(self, caller: Caller, request: pb.ListSlicesRequest) -> pb.ListSlicesReply:
        return pb.ListSlicesReply(slices=[views.piece(view) for view in self._pool.slices(caller)])

    @_answers
    def GetSlice(self, caller: Caller, request: pb.GetSliceRequest) -> pb.Slice:
        return views.piece(self._pool.slice(caller, request.name))

    @_answers
    def ResizeSlice(self, caller: Caller, request: pb.ResizeSliceRequest) -> pb.Slice:
        view = self._pool.resize_slice(
            caller, request.name, request.compute_percent, request.memory_mib
        )
        return views.piece(view)

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
        run, piece = self._pool.start_run(
            caller, request.slice, temporary, printable(request.command[:COMMAND_MAX])
        )
        return pb.Run(
            id=run.id,
            lease=run.lease_id,
            slice=piece.name,
            lease_file=run.lease_file,
            client_directory=str(paths.client_directory()),
        )

    def _lease(self, entry: Any) -> pb.Lease:
        pool = self._pool
        runs = {run.lease_id: run for run in pool.store.runs() if entry.kind == LeaseKind.RUN}
        return views.lease(entry, pool.slice_names(), pool.book, runs)

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

    def WatchEvents(
        self, request: pb.WatchEventsRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.Event]:
        """Streams; the one method that does not end by itself."""
        followed: Caller | None = None
        try:
            caller = self.caller(context)
            if request.follow:
                self._begin_to_follow(caller)
                followed = caller
            for entry in self._pool.events(caller, request.after_id, request.limit, request.follow):
                if not context.is_active():
                    return
                if entry is not None:
                    yield views.event(entry)
        except PoolError as error:
            _abort(context, error)
        finally:
            if followed is not None:
                with self._followers_lock:
                    self._followers[followed.uid] -= 1

    def _begin_to_follow(self, caller: Caller) -> None:
        """Each follower holds a thread; some are kept for other requests and other users."""
        with self._followers_lock:
            mine = self._followers[caller.uid]
            if self._followers.total() >= self._most_followers or (
                not caller.is_admin and mine >= max(1, self._most_followers // 4)
            ):
                raise NoCapacity("too many clients follow the events already")
            self._followers[caller.uid] += 1


class ApiServer:
    """The gRPC server behind its gate."""

    def __init__(self, settings: Settings, pool: Pool, listener: socket.socket) -> None:
        """`listener` is the public socket (peers.claim)."""
        self._settings = settings
        self._pool = pool
        private = os.path.join(settings.private_dir, "api.sock")
        self._gate = PeerGate(
            listener, private, settings.max_connections, settings.max_connections_per_user
        )
        threads = futures.ThreadPoolExecutor(settings.worker_threads, thread_name_prefix="request")
        self._server = grpc.server(
            threads,
            options=[
                ("grpc.max_receive_message_length", MESSAGE_MAX),
                ("grpc.so_reuseport", 0),
            ],
        )
        pb_grpc.add_PoolServicer_to_server(PoolService(pool, self._gate), self._server)
        self._health = health.HealthServicer(
            experimental_non_blocking=True, experimental_thread_pool=threads
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        self._private = private
        self._stop = threading.Event()

    def start(self) -> None:
        """Serves; raises SocketError if the private socket cannot be made."""
        try:
            self._server.add_insecure_port(f"unix:{self._private}")
        except RuntimeError as error:
            raise SocketError(f"socket: {self._private} cannot be made: {error}") from None
        self._server.start()
        self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        self._health.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
        self._gate.start()
        threading.Thread(target=self._follow_broker, name="health-broker", daemon=True).start()

    def _follow_broker(self) -> None:
        """Service name gpupool.broker: whether the broker is connected."""
        shown: bool | None = None
        while not self._stop.is_set():
            now = self._pool.broker.connected
            if now != shown:
                status = health_pb2.HealthCheckResponse
                self._health.set("gpupool.broker", status.SERVING if now else status.NOT_SERVING)
                shown = now
            self._stop.wait(0.2)

    def stop(self) -> None:
        """Ends requests and connections."""
        self._stop.set()
        self._health.enter_graceful_shutdown()
        self._server.stop(grace=1).wait(timeout=3)
        self._gate.stop()
