"""Serves peer.proto to the other hosts of the pool."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

import gpupoold
from gpupoold.api import views
from gpupoold.conf import PeerSettings, Settings
from gpupoold.errors import ConfigurationError, NotPermitted, PoolError, SocketError
from gpupoold.hosts import credentials
from gpupoold.hosts import peer_pb2 as pb
from gpupoold.hosts import peer_pb2_grpc as pb_grpc
from gpupoold.hosts.lending import Lending, Wish
from gpupoold.model import printable
from gpupoold.pool import Pool
from gpupoold.slices.planning import Request

LOG = logging.getLogger(__name__)

THREADS = 8
STREAMS_MAX = 8  # requests at once on one connection
MESSAGE_MAX = 1 << 20
HANDSHAKE_MS = 5000
LEASES_MAX = 100_000


def names_of(context: dict[str, Iterable[bytes]]) -> list[str]:
    """The names in a caller's certificate: alternative names, else the common name."""
    found = context.get("x509_subject_alternative_name") or context.get("x509_common_name") or ()
    return [name.decode("utf-8", "replace") for name in found]


def _answers(method: Callable[..., Any]) -> Callable[..., Any]:
    """Only for peers; errors become status codes, and what was refused is logged with who asked."""

    @functools.wraps(method)
    def wrapper(self: PeerService, request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return method(self, self.peer(context), request)
        except PoolError as error:
            sentence = printable(str(error))
            LOG.warning("%s of %s is refused: %s", method.__name__, context.peer(), sentence)
            context.abort(grpc.StatusCode[error.status], sentence)  # raises
        except Exception as error:
            LOG.exception("a request of another host failed")
            context.abort(grpc.StatusCode.INTERNAL, f"gpupoold failed: {type(error).__name__}")

    return wrapper


class PeerService(pb_grpc.PeerServicer):
    """The service; all decisions are those of `Lending`."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._lending = Lending(pool)
        self._peers = {peer.name: peer for peer in pool.settings.peers}

    def peer(self, context: grpc.ServicerContext) -> PeerSettings:
        """Who calls; raises NotPermitted."""
        names = names_of(context.auth_context())
        for name in names:
            if name in self._peers:
                return self._peers[name]
        raise NotPermitted(
            f"host {', '.join(map(repr, names)) or 'without a name'} is not among the peers of "
            f"host {self._pool.settings.host} ([relay] peer)"
        )

    @_answers
    def Describe(self, peer: PeerSettings, request: pb.DescribeRequest) -> pb.Description:
        return pb.Description(
            host=self._pool.settings.host,
            version=gpupoold.version(),
            gpus=[views.gpu(view, self._pool.settings.host) for view in self._pool.gpus()],
            lends=bool(self._pool.broker.relay_address) and peer.slices > 0,
        )

    @_answers
    def Borrow(self, peer: PeerSettings, request: pb.BorrowRequest) -> pb.Loan:
        wish = Wish(
            request.request,
            request.time,
            request.consumer,
            Request(
                name="",
                compute_percent=request.compute_percent,
                memory_mib=request.memory_mib,
                gpu=request.gpu,
                mode=request.mode,
                priority=request.priority,
            ),
        )
        lease, piece, snapshot = self._lending.lend(peer, wish)
        return pb.Loan(
            lease=lease.id,
            key=lease.key,
            gpu_uuid=piece.gpu_uuid,
            relay_address=self._pool.broker.relay_address,
            snapshot=snapshot,
        )

    @_answers
    def GiveBack(self, peer: PeerSettings, request: pb.GiveBackRequest) -> pb.GiveBackReply:
        self._lending.end(peer.name, request.lease, "it is not needed any more")
        return pb.GiveBackReply()

    @_answers
    def Compare(self, peer: PeerSettings, request: pb.CompareRequest) -> pb.CompareReply:
        return pb.CompareReply(
            unknown=self._lending.compare(peer.name, request.leases[:LEASES_MAX])
        )


class PeerServer:
    """The gRPC server at [api] tcp_listen; nobody without a certificate gets that far."""

    def __init__(self, settings: Settings, pool: Pool) -> None:
        self._settings = settings
        self._server = grpc.server(
            ThreadPoolExecutor(THREADS, thread_name_prefix="peers"),
            options=[
                ("grpc.max_receive_message_length", MESSAGE_MAX),
                ("grpc.max_concurrent_streams", STREAMS_MAX),
                ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
                ("grpc.so_reuseport", 0),
            ],
            maximum_concurrent_rpcs=4 * THREADS,
        )
        pb_grpc.add_PeerServicer_to_server(PeerService(pool), self._server)
        self.address = ""

    def start(self) -> None:
        """Serves; raises ConfigurationError or SocketError."""
        wanted = self._settings.peer_listen
        try:
            port = self._server.add_secure_port(wanted, credentials.of_server(self._settings))
        except (RuntimeError, ValueError) as error:
            raise SocketError(f"socket: [api] tcp_listen {wanted}: {error}") from None
        if port == 0:
            raise ConfigurationError(f"[api] tcp_listen {wanted} cannot be listened on")
        self.address = f"{wanted.rpartition(':')[0]}:{port}"
        self._server.start()
        LOG.info("other hosts are served at %s", self.address)

    def stop(self) -> None:
        """Ends requests and connections."""
        self._server.stop(grace=1).wait(5)
