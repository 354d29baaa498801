"""Serves gpupool.proto, health and reflection on the unix socket.

One thread runs an event loop; only work that a caller has a right to now runs in a thread of its
own. So a client that opens a request and says no more holds some memory and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from gpupoold.api import gpupool_pb2 as pb
from gpupoold.api import gpupool_pb2_grpc as pb_grpc
from gpupoold.api.peers import PeerGate
from gpupoold.api.service import PoolService
from gpupoold.api.turns import Turns
from gpupoold.conf import Settings
from gpupoold.errors import SocketError
from gpupoold.guests.manager import Guests
from gpupoold.pool import Pool

LOG = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["Pool"].full_name
MESSAGE_MAX = 1 << 20
STREAMS_MAX = 8  # requests at once on one connection
PENDING_MAX = 8192  # of all connections, before gRPC begins to turn some away, whoever's they are
BROKER_SECONDS = 0.2  # how often it is looked at for its health


class ApiServer:
    """The gRPC server behind its gate."""

    def __init__(
        self,
        settings: Settings,
        pool: Pool,
        listeners: Sequence[socket.socket],
        guests: Guests | None = None,
    ) -> None:
        """`listeners`: root's and the public socket (peers.Claim); guests: None without libvirt."""
        self._guests = guests
        self._settings = settings
        self._pool = pool
        self._private = os.path.join(settings.private_dir, "api.sock")
        self._gate = PeerGate(
            listeners, self._private, settings.max_connections, settings.max_connections_per_user
        )
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="api", daemon=True)

    def start(self) -> None:
        """Serves; raises SocketError if the private socket cannot be made."""
        self._thread.start()
        self._ready.result()
        self._gate.start()

    def stop(self) -> None:
        """Ends requests and connections."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(timeout=5)
        self._gate.stop()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except Exception as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", MESSAGE_MAX),
                ("grpc.max_concurrent_streams", STREAMS_MAX),
                ("grpc.server.max_pending_requests", PENDING_MAX),
                ("grpc.server.max_pending_requests_hard_limit", 2 * PENDING_MAX),
                ("grpc.so_reuseport", 0),
            ]
        )
        turns = Turns(self._settings.worker_threads)
        service = PoolService(self._pool, self._gate, turns, self._guests)
        pb_grpc.add_PoolServicer_to_server(service, server)
        state = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(state, server)
        reflection.enable_server_reflection(
            (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
        try:
            server.add_insecure_port(f"unix:{self._private}")
            await server.start()
        except RuntimeError as error:
            raise SocketError(f"socket: {self._private} cannot be made: {error}") from None
        await state.set("", health_pb2.HealthCheckResponse.SERVING)
        await state.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)

        def news() -> None:
            with contextlib.suppress(RuntimeError):  # the loop ends at this moment
                self._loop.call_soon_threadsafe(service.wake_followers)

        self._pool.listen(news)
        watching = self._loop.create_task(self._watch_broker(state))
        self._ready.set_result(None)
        await self._stop.wait()
        self._pool.unlisten(news)
        watching.cancel()
        await state.enter_graceful_shutdown()
        await server.stop(grace=1)
        turns.close()

    async def _watch_broker(self, state: health.aio.HealthServicer) -> None:
        """Service name gpupool.broker: whether the broker is connected."""
        shown: bool | None = None
        while True:
            now = self._pool.broker.connected
            if now != shown:
                status = health_pb2.HealthCheckResponse
                await state.set("gpupool.broker", status.SERVING if now else status.NOT_SERVING)
                shown = now
            await asyncio.sleep(BROKER_SECONDS)
