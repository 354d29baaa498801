"""The broker alone, with a worker that needs no driver: workers, accounts and logs."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpupoold.leases import broker_pb2 as pb
from tests.functional import wire
from tests.functional.broker_host import MIB, BrokerHost, Session, make_lease
from tests.functional.pool import wait_for
from tests.functional.wire import Closed, Refused

CHARGE, REFUND = 18, 19


@pytest.fixture
def host(tmp_path: Path) -> Iterator[BrokerHost]:
    with BrokerHost(tmp_path) as own:
        yield own


def used(host: BrokerHost) -> int:
    assert host.channel is not None
    [entry] = host.channel.state().slices
    return entry.used_bytes


def processes_of(host: BrokerHost) -> set[int]:
    """The broker's children."""
    assert host.process is not None
    return {
        int(pid)
        for pid in Path(f"/proc/{host.process.pid}/task/{host.process.pid}/children")
        .read_text()
        .split()
    }


def test_two_sessions_share_the_quota(host: BrokerHost) -> None:
    lease = make_lease(memory=100 * MIB)
    host.push(lease)
    with Session(host.client_lease(lease)) as one, Session(host.client_lease(lease)) as two:
        assert one.ask(f"charge {60 * MIB}") == [1, 100 * MIB, 60 * MIB]
        assert two.ask(f"charge {41 * MIB}") == [0, 100 * MIB, 60 * MIB]
        assert two.ask(f"charge {40 * MIB}") == [1, 100 * MIB, 100 * MIB]
        assert one.ask("charge 1") == [0, 100 * MIB, 100 * MIB]
        assert two.ask(f"charge {(1 << 64) - 1}") == [0, 100 * MIB, 100 * MIB]
        one.tell(f"refund {10 * MIB}")
        wait_for("the refund", lambda: used(host) == 90 * MIB)
        assert two.ask(f"charge {10 * MIB}") == [1, 100 * MIB, 100 * MIB]


@pytest.mark.parametrize("how", ["close", "kill worker", "kill session"])
def test_what_a_worker_held_comes_back(host: BrokerHost, how: str) -> None:
    assert host.channel is not None
    lease = make_lease(memory=100 * MIB)
    host.push(lease)
    session = Session(host.client_lease(lease))
    with Session(host.client_lease(lease)) as beside:
        assert beside.ask(f"charge {MIB}")[0] == 1
        assert session.ask(f"charge {70 * MIB}")[0] == 1
        [pid] = session.ask("pid")
        if how == "close":
            session.close()
        elif how == "kill worker":
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(Closed):
                session.worker().receive(1)
        else:
            kill = pb.KillSession(session=session.control.session)
            host.channel.ask(pb.ToBroker(kill_session=kill))
        ended = host.channel.event("worker_ended")
        assert (ended.pid, ended.session) == (pid, session.control.session)
        assert ended.expected == (how != "kill worker")
        if how == "kill worker":
            assert ended.signal == signal.SIGKILL
        wait_for("the memory", lambda: used(host) == MIB)
        assert beside.ask("query") == [1, 100 * MIB, MIB]


def test_a_worker_cannot_give_back_what_it_has_not(host: BrokerHost) -> None:
    assert host.channel is not None
    lease = make_lease(memory=100 * MIB)
    host.push(lease)
    liar = Session(host.client_lease(lease))
    with Session(host.client_lease(lease)) as honest:
        assert honest.ask(f"charge {60 * MIB}")[0] == 1
        assert liar.ask(f"charge {5 * MIB}")[0] == 1
        liar.tell(f"refund {60 * MIB}")
        ended = host.channel.event("worker_ended")
        assert not ended.expected and "memory" in ended.why
        assert honest.ask("query") == [1, 100 * MIB, 60 * MIB]


def test_what_a_full_slice_bears_is_one_for_its_sessions(host: BrokerHost) -> None:
    assert host.channel is not None
    lease = make_lease(memory=100 * MIB)
    host.push(lease)
    first = Session(host.client_lease(lease))
    with Session(host.client_lease(lease)) as second:
        assert first.ask(f"bear {10 * MIB}") == [1, 100 * MIB, 0]
        assert second.ask(f"bear {7 * MIB}") == [0, 100 * MIB, 0]
        assert second.ask(f"bear {6 * MIB}") == [1, 100 * MIB, 0]
        first.tell(f"unbear {2 * MIB}")
        wait_for("it to come back", lambda: second.ask(f"bear {2 * MIB}")[0] == 1)
        [pid] = first.ask("pid")
        os.kill(pid, signal.SIGKILL)
        assert host.channel.event("worker_ended").pid == pid
        assert second.ask(f"bear {8 * MIB}")[0] == 1
        assert second.ask("bear 1")[0] == 0
        second.tell(f"unbear {17 * MIB}")
        ended = host.channel.event("worker_ended")
        assert not ended.expected and "borne" in ended.why


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"x",
        os.urandom(32),
        struct.pack("<IIQQQ", CHARGE, 100, 1, 0, 0),
        struct.pack("<IIQQQ", 16, 0, 1, 0, 0),
        struct.pack("<IIQQQ", 999, 0, 1, 0, 0),
    ],
    ids=["empty", "short", "random", "truncated", "ready again", "unknown"],
)
def test_a_worker_that_sends_nonsense_is_killed(host: BrokerHost, packet: bytes) -> None:
    assert host.channel is not None
    lease = make_lease()
    host.push(lease)
    with Session(host.client_lease(lease)) as beside:
        assert beside.ask("charge 1000")[0] == 1
        bad = Session(host.client_lease(lease))
        assert bad.ask("charge 500")[0] == 1
        bad.tell(f"raw {packet.hex()}")
        assert not host.channel.event("worker_ended").expected
        assert beside.ask("query") == [1, 64 * MIB, 1000]


def test_resize_while_in_use(host: BrokerHost) -> None:
    assert host.channel is not None
    lease = make_lease(memory=100 * MIB)
    host.push(lease)
    slice_id = lease.slices[0].id

    def resize(size: int) -> int:
        request = pb.ResizeSlice(slice=slice_id, memory_bytes=size)
        [answer] = host.channel.ask(pb.ToBroker(resize_slice=request))
        return answer.code

    with Session(host.client_lease(lease)) as session:
        assert session.ask(f"charge {50 * MIB}")[0] == 1
        assert resize(49 * MIB) == pb.CONFLICT
        assert session.ask("query") == [1, 100 * MIB, 50 * MIB]
        assert resize(50 * MIB) == pb.OK
        assert session.ask("charge 1") == [0, 50 * MIB, 50 * MIB]
        assert resize(60 * MIB) == pb.OK
        assert session.ask(f"charge {10 * MIB}") == [1, 60 * MIB, 60 * MIB]
        # A pushed state that asks for the impossible: the size in force stays, and is told.
        lease.slices[0].memory_bytes = 10 * MIB
        applied = host.push(lease)
        assert [refused.id for refused in applied.refused] == [slice_id]
        assert session.ask("query") == [1, 60 * MIB, 60 * MIB]
    [unknown] = host.channel.ask(
        pb.ToBroker(resize_slice=pb.ResizeSlice(slice=bytes(16), memory_bytes=1))
    )
    assert unknown.code == pb.NOT_FOUND


def test_usage_is_reported(host: BrokerHost) -> None:
    assert host.channel is not None
    lease = make_lease()
    host.push(lease)
    with Session(host.client_lease(lease)) as session:
        assert session.ask("charge 4096")[0] == 1
        usage = host.channel.event("slice_usage")
        assert (usage.slice, usage.used_bytes) == (lease.slices[0].id, 4096)
    assert host.channel.event("slice_usage").used_bytes == 0


def test_warm_workers(host: BrokerHost) -> None:
    host.settings.warm_workers = 2
    lease = make_lease()
    host.push(lease)
    assert host.channel is not None

    def warm() -> int:
        [device] = host.channel.state().devices
        return device.warm_workers

    wait_for("two warm workers", lambda: warm() == 2)
    before = processes_of(host)
    with Session(host.client_lease(lease)) as session:
        assert session.ask("pid")[0] in before
        wait_for("a new warm worker", lambda: warm() == 2)
        # With another driver directory the old warm workers are of no use; the session goes on.
        old = processes_of(host) - set(session.ask("pid"))
        host.settings.driver_directory = str(host.root)
        host.push(lease)
        wait_for("new warm workers", lambda: warm() == 2 and not old & processes_of(host))
        assert session.ask("query")[0] == 1
    host.settings.warm_workers = 0
    host.push(lease)
    wait_for("no warm worker", lambda: warm() == 0 and not processes_of(host))


@pytest.mark.parametrize(
    ("variable", "value", "word"),
    [
        ("FAKE_WORKER_START_ERROR", "no such driver", "no such driver"),
        ("FAKE_WORKER_CRASH", "1", "it is broken"),
    ],
)
def test_a_worker_that_does_not_start(
    host: BrokerHost, variable: str, value: str, word: str
) -> None:
    lease = make_lease()
    host.settings.worker_environment[variable] = value
    host.push(lease)
    with (
        Session(host.client_lease(lease)) as session,
        pytest.raises(Refused, match=word) as refused,
    ):
        session.worker()
    assert refused.value.code == 5


def test_the_last_word_of_a_worker(host: BrokerHost) -> None:
    assert host.channel is not None
    lease = make_lease()
    host.push(lease)
    with Session(host.client_lease(lease)) as session:
        session.tell("say kernel k, thread 7")
        session.tell("end a frame of the wrong size")
        ended = host.channel.event("worker_ended")
        assert not ended.expected and ended.exit_status == 4
        assert ended.why == "a frame of the wrong size"
    log = host.run_dir / "log" / f"worker-{wire.uuid.UUID(bytes=session.control.session)}.log"
    assert log.read_text() == "kernel k, thread 7\n"
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_worker_log_is_limited(host: BrokerHost) -> None:
    host.settings.worker_log_bytes = 10_000
    lease = make_lease()
    host.push(lease)
    with Session(host.client_lease(lease)) as session:
        for _ in range(100):
            session.tell("say " + "x" * 1000)
        assert session.ask("query")[0] == 1
        log = host.run_dir / "log" / f"worker-{wire.uuid.UUID(bytes=session.control.session)}.log"
        assert 10_000 <= log.stat().st_size < 10_200


def test_the_logs_of_a_lease_are_limited(host: BrokerHost) -> None:
    """Session after session, each with a log of the most that one may have."""
    assert host.channel is not None
    channel = host.channel
    host.settings.worker_log_bytes = 4 << 20
    lease, other = make_lease(), make_lease()
    host.push(lease, other)
    directory = host.run_dir / "log"

    def talk(lease: pb.Lease, lines: int) -> Path:
        with Session(host.client_lease(lease)) as session:
            for _ in range(lines):
                session.tell("say " + "x" * 16000)
            [pid] = session.ask("pid")
        name = wire.uuid.UUID(bytes=session.control.session)
        wait_for("the worker's end", lambda: not Path(f"/proc/{pid}").exists())
        channel.state()  # answered after what came of that
        return directory / f"worker-{name}.log"

    kept = talk(other, 10)
    logs = [talk(lease, 300) for _ in range(4)]
    assert sum(file.stat().st_size for file in directory.iterdir() if file != kept) <= 8 << 20
    assert [file.exists() for file in logs] == [False, False, False, True]
    assert kept.stat().st_size == 10 * 16001
    with contextlib.ExitStack() as stack:
        sessions = [stack.enter_context(Session(host.client_lease(lease))) for _ in range(6)]
        for session in sessions:
            for _ in range(300):
                session.tell("say " + "x" * 16000)
            assert session.ask("query")[0] == 1  # goes on without a log
        assert sum(f.stat().st_size for f in directory.iterdir() if f != kept) <= 16 << 20


def test_a_client_that_connects_again_gets_another_worker(host: BrokerHost) -> None:
    lease = make_lease()
    host.push(lease)
    with Session(host.client_lease(lease)) as session:
        [first] = session.ask("pid")
        old = session.workers.pop(0)
        [second] = session.ask("pid")
        assert first != second
        with pytest.raises(Closed):
            old.receive(1)


def test_the_end_of_the_broker_ends_the_workers(host: BrokerHost) -> None:
    lease = make_lease()
    host.push(lease)
    with Session(host.client_lease(lease)) as session:
        [pid] = session.ask("pid")
        session.ask("stubborn")
        assert host.stop(signal.SIGTERM) == 0
        with pytest.raises(Closed):
            session.control.receive_frame()
        assert not Path(f"/proc/{pid}").exists()
    assert not (host.run_dir / "session.sock").exists()
    assert not (host.run_dir / "broker.sock").exists()
