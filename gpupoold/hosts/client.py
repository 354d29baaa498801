"""Asks another host of the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import grpc

from gpupoold import errors
from gpupoold.conf import PeerSettings, Settings
from gpupoold.hosts import credentials
from gpupoold.hosts import peer_pb2 as pb
from gpupoold.hosts import peer_pb2_grpc as pb_grpc

CALL_SECONDS = 10.0
T = TypeVar("T")


class PeerUnavailable(errors.PoolError):
    """Another host is away, or does not let this one in."""

    status = "UNAVAILABLE"


_ERRORS: dict[str, type[errors.PoolError]] = {
    kind.status: kind
    for kind in (
        errors.InvalidRequest,
        errors.NotFound,
        errors.NoCapacity,
        errors.AlreadyExists,
        errors.Conflict,
        errors.NotPermitted,
    )
}


class PeerClient:
    """One other host. A connection for each call: hosts ask seldom, and so a certificate that is
    read anew counts at once. Raises PeerUnavailable when nobody answers, or what the host says."""

    def __init__(self, settings: Settings, peer: PeerSettings) -> None:
        self._settings = settings
        self.peer = peer

    def _call(self, method: str, request: Any, seconds: float) -> Any:
        name = self.peer.name
        try:
            own = credentials.of_client(self._settings)
        except errors.ConfigurationError as error:
            raise PeerUnavailable(f"host {name} cannot be asked: {error}") from None
        options = [("grpc.ssl_target_name_override", name), ("grpc.enable_http_proxy", 0)]
        with grpc.secure_channel(self.peer.address, own, options) as channel:
            call: Callable[..., Any] = getattr(pb_grpc.PeerStub(channel), method)
            try:
                return call(request, timeout=seconds)
            except grpc.RpcError as error:
                status, sentence = error.code().name, error.details() or ""
        kind = _ERRORS.get(status)
        if kind is not None:
            raise kind(f"host {name}: {sentence}")
        raise PeerUnavailable(f"host {name} ({self.peer.address}) cannot be asked: {sentence}")

    def describe(self, seconds: float = CALL_SECONDS) -> pb.Description:
        """What it has."""
        return self._call("Describe", pb.DescribeRequest(), seconds)

    def borrow(self, request: pb.BorrowRequest) -> pb.Loan:
        """A slice of it."""
        return self._call("Borrow", request, CALL_SECONDS)

    def give_back(self, lease_id: str) -> None:
        """Raises NotFound if it does not know the lease."""
        self._call("GiveBack", pb.GiveBackRequest(lease=lease_id), CALL_SECONDS)

    def compare(self, leases: Sequence[str]) -> list[str]:
        """Those leases that it does not know."""
        return list(self._call("Compare", pb.CompareRequest(leases=leases), CALL_SECONDS).unknown)
