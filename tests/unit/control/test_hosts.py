"""Two hosts that borrow from each other: gRPC over mutual TLS, and brokers of the test's making."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpupoold.api.gpupool_pb2 import Gpu
from gpupoold.conf import PeerSettings
from gpupoold.errors import (
    AlreadyExists,
    ConfigurationError,
    Conflict,
    InvalidRequest,
    NoCapacity,
    NotFound,
    NotPermitted,
)
from gpupoold.guests.leases import GuestLeases
from gpupoold.guests.request import GuestRequest
from gpupoold.hosts import lending
from gpupoold.hosts import peer_pb2 as peer
from gpupoold.hosts.borrowing import Borrowing, PeerState, relay_address
from gpupoold.hosts.client import PeerClient, PeerUnavailable
from gpupoold.hosts.lending import Requests, Wish, check_limits
from gpupoold.hosts.server import PeerServer
from gpupoold.leases import broker_pb2 as pb
from gpupoold.model import BorrowedState, Caller, Health, LeaseKind
from gpupoold.pool import Pool
from gpupoold.slices.planning import Request
from gpupoold.store import Store
from tests.certificates import Authority

from .fakes import FakeBroker, FakeDriver, gpu, settings

ROOT = Caller(0, os.getpid(), True)
ALICE = Caller(1001, os.getpid(), False)
SNAPSHOT = bytes(range(256)) * 3


def want(name: str, compute: int = 25, memory: int = 4096, **more: Any) -> Request:
    return Request(name=name, compute_percent=compute, memory_mib=memory, **more)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


# ---- Rules --------------------------------------------------------------------------------------


def wish(request: bytes = bytes(16), at: float = 1000.0) -> Wish:
    return Wish(request, at, "somebody", want("x"))


def test_a_request_is_answered_once() -> None:
    requests = Requests(started_at=900.0)
    requests.take(wish(), 1000.0)
    with pytest.raises(AlreadyExists, match="answered already"):
        requests.take(wish(), 1001.0)
    requests.take(wish(b"another request!"), 1001.0)


@pytest.mark.parametrize("now", [1061.0, 939.0])
def test_a_request_of_another_time_is_refused(now: float) -> None:
    with pytest.raises(Conflict, match=r"61 s (old|early)"):
        Requests(started_at=0.0).take(wish(), now)


def test_a_request_from_before_the_start_is_refused() -> None:
    """It may have been answered already."""
    with pytest.raises(Conflict, match="before this gpupoold started"):
        Requests(started_at=1000.5).take(wish(), 1001.0)


def test_a_request_needs_a_whole_id() -> None:
    with pytest.raises(InvalidRequest):
        Requests(started_at=0.0).take(wish(b"short"), 1000.0)


@pytest.mark.parametrize(
    ("limits", "fits"),
    [
        ((1, 0, 0), True),
        ((0, 0, 0), False),
        ((1, 25, 4096), True),
        ((1, 24, 4096), False),
        ((1, 25, 4095), False),
    ],
)
def test_limits(limits: tuple[int, int, int], fits: bool) -> None:
    one = PeerSettings("a", "127.0.0.1:1", *limits)
    if fits:
        check_limits(one, want("x"), [])
    else:
        with pytest.raises(NoCapacity, match="host a has"):
            check_limits(one, want("x"), [])


def test_where_a_relays_door_is() -> None:
    assert relay_address("10.0.0.2:7", "example.invalid:1") == "10.0.0.2:7"
    assert relay_address("0.0.0.0:7", "127.0.0.1:1") == "127.0.0.1:7"
    assert relay_address("[::]:7", "[::1]:1") == "[::1]:7"
    for wrong in ("", "7", "10.0.0.2:x"):
        with pytest.raises(PeerUnavailable):
            relay_address(wrong, "127.0.0.1:1")


def test_who_has_room() -> None:
    card = Gpu(mode="shared", health="ok", memory_free_mib=4096, compute_allocated_percent=75)
    settings_of = PeerSettings("b", "127.0.0.1:1", 1, 0, 0)
    assert PeerState(settings_of, "", (card,), True).has_room(want("x"))
    assert not PeerState(settings_of, "", (card,), False).has_room(want("x"))
    assert not PeerState(settings_of, "", (card,), True).has_room(want("x", 26))
    assert not PeerState(settings_of, "", (card,), True).has_room(want("x", 25, 4097))
    for changed in ({"drained": True}, {"mode": "mig"}, {"health": "failed"}):
        other = Gpu()
        other.CopyFrom(card)
        other.MergeFrom(Gpu(**changed))
        assert not PeerState(settings_of, "", (other,), True).has_room(want("x"))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"relay_certificate_file": "/c"}, "belong together"),
        ({"relay_listen": "0.0.0.0:1"}, "needs certificate_file"),
        ({"api_tcp_listen": "0.0.0.0:1"}, "without TLS"),
        ({"relay_peer": "b 10.0.0.2:1"}, "needs certificate_file"),
    ],
)
def test_nothing_without_certificates(root: Path, options: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        settings(root, **options)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("b", "NAME ADDRESS:PORT"),
        ("b 10.0.0.2", "must be ADDRESS:PORT"),
        ("b 10.0.0.2:99999", "must be ADDRESS:PORT"),
        ("b 10.0.0.2:1 slices=many", "slices=many is not"),
        ("test 10.0.0.2:1", "is this host"),
    ],
)
def test_wrong_peers(root: Path, line: str, why: str) -> None:
    files = {f"relay_{name}": "/x" for name in ("certificate_file", "key_file", "ca_file")}
    with pytest.raises(ConfigurationError, match=why):
        settings(root, **files, relay_peer=line)


# ---- Two hosts ----------------------------------------------------------------------------------


class Side:
    """gpupoold's inside on one host."""

    def __init__(self, root: Path, name: str, port: int, peer_line: str, files: Any) -> None:
        root.mkdir()
        self.files = files
        self.settings = settings(
            root,
            api_tcp_listen=f"127.0.0.1:{port}",
            relay_certificate_file=str(files.certificate),
            relay_key_file=str(files.key),
            relay_ca_file=str(files.authority),
            relay_listen="127.0.0.1:0",
            relay_peer=peer_line,
        )
        object.__setattr__(self.settings, "host", name)
        self.driver = FakeDriver([gpu(0)] if name == "far" else [])
        self.broker = FakeBroker(self.settings.broker_socket)
        self.broker.relay_address = "127.0.0.1:7777"
        self.broker.state.devices.add(uuid=gpu(0).uuid, ready=True, snapshot=SNAPSHOT)
        self.server: PeerServer | None = None
        self.start()

    def start(self) -> None:
        store = Store(self.settings.database, self.settings.event_limit)
        store.open()
        self.pool = Pool(self.settings, store, self.driver)  # type: ignore[arg-type]
        self.borrowing = self.pool.borrowing = Borrowing(self.pool)
        self.pool.start()
        assert self.pool.broker.client.wait_connected(10)
        self.serve()

    def serve(self) -> None:
        self.server = PeerServer(self.settings, self.pool)
        self.server.start()

    def unserve(self) -> None:
        if self.server is not None:
            self.server.stop()
        self.server = None

    def stop(self) -> None:
        self.unserve()
        self.pool.stop()
        self.pool.store.close()

    def events(self, kind: str) -> list[Any]:
        return [event for event in self.pool.store.events() if event.kind == kind]


class Pair:
    def __init__(self, root: Path) -> None:
        self.authority = Authority(root / "authority")
        ports = {"near": free_port(), "far": free_port()}
        self.near = Side(
            root / "near",
            "near",
            ports["near"],
            f"far 127.0.0.1:{ports['far']}",
            self.authority.host("near"),
        )
        self.far = Side(
            root / "far",
            "far",
            ports["far"],
            f"near 127.0.0.1:{ports['near']} slices=2 memory=8192",
            self.authority.host("far"),
        )

    def close(self) -> None:
        for side in (self.near, self.far):
            side.stop()
            side.broker.close()


@pytest.fixture
def pair(root: Path) -> Iterator[Pair]:
    own = Pair(root)
    yield own
    own.close()


def relayed(push: pb.Push) -> bool:
    return any(piece.HasField("relay") for lease in push.leases for piece in lease.slices)


def test_a_slice_of_another_host(pair: Pair) -> None:
    view = pair.near.pool.create_slice(ALICE, want("mine"), "far")
    assert (view.piece.host, view.piece.gpu_uuid) == ("far", gpu(0).uuid)
    assert (view.piece.owner_uid, view.gpu_health) == (ALICE.uid, Health.OK)
    # What the far broker serves is what the near one asks for.
    there = pair.far.broker.wait_push(lambda push: any(lease.peer for lease in push.leases))
    [lent] = [lease for lease in there.leases if lease.peer]
    here = pair.near.broker.wait_push(relayed)
    [lease] = here.leases
    relay = lease.slices[0].relay
    assert (lent.peer, relay.peer, relay.address) == ("near", "far", "127.0.0.1:7777")
    assert not lent.HasField("uid")  # root's has no limit
    assert (relay.lease, relay.key, relay.snapshot) == (lent.id, lent.key, SNAPSHOT)
    assert (lent.slices[0].memory_bytes, lent.slices[0].compute_percent) == (4096 << 20, 25)
    assert there.settings.relay.listen == "127.0.0.1:0"
    # It counts on the far card.
    assert pair.far.pool.gpu("0").room.allocated_mib == 4096
    [lease_there] = pair.far.pool.leases(ROOT)
    assert lease_there.kind == LeaseKind.PEER
    assert pair.far.events("slice.lent")[0].data["host"] == "near"
    # And goes when it is not needed.
    pair.near.pool.delete_slice(ALICE, "mine", force=False)
    assert pair.near.pool.store.giving_back() != []
    pair.near.borrowing.look("far")
    assert pair.near.pool.store.giving_back() == []
    assert pair.far.pool.store.slices() == pair.far.pool.store.leases() == []


def test_limits_hold_together(pair: Pair) -> None:
    pair.near.pool.create_slice(ROOT, want("one"), "far")
    with pytest.raises(NoCapacity, match="4097 MiB more are too much"):
        pair.near.pool.create_slice(ROOT, want("two", 1, 4097), "far")
    pair.near.pool.create_slice(ROOT, want("two", 1, 4096), "far")
    with pytest.raises(NoCapacity, match="may have 2"):
        pair.near.pool.create_slice(ROOT, want("three", 1, 1), "far")
    assert {piece.name for piece in pair.near.pool.store.slices()} == {"one", "two"}
    assert len(pair.far.pool.store.slices()) == 2


def test_what_the_far_host_says_is_passed_on(pair: Pair) -> None:
    pair.far.pool.create_slice(ROOT, want("most", 1, 79000))
    with pytest.raises(NoCapacity, match="host far: no GPU has room"):
        pair.near.pool.create_slice(ROOT, want("big", 1, 8000), "far")
    with pytest.raises(NotFound, match="host far: there is no GPU GPU-none"):
        pair.near.pool.create_slice(ROOT, want("x", gpu="GPU-none"), "far")
    with pytest.raises(NotFound, match="no host nobody"):
        pair.near.pool.create_slice(ROOT, want("x"), "nobody")
    assert pair.near.pool.store.slices() == []


def test_a_host_that_is_away(pair: Pair) -> None:
    pair.far.unserve()
    with pytest.raises(PeerUnavailable, match="host far"):
        pair.near.pool.create_slice(ROOT, want("x"), "far")
    assert pair.near.pool.store.slices() == []
    pair.near.borrowing.look("far")
    [state] = pair.near.borrowing.states()
    assert "host far" in state.problem
    pair.far.serve()
    pair.near.borrowing.look("far")
    [state] = pair.near.borrowing.states()
    assert state.problem == "" and state.cards[0].uuid == gpu(0).uuid


def test_a_broker_that_has_not_looked_yet(pair: Pair) -> None:
    pair.far.broker.state.ClearField("devices")
    pair.far.pool.broker.refresh()
    with pytest.raises(PeerUnavailable, match="cannot use GPU"):
        pair.near.pool.create_slice(ROOT, want("x"), "far")
    assert pair.far.pool.store.slices() == []


def test_a_broker_that_refuses_the_loan(pair: Pair) -> None:
    """Nothing is left of it on either side, and the borrower hears why."""
    pair.far.broker.refuses = "it has no room for another lease"
    with pytest.raises(Conflict, match="far refused: it has no room"):
        pair.near.pool.create_slice(ROOT, want("x"), "far")
    assert pair.near.pool.store.slices() == pair.far.pool.store.slices() == []


def test_an_end_while_it_is_asked_for(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The far host has answered, and the near one is killed before it has stored that."""
    monkeypatch.setattr(lending, "NEW_SECONDS", 0.0)

    def killed(*_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("gpupoold.store.Transaction.hold", killed)
        with pytest.raises(KeyboardInterrupt):
            pair.near.pool.create_slice(ROOT, want("x"), "far")
    [entry] = pair.near.pool.store.borrowed().values()
    assert entry.state == BorrowedState.ASKING
    assert len(pair.far.pool.store.slices()) == 1
    pair.near.stop()
    pair.near.start()
    assert pair.near.pool.store.slices() == []
    pair.near.borrowing.look("far")
    assert pair.far.pool.store.slices() == []


def test_a_new_loan_is_left_alone(pair: Pair) -> None:
    """Its answer may be on its way."""
    pair.near.pool.create_slice(ROOT, want("x"), "far")
    client = PeerClient(pair.near.settings, pair.near.settings.peers[0])
    assert client.compare([]) == []
    assert len(pair.far.pool.store.slices()) == 1


def test_a_loan_that_the_far_host_forgot(pair: Pair) -> None:
    pair.near.pool.create_slice(ALICE, want("x"), "far")
    [piece] = pair.far.pool.store.slices()
    with pytest.raises(Conflict, match="lent to another host"):
        pair.far.pool.delete_slice(ROOT, piece.name, force=False)
    pair.far.pool.delete_slice(ROOT, piece.name, force=True)
    pair.near.borrowing.look("far")
    assert pair.near.pool.slice(ALICE, "x").gpu_health == Health.MISSING
    [event] = pair.near.events("slice.lost")
    assert event.owner_uid == ALICE.uid
    assert not relayed(pair.near.broker.wait_push(lambda push: not push.leases))
    with pytest.raises(Conflict, match="does not know of it any more"):
        pair.near.pool.start_run(Caller(1001, os.getpid(), False), "x", None, "true")
    pair.near.pool.delete_slice(ALICE, "x", force=False)
    assert pair.near.pool.store.giving_back() == []


def test_nobody_here_gets_what_is_lent(pair: Pair) -> None:
    pair.near.pool.create_slice(ROOT, want("x"), "far")
    [lease] = pair.far.pool.store.leases()
    [piece] = pair.far.pool.store.slices()
    guests = GuestLeases(pair.far.pool, None, with_region=False)  # type: ignore[arg-type]
    with pytest.raises(Conflict, match="lent to another host"):
        guests.grant(str(uuid.uuid4()), "web", GuestRequest(name=piece.name))
    with pytest.raises(Conflict, match="lent to another host"):
        pair.far.pool.start_run(ROOT, piece.name, None, "x")
    with pytest.raises(NotPermitted):
        pair.far.pool.slice(ALICE, piece.name)
    assert pair.far.pool.store.leases() == [lease]


def test_a_slice_that_is_deleted_while_it_is_asked_for(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = PeerClient.borrow

    def slow(client: PeerClient, request: peer.BorrowRequest) -> peer.Loan:
        loan = ask(client, request)
        pair.near.pool.delete_slice(ROOT, "x", force=False)
        return loan

    monkeypatch.setattr(PeerClient, "borrow", slow)
    with pytest.raises(Conflict, match="was deleted before"):
        pair.near.pool.create_slice(ROOT, want("x"), "far")
    pair.near.borrowing.look("far")
    assert pair.far.pool.store.slices() == []


# ---- Who may not --------------------------------------------------------------------------------


def borrow_request(**fields: Any) -> peer.BorrowRequest:
    values = {
        "request": os.urandom(16),
        "time": time.time(),
        "compute_percent": 1,
        "memory_mib": 1,
        "mode": "hard",
        "priority": 5,
    }
    return peer.BorrowRequest(**{**values, **fields})


def refused(pair: Pair, kind: type[Exception], why: str, **fields: Any) -> None:
    client = PeerClient(pair.near.settings, pair.near.settings.peers[0])
    with pytest.raises(kind, match=why):
        client.borrow(borrow_request(**fields))
    assert pair.far.pool.store.slices() == []


def use(pair: Pair, files: Any) -> None:
    """The near host has another certificate from now on."""
    for name in ("certificate", "key", "authority"):
        getattr(pair.near.files, name).write_bytes(getattr(files, name).read_bytes())


def test_a_certificate_of_another_authority(pair: Pair, root: Path) -> None:
    use(pair, Authority(root / "other", "other").host("near"))
    refused(pair, PeerUnavailable, "cannot be asked")


def test_an_expired_certificate(pair: Pair) -> None:
    use(pair, pair.authority.host("near", expired=True))
    refused(pair, PeerUnavailable, "cannot be asked")


def test_a_host_that_is_no_peer(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    use(pair, pair.authority.host("stranger"))
    refused(pair, NotPermitted, "'stranger' is not among the peers")
    assert "ipv4:127.0.0.1" in caplog.text


def test_without_any_certificate(pair: Pair) -> None:
    import grpc

    from gpupoold.hosts import peer_pb2_grpc

    ca = grpc.ssl_channel_credentials(pair.near.files.authority.read_bytes())
    options = [("grpc.ssl_target_name_override", "far")]
    for channel in (
        grpc.secure_channel(pair.near.settings.peers[0].address, ca, options),
        grpc.insecure_channel(pair.near.settings.peers[0].address),
    ):
        with channel, pytest.raises(grpc.RpcError) as error:
            peer_pb2_grpc.PeerStub(channel).Borrow(borrow_request(), timeout=10)
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE


def test_the_far_host_is_another(pair: Pair) -> None:
    """Somebody answers at its address with a good certificate of another name."""
    wrong = PeerSettings("third", pair.near.settings.peers[0].address, 0, 0, 0)
    with pytest.raises(PeerUnavailable):
        PeerClient(pair.near.settings, wrong).describe()


def test_a_replay_is_refused_and_logged(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    client = PeerClient(pair.near.settings, pair.near.settings.peers[0])
    request = borrow_request()
    client.borrow(request)
    with pytest.raises(AlreadyExists, match="answered already"):
        client.borrow(request)
    assert len(pair.far.pool.store.slices()) == 1
    lines = [line for line in caplog.text.splitlines() if "answered already" in line]
    assert len(lines) == 1 and "127.0.0.1" in lines[0]


def test_an_old_request_is_refused(pair: Pair) -> None:
    refused(pair, Conflict, "s old", time=time.time() - 100)


@pytest.mark.parametrize(
    "fields",
    [
        {"compute_percent": 0},
        {"compute_percent": 101},
        {"memory_mib": 0},
        {"memory_mib": (1 << 64) - 1},
        {"mode": "greedy"},
        {"priority": -1},
        {"request": b""},
    ],
)
def test_wrong_wishes(pair: Pair, fields: dict[str, Any]) -> None:
    refused(pair, InvalidRequest, "^host far: ", **fields)


def test_one_host_cannot_end_anothers_loans(pair: Pair) -> None:
    pair.near.pool.create_slice(ROOT, want("x"), "far")
    [lease] = pair.far.pool.store.leases()
    service = lending.Lending(pair.far.pool)
    with pytest.raises(NotFound):
        service.end("third", lease.id, "")
    assert service.compare("third", [lease.id]) == [lease.id]
    assert len(pair.far.pool.store.slices()) == 1


def test_a_new_certificate_counts_at_once(pair: Pair, root: Path) -> None:
    other = Authority(root / "other", "other")
    use(pair, other.host("near"))
    refused(pair, PeerUnavailable, "cannot be asked")
    far = other.host("far")
    # (The authority's file is both hosts'.) First the key, to which the certificate does not fit:
    # what there was stays.
    for name in ("key", "certificate"):
        refused(pair, PeerUnavailable, "cannot be asked")
        getattr(pair.far.files, name).write_bytes(getattr(far, name).read_bytes())
    pair.near.pool.create_slice(ROOT, want("x"), "far")
    # One that cannot be used changes nothing.
    Path(pair.far.files.key).unlink()
    pair.near.pool.create_slice(ROOT, want("y", 1, 1), "far")
