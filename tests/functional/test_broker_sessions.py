"""The broker alone, with a worker that needs no driver: who is let in, and until when."""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpupoold.leases import broker_pb2 as pb
from tests.functional import wire
from tests.functional.broker_host import (
    GPU,
    MIB,
    BrokerHost,
    Session,
    alive,
    make_lease,
    start_time,
)
from tests.functional.pool import wait_for
from tests.functional.wire import Closed, Connection, Refused, encode_frame

LIMIT, NO_WORKER = 6, 5


@pytest.fixture
def host(tmp_path: Path) -> Iterator[BrokerHost]:
    with BrokerHost(tmp_path) as own:
        own.settings.tcp_listen = "127.0.0.1:0"
        yield own


def is_closed(connection: Connection) -> bool:
    try:
        while True:
            connection.receive_frame()
    except (Refused, Closed):
        return True


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
def test_a_session_sees_its_slices_as_devices(host: BrokerHost, tcp: bool) -> None:
    lease = make_lease(memory=96 * MIB, slices=2)
    host.push(lease)
    connection = Connection(host.client_lease(lease), tcp=tcp)
    body = connection.hello()
    connection.send_raw(encode_frame(wire.HELLO, body))
    challenge = connection.receive_frame()
    nonce = challenge.body[8:40]
    connection.send_raw(
        encode_frame(
            wire.PROOF, wire.hmac.digest(lease.key, b"gpupool client 1" + nonce + body, "sha256")
        )
    )
    welcome = connection.receive_frame()
    devices = [welcome.body[64 + 936 * i : 64 + 936 * (i + 1)] for i in range(2)]
    assert len(welcome.body) == 64 + 2 * 936
    for index, device in enumerate(devices):
        name, virtual, memory, driver, percent = struct.unpack_from("<256s16sQII", device)
        attributes = struct.unpack_from("<160i", device, 288)
        assert name.rstrip(b"\0") == b"Fake GPU"
        assert virtual == lease.slices[index].id
        assert (memory, driver, percent) == (96 * MIB, 13000, 25)
        # bus, device and domain are the slice's; the compute capability is the card's
        assert (attributes[33], attributes[34], attributes[50]) == (2 + index, 3, 1)
        assert (attributes[75], attributes[76]) == (9, 0)


def test_what_is_refused(host: BrokerHost) -> None:
    lease = make_lease()
    host.push(lease)
    known = host.client_lease(lease)
    with Session(known) as control:
        with pytest.raises(Refused) as wrong_key:
            Connection(known).open(key=secrets.token_bytes(32))
        assert wrong_key.value.code == wire.PROOF_WRONG
        with pytest.raises(Refused) as unknown:
            Connection(known).open(lease=uuid.uuid4().bytes)
        assert unknown.value.code == wire.UNKNOWN_LEASE
        with pytest.raises(Refused) as major:
            Connection(known).open(major=wire.MAJOR + 1)
        assert major.value.code == wire.VERSION
        with pytest.raises(Refused) as too_new:
            Connection(known).open(minor=wire.MINOR + 7, minor_min=wire.MINOR + 5)
        assert too_new.value.code == wire.VERSION
        with pytest.raises(Refused) as no_purpose:
            Connection(known).open(purpose=77)
        assert no_purpose.value.code == wire.BAD_FRAME
        with pytest.raises(Refused) as no_session:
            Connection(known).open(purpose=wire.DEVICE, session=os.urandom(16))
        assert no_session.value.code == wire.UNKNOWN_LEASE
        with pytest.raises(Refused) as no_device:
            Connection(known).open(purpose=wire.DEVICE, session=control.control.session, device=1)
        assert no_device.value.code == wire.BAD_FRAME
        assert control.ask("query") == [1, 64 * MIB, 0]


def test_a_later_minor_version_is_served(host: BrokerHost) -> None:
    lease = make_lease()
    host.push(lease)
    later = Connection(host.client_lease(lease)).open(minor=wire.MINOR + 9)
    assert later.minor == wire.MINOR


def test_a_session_belongs_to_its_lease(host: BrokerHost) -> None:
    mine, other = make_lease(), make_lease()
    host.push(mine, other)
    with Session(host.client_lease(mine)) as session, pytest.raises(Refused) as refused:
        Connection(host.client_lease(other)).open(
            purpose=wire.DEVICE, session=session.control.session
        )
    assert refused.value.code == wire.UNKNOWN_LEASE


def test_half_open_connections_end(host: BrokerHost) -> None:
    lease = make_lease()
    host.push(lease)
    known = host.client_lease(lease)
    with Session(known) as beside:
        silent, half, unproven = Connection(known), Connection(known), Connection(known)
        half.send_raw(encode_frame(wire.HELLO, half.hello())[:100])
        unproven.send_raw(encode_frame(wire.HELLO, unproven.hello()))
        assert unproven.receive_frame().kind == wire.CHALLENGE
        begin = time.monotonic()
        for connection in (silent, half, unproven):
            connection.socket.settimeout(60)
            assert is_closed(connection)
        assert 3 < time.monotonic() - begin < 30  # 5 s by the protocol; the machine may be busy
        assert beside.ask("query")[0] == 1


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
def test_random_bytes(host: BrokerHost, tcp: bool) -> None:
    lease = make_lease()
    host.push(lease)
    known = host.client_lease(lease)
    with Session(known) as beside:
        for size in (4, 47, 48, 216, 100_000):
            stranger = Connection(known, tcp=tcp)
            stranger.send_raw(os.urandom(size))
            with pytest.raises(Refused) as refused:
                stranger.receive_frame()
            assert refused.value.code == wire.BAD_FRAME
            assert is_closed(stranger)
        huge = Connection(known, tcp=tcp)
        huge.send_raw(encode_frame(wire.HELLO, huge.hello() + bytes(200_000)))
        with pytest.raises(Refused):
            huge.receive_frame()
        assert beside.ask("query")[0] == 1


def test_many_silent_connections_keep_nobody_out(host: BrokerHost) -> None:
    host.settings.max_half_open = 8
    lease = make_lease()
    host.push(lease)
    known = host.client_lease(lease)
    silent = [Connection(known) for _ in range(40)]
    with Session(known) as session:
        assert session.ask("query")[0] == 1
    open_now = [connection for connection in silent if alive(connection)]
    assert len(open_now) <= 8
    assert silent[-1] in open_now  # the oldest had to go


def test_sessions_of_a_lease_are_limited(host: BrokerHost) -> None:
    lease = make_lease(max_sessions=2)
    host.push(lease)
    known = host.client_lease(lease)
    with Session(known) as first, Session(known):
        with pytest.raises(Refused) as refused:
            Session(known)
        assert refused.value.code == LIMIT
        first.close()
        assert host.channel is not None
        host.channel.event("session_ended")
        Session(known).close()


class ShortOfDescriptors(BrokerHost):
    """Its broker may have 400 descriptors, of which one user gets a quarter."""

    def command(self) -> list[str]:
        return ["prlimit", "--nofile=400:400", *super().command()]


def test_one_user_does_not_take_all_descriptors(tmp_path: Path) -> None:
    mine = [make_lease(uid=30001) for _ in range(2)]
    other, roots = make_lease(uid=30002), make_lease(uid=0)
    with ShortOfDescriptors(tmp_path) as host, contextlib.ExitStack() as stack:
        host.push(*mine, other, roots)

        def opened(lease: pb.Lease) -> Session:
            return stack.enter_context(Session(host.client_lease(lease)))

        held = [opened(mine[index % 2]) for index in range(100)]
        for lease in mine:
            with pytest.raises(Refused, match=r"user 30001 hold 100 of .* 400") as refused:
                opened(lease)
            assert refused.value.code == LIMIT
        with pytest.raises(Refused, match="user 30001") as refused:
            held[0].worker()
        assert refused.value.code == LIMIT
        assert opened(other).ask("query")[0] == 1
        for _ in range(101):  # root decides for itself
            opened(roots)
        assert host.channel is not None
        for _ in range(5):
            held.pop().close()
            host.channel.event("session_ended")
        assert held[0].ask("query")[0] == 1
        with pytest.raises(Refused, match="user 30001"):
            opened(mine[0])


def test_anything_on_the_control_connection_ends_the_session(host: BrokerHost) -> None:
    lease = make_lease()
    host.push(lease)
    session = Session(host.client_lease(lease))
    [pid] = session.ask("pid")
    session.control.send_raw(os.urandom(64))
    with pytest.raises(Refused) as refused:
        session.control.receive_frame()
    assert refused.value.code == wire.BAD_FRAME
    wait_for("the worker's end", lambda: not Path(f"/proc/{pid}").exists())


def test_a_lease_ends_with_its_process(host: BrokerHost) -> None:
    assert host.channel is not None
    with subprocess.Popen(["sleep", "600"]) as holder:
        bound = make_lease(process=pb.Process(pid=holder.pid, start_time=start_time(holder.pid)))
        free = make_lease()
        host.push(bound, free)
        beside = Session(host.client_lease(free))
        session = Session(host.client_lease(bound))
        [pid] = session.ask("pid")
        host.channel.close()  # gpupoold is down meanwhile
        holder.kill()
    with pytest.raises(Refused) as ended:
        session.control.receive_frame()
    assert ended.value.code == wire.UNKNOWN_LEASE
    wait_for("the worker's end", lambda: not Path(f"/proc/{pid}").exists())
    assert beside.ask("query")[0] == 1
    with pytest.raises(Refused):
        Session(host.client_lease(bound))
    # What happened meanwhile is told, and pushing the old state again does not bring it back.
    channel = host.connect()
    assert channel.event("lease_ended").lease == bound.id
    applied = host.push(bound, free)
    assert [refused.id for refused in applied.refused] == [bound.id]
    assert list(channel.state().ended_leases) == [bound.id]
    host.push(free)
    assert not channel.state().ended_leases


def test_a_lease_of_a_process_that_is_gone_never_begins(host: BrokerHost) -> None:
    assert host.channel is not None
    # The number is in use, by a process that started at another time.
    lease = make_lease(process=pb.Process(pid=os.getpid(), start_time=start_time(os.getpid()) + 1))
    host.push(lease)
    assert host.channel.event("lease_ended").lease == lease.id
    with pytest.raises(Refused):
        Session(host.client_lease(lease))


def test_a_removed_lease_ends_its_sessions(host: BrokerHost) -> None:
    lease, stays = make_lease(), make_lease()
    host.push(lease, stays)
    session, beside = Session(host.client_lease(lease)), Session(host.client_lease(stays))
    host.push(stays)
    with pytest.raises(Refused) as ended:
        session.control.receive_frame()
    assert ended.value.code == wire.UNKNOWN_LEASE
    assert beside.ask("query")[0] == 1


def test_a_session_is_killed(host: BrokerHost) -> None:
    assert host.channel is not None
    lease = make_lease()
    host.push(lease)
    session = Session(host.client_lease(lease))
    assert session.ask("stubborn") == []
    [pid] = session.ask("pid")
    kill = pb.KillSession(session=session.control.session, why="the test says so")
    [answer] = host.channel.ask(pb.ToBroker(kill_session=kill))
    assert answer.code == pb.OK
    with pytest.raises(Refused, match="the test says so"):
        session.control.receive_frame()
    assert host.channel.event("session_ended").session == session.control.session
    assert not Path(f"/proc/{pid}").exists()  # though it ignored SIGTERM
    [again] = host.channel.ask(pb.ToBroker(kill_session=kill))
    assert again.code == pb.NOT_FOUND


def test_gpupoold_comes_back(host: BrokerHost) -> None:
    assert host.channel is not None
    lease = make_lease()
    host.push(lease)
    session = Session(host.client_lease(lease))
    assert session.ask(f"charge {10 * MIB}") == [1, 64 * MIB, 10 * MIB]
    instance = host.channel.hello.instance
    host.channel.close()
    assert session.ask("query") == [1, 64 * MIB, 10 * MIB]
    channel = host.connect()
    assert (channel.hello.instance, channel.hello.generation) == (instance, host.generation)
    state = channel.state()
    [seen] = state.sessions
    assert seen.id == session.control.session
    assert (seen.lease, seen.pid, seen.uid) == (lease.id, os.getpid(), os.getuid())
    [worker] = seen.workers
    assert (worker.slice, worker.memory_bytes) == (lease.slices[0].id, 10 * MIB)
    [used] = state.slices
    assert (used.used_bytes, used.memory_bytes, used.sessions) == (10 * MIB, 64 * MIB, 1)
    host.push(lease)
    assert session.ask("query") == [1, 64 * MIB, 10 * MIB]


def test_a_second_gpupoold_takes_the_place_of_the_first(host: BrokerHost) -> None:
    first = host.channel
    assert first is not None
    host.push(make_lease())
    host.connect()
    with pytest.raises(EOFError):
        while True:
            first.receive()
    host.push(make_lease())


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda lease: lease.ClearField("key"), "key"),
        (lambda lease: lease.slices[0].ClearField("id"), "16 bytes"),
        (lambda lease: lease.slices[0].ClearField("memory_bytes"), "memory"),
        (lambda lease: setattr(lease.slices[0], "gpu_uuid", "GPU-other"), "GPU-other"),
        (lambda lease: setattr(lease.slices[0], "compute_percent", 101), "100 %"),
        (lambda lease: lease.slices[0].relay.SetInParent(), "no certificate"),
        (lambda lease: lease.slices.append(lease.slices[0]), "twice"),
        (lambda lease: lease.ClearField("slices"), "slices"),
    ],
    ids=["key", "id", "memory", "gpu", "percent", "relay", "twice", "slices"],
)
def test_a_wrong_state_changes_nothing(host: BrokerHost, change, word: str) -> None:
    lease, wrong = make_lease(), make_lease()
    host.push(lease)
    session = Session(host.client_lease(lease))
    change(wrong)
    answer = host.try_push(wrong)
    assert answer.code == pb.INVALID and word in answer.sentence
    assert session.ask("query")[0] == 1


def test_an_older_generation_is_refused(host: BrokerHost) -> None:
    host.push(make_lease())
    host.push(make_lease())
    host.generation -= 2
    assert host.try_push(make_lease()).code == pb.CONFLICT


def test_a_large_state_comes_in_parts(host: BrokerHost) -> None:
    assert host.channel is not None
    leases = [make_lease() for _ in range(900)]
    host.generation += 1
    for at in range(0, 900, 300):
        push = pb.Push(
            generation=host.generation,
            gpus=[pb.Gpu(uuid=GPU)] if at == 0 else [],
            leases=leases[at : at + 300],
            more=at < 600,
        )
        if push.more:
            host.channel.socket.send(pb.ToBroker(push=push).SerializeToString())
    [answer] = host.channel.ask(pb.ToBroker(push=push))
    assert answer.code == pb.OK
    assert {s.id for s in host.channel.state().slices} == {lease.slices[0].id for lease in leases}
    Session(host.client_lease(leases[0])).close()
    Session(host.client_lease(leases[-1])).close()


def test_tcp_only_on_loopback(host: BrokerHost) -> None:
    lease = make_lease()
    for address in (
        "0.0.0.0:0",
        "10.1.2.3:4000",
        "[::]:0",
        "example:1",
        "127.0.0.1",
        "127.0.0.1:99999",
    ):
        host.settings.tcp_listen = address
        applied = host.push(lease)
        assert applied.tcp_error and not applied.tcp_address
    host.settings.tcp_listen = "127.0.0.1:0"
    applied = host.push(lease)
    assert not applied.tcp_error
    again = host.push(lease)
    assert again.tcp_address == applied.tcp_address  # the same state does not move it


def test_clients_wait_for_the_probe_and_hear_why_it_failed(host: BrokerHost) -> None:
    assert host.channel is not None
    lease = make_lease()
    host.settings.worker_environment["FAKE_WORKER_PROBE_ERROR"] = "the card is upside down"
    host.push(lease)
    with pytest.raises(Refused, match="upside down") as refused:
        Session(host.client_lease(lease))
    assert refused.value.code == NO_WORKER
    del host.settings.worker_environment["FAKE_WORKER_PROBE_ERROR"]
    host.push(lease)
    host.channel.ask(pb.ToBroker(probe_devices=pb.ProbeDevices()))
    host.channel.event("device_probed", matches=lambda probed: probed.device.ready)
    Session(host.client_lease(lease)).close()
