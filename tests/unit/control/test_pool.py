"""The pool between a driver and a broker of the test's making."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import threading
import time
import uuid
from pathlib import Path

import pytest

from gpupoold.errors import (
    AlreadyExists,
    BrokerUnavailable,
    Conflict,
    InvalidRequest,
    NoCapacity,
    NotFound,
    NotPermitted,
)
from gpupoold.gpus import HealthReport
from gpupoold.leases import broker_pb2 as pb
from gpupoold.leases.processes import identify
from gpupoold.model import Caller, Health
from gpupoold.pool import Pool
from gpupoold.slices.planning import Request
from gpupoold.store import Store

from .fakes import FakeBroker, FakeDriver, gpu, settings

ROOT = Caller(0, os.getpid(), True)
ALICE = Caller(1001, os.getpid(), False)
BOB = Caller(1002, os.getpid(), False)


def want(name: str, compute: int = 25, memory: int = 4096, **more) -> Request:
    return Request(name=name, compute_percent=compute, memory_mib=memory, **more)


def until(condition, seconds: float = 10.0):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)
    return value


class Host:
    """gpupoold's inside, restartable, with a broker that can go and come."""

    def __init__(self, root: Path, **options: str) -> None:
        self.root = root
        self.settings = settings(root, **options)
        self.driver = FakeDriver([gpu(0), gpu(1)])
        self.broker: FakeBroker | None = FakeBroker(self.settings.broker_socket)
        self.pool = self._pool()

    def _pool(self) -> Pool:
        store = Store(self.settings.database, self.settings.event_limit)
        store.open()
        pool = Pool(self.settings, store, self.driver)  # type: ignore[arg-type]
        pool.start()
        if self.broker is not None:
            assert pool.broker.client.wait_connected(10), pool.broker.problem
        return pool

    def stop(self) -> None:
        self.pool.stop()
        self.pool.store.close()

    def restart(self) -> Pool:
        self.stop()
        self.pool = self._pool()
        return self.pool

    def end_broker(self) -> None:
        assert self.broker is not None
        self.broker.close()
        self.broker = None
        until(lambda: not self.pool.broker.connected)

    def start_broker(self) -> FakeBroker:
        self.broker = FakeBroker(self.settings.broker_socket)
        assert self.pool.broker.client.wait_connected(10)
        return self.broker


def pushed_names(push: pb.Push) -> set[str]:
    return {piece.name for lease in push.leases for piece in lease.slices}


def session_of(host: Host, view, number: int = 1, used: int = 0) -> pb.SessionState:
    """A session under the slice's lease, as the broker would report it."""
    return pb.SessionState(
        id=bytes([number]) * 16,
        lease=uuid.UUID(view.lease.id).bytes,
        pid=os.getpid(),
        uid=1001,
        program="prog\x1b[31m",
        opened_unix_ns=time.time_ns(),
        carrier="unix",
        workers=[pb.WorkerState(pid=4, slice=slice_bytes(view), memory_bytes=used)],
    )


def slice_bytes(view) -> bytes:
    return uuid.UUID(view.piece.virtual_uuid.removeprefix("GPU-")).bytes


def test_a_slice_reaches_the_broker_as_it_was_made(host):
    view = host.pool.create_slice(ALICE, want("a", 25, 4096, mode="elastic", priority=7))
    push = host.broker.wait_push(lambda push: "a" in pushed_names(push))
    lease = push.leases[0]
    piece = lease.slices[0]
    assert [entry.uuid for entry in push.gpus] == [gpu(0).uuid, gpu(1).uuid]
    assert (piece.memory_bytes, piece.compute_percent) == (4096 * 2**20, 25)
    assert (piece.mode, piece.priority) == (pb.ELASTIC, 7)
    assert piece.gpu_uuid == gpu(0).uuid
    assert piece.id == slice_bytes(view)
    assert (piece.pci_domain, piece.pci_bus, piece.pci_device) == (0x4750, 1, 0)
    assert len(lease.key) == 32 and not lease.HasField("process")
    assert lease.id == uuid.UUID(view.lease.id).bytes
    assert piece.WhichOneof("where") == "worker"


def test_two_slices_of_a_card_differ_in_all_that_programs_see(host):
    one = host.pool.create_slice(ALICE, want("a"))
    two = host.pool.create_slice(ALICE, want("b"))
    assert one.piece.gpu_uuid == two.piece.gpu_uuid
    assert one.piece.virtual_uuid != two.piece.virtual_uuid
    assert one.piece.pci_address != two.piece.pci_address
    assert one.lease.key != two.lease.key


def test_names_are_unique_and_of_all_users(host):
    host.pool.create_slice(ALICE, want("a"))
    with pytest.raises((Conflict, AlreadyExists)):
        host.pool.create_slice(BOB, want("a"))


def test_users_see_and_touch_their_own_only(host):
    host.pool.create_slice(ALICE, want("a"))
    host.pool.create_slice(BOB, want("b"))
    assert [view.piece.name for view in host.pool.slices(ALICE)] == ["a"]
    assert [view.piece.name for view in host.pool.slices(ROOT)] == ["a", "b"]
    assert len(host.pool.leases(BOB)) == 1 and len(host.pool.leases(ROOT)) == 2
    for touch in (
        lambda: host.pool.slice(BOB, "a"),
        lambda: host.pool.delete_slice(BOB, "a", True),
        lambda: host.pool.resize_slice(BOB, "a", 1, 0),
        lambda: host.pool.start_run(BOB, "a", None, "x"),
        lambda: host.pool.set_drained(BOB, "0", True),
    ):
        with pytest.raises(NotPermitted):
            touch()
    kinds = {event.subject for event in host.pool.events(BOB, 0, 0)[0] if event.owner_uid}
    assert kinds == {"b"}


def test_a_users_programs_are_limited_and_roots_are_not(root, program):
    host = Host(root, api_max_runs_per_user="2")
    host.pool.create_slice(ALICE, want("a"))
    host.pool.create_slice(ROOT, want("r"))
    alice, admin = (Caller(who.uid, program.pid, who.is_admin) for who in (ALICE, ROOT))
    for _ in range(2):
        host.pool.start_run(alice, "a", None, "x")
    with pytest.raises(NoCapacity, match="at most 2 programs"):
        host.pool.start_run(alice, "a", None, "x")
    for _ in range(3):
        host.pool.start_run(admin, "r", None, "x")
    host.stop()
    host.broker.close()


def test_a_users_slices_are_limited_and_roots_are_not(root):
    host = Host(root, api_max_slices_per_user="2")
    for name in "ab":
        host.pool.create_slice(ALICE, want(name, 1, 1))
    with pytest.raises(NoCapacity, match="at most 2"):
        host.pool.create_slice(ALICE, want("c", 1, 1))
    with pytest.raises(NoCapacity, match="at most 2"):
        host.pool.start_run(ALICE, "", want("run", 1, 1), "x")
    for name in "cde":
        host.pool.create_slice(ROOT, want(name, 1, 1))
    host.stop()
    host.broker.close()


def test_everything_is_pushed_again_after_the_broker_came_back(host):
    host.pool.create_slice(ALICE, want("a"))
    host.end_broker()
    host.pool.create_slice(ALICE, want("b"))  # no broker is needed for that
    started = time.monotonic()
    broker = host.start_broker()
    push = broker.wait_push(lambda push: pushed_names(push) == {"a", "b"})
    assert time.monotonic() - started < 5
    assert push.generation == host.pool.store.generation()


def test_everything_is_there_after_a_restart(host):
    view = host.pool.create_slice(ALICE, want("a"))
    host.broker.state.sessions.append(session_of(host, view, used=3 << 20))
    host.broker.state.slices.append(pb.SliceState(id=slice_bytes(view), used_bytes=3 << 20))
    pool = host.restart()
    again = pool.slice(ALICE, "a")
    assert again.piece == view.piece and again.lease == view.lease
    assert again.sessions == 1 and again.used_bytes == 3 << 20
    assert [s.pid for s, _ in pool.sessions(ALICE)] == [os.getpid()]
    assert pool.sessions(BOB) == []


def test_a_generation_never_goes_down(host):
    host.pool.create_slice(ALICE, want("a"))
    host.restart()
    host.pool.delete_slice(ALICE, "a", False)
    host.broker.wait_push(lambda push: not push.leases and push.generation > 3)
    generations = [push.generation for push in host.broker.pushed]
    assert generations == sorted(generations)


def test_a_large_state_is_pushed_in_packets(host):
    for number in range(60):
        host.pool.create_slice(ROOT, want(f"{'n' * 50}-{number}", 1, 1))
    push = host.broker.wait_push(lambda push: len(pushed_names(push)) == 60)
    assert len(push.leases) == 60


def test_packets_hold_every_lease_once_and_stay_below_the_limit():
    from gpupoold.leases.desired import push_messages

    leases = [
        pb.Lease(id=os.urandom(16), key=os.urandom(32), slices=[pb.Slice(name="x" * 60)])
        for _ in range(1000)
    ]
    pushes = push_messages(7, pb.Settings(worker_user="nobody"), ["GPU-1"], leases)
    assert len(pushes) > 1
    assert [push.more for push in pushes] == [True] * (len(pushes) - 1) + [False]
    assert all(push.generation == 7 for push in pushes)
    assert all(pb.ToBroker(request=1, push=push).ByteSize() <= 65536 for push in pushes)
    assert [lease.id for push in pushes for lease in push.leases] == [lease.id for lease in leases]
    assert pushes[0].settings.worker_user == "nobody" and pushes[0].gpus[0].uuid == "GPU-1"


def test_the_broker_learns_the_drivers_version(host):
    push = host.broker.wait_push(lambda push: True)
    assert push.settings.driver_version == host.driver.version


def test_delete_with_sessions_needs_force(host):
    view = host.pool.create_slice(ALICE, want("a"))
    host.broker.state.sessions.append(session_of(host, view))
    with pytest.raises(Conflict, match="1 running session"):
        host.pool.delete_slice(ALICE, "a", False)
    host.pool.delete_slice(ALICE, "a", True)
    host.broker.wait_push(lambda push: not push.leases and push.generation > 2)
    with pytest.raises(NotFound):
        host.pool.slice(ALICE, "a")


def test_resize_asks_the_broker_before_it_shrinks(host):
    view = host.pool.create_slice(ALICE, want("a", 25, 4096))
    grown = host.pool.resize_slice(ALICE, "a", 0, 8192)
    assert (grown.piece.compute_percent, grown.piece.memory_mib) == (25, 8192)
    assert not any(r.HasField("resize_slice") for r in host.broker.requests)
    shrunk = host.pool.resize_slice(ALICE, "a", 50, 1000)
    assert (shrunk.piece.compute_percent, shrunk.piece.memory_mib) == (50, 1000)
    asked = [r.resize_slice for r in host.broker.requests if r.HasField("resize_slice")]
    assert [(a.slice, a.memory_bytes) for a in asked] == [(slice_bytes(view), 1000 << 20)]
    host.broker.resize_answer = pb.Answer(code=pb.CONFLICT, sentence="900 MiB are in use")
    with pytest.raises(Conflict, match="900 MiB"):
        host.pool.resize_slice(ALICE, "a", 0, 500)
    assert host.pool.slice(ALICE, "a").piece.memory_mib == 1000


def test_resize_below_what_is_in_use_is_a_conflict(host):
    view = host.pool.create_slice(ALICE, want("a", 25, 4096))
    host.broker.state.slices.append(pb.SliceState(id=slice_bytes(view), used_bytes=2000 << 20))
    with pytest.raises(Conflict, match="uses 2000 MiB"):
        host.pool.resize_slice(ALICE, "a", 0, 1999)
    host.pool.resize_slice(ALICE, "a", 0, 2000)


def test_without_a_broker_a_slice_grows_but_does_not_shrink(host):
    host.pool.create_slice(ALICE, want("a", 25, 4096))
    host.end_broker()
    host.pool.resize_slice(ALICE, "a", 0, 5000)
    with pytest.raises(BrokerUnavailable):
        host.pool.resize_slice(ALICE, "a", 0, 4999)
    with pytest.raises(BrokerUnavailable):
        host.pool.start_run(ALICE, "a", None, "x")
    with pytest.raises(InvalidRequest):
        host.pool.resize_slice(ALICE, "a", 0, 0)


@pytest.fixture
def program():
    """A process that runs until its standard input ends."""
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def caller(uid: int, process: subprocess.Popen) -> Caller:
    return Caller(uid, process.pid, uid == 0)


def test_a_run_has_its_lease_file_until_the_process_ends(host, program):
    uid = os.geteuid()
    host.broker.tcp_address = "127.0.0.1:4711"
    me = caller(uid, program)
    host.pool.create_slice(me, want("a"))
    run, piece = host.pool.start_run(me, "a", None, "cat")
    content = json.loads(Path(run.lease_file).read_text())
    lease = host.pool.lease(me, content["lease"])
    assert content["version"] == 1 and content["key"] == lease.key.hex()
    assert content["carriers"][0] == {"kind": "unix", "path": host.settings.session_socket}
    assert os.stat(run.lease_file).st_mode & 0o777 == 0o600
    program.kill()
    program.wait()
    until(lambda: not Path(run.lease_file).exists())
    until(lambda: not host.pool.store.runs())
    assert host.pool.slice(me, "a").piece == piece  # made by hand: it stays


def test_a_temporary_slice_is_bound_to_its_process(host, program):
    me = caller(os.geteuid(), program)
    run, piece = host.pool.start_run(me, "", want("run", 10, 100), "cat")
    assert piece.temporary and piece.memory_mib == 100
    push = host.broker.wait_push(lambda push: piece.name in pushed_names(push))
    lease = next(entry for entry in push.leases if entry.slices[0].name == piece.name)
    process = identify(program.pid)
    assert (lease.process.pid, lease.process.start_time) == (process.pid, process.start_ticks)
    with pytest.raises(Conflict, match="one running program"):
        host.pool.start_run(me, piece.name, None, "x")
    program.kill()
    program.wait()
    until(lambda: not host.pool.store.slices())
    host.broker.wait_push(lambda push: push.generation > lease_generation(host, piece.name))
    assert not Path(run.lease_file).exists()
    assert not host.pool.store.leases()


def lease_generation(host: Host, name: str) -> int:
    return max(p.generation for p in host.broker.pushed if name in pushed_names(p))


def test_what_ended_while_gpupoold_was_down_is_cleaned_up(host, program):
    me = caller(os.geteuid(), program)
    host.pool.create_slice(me, want("a"))
    host.pool.start_run(me, "a", None, "cat")
    host.pool.start_run(me, "", want("run", 10, 100), "cat")
    stray = Path(host.settings.lease_dir) / "00000000-left-over.json"
    stray.write_text("{}")
    host.stop()
    program.kill()
    program.wait()
    host.pool = host._pool()
    assert [entry.name for entry in host.pool.store.slices()] == ["a"]
    assert host.pool.store.runs() == []
    assert os.listdir(host.settings.lease_dir) == []
    host.broker.wait_push(lambda push: pushed_names(push) == {"a"})


def test_what_runs_on_while_gpupoold_was_down_stays(host, program):
    me = caller(os.geteuid(), program)
    run, piece = host.pool.start_run(me, "", want("run", 10, 100), "cat")
    os.unlink(run.lease_file)  # as if killed before it was written
    host.restart()
    assert [entry.name for entry in host.pool.store.slices()] == [piece.name]
    assert json.loads(Path(run.lease_file).read_text())["lease"] == run.lease_id
    program.kill()
    program.wait()
    until(lambda: not host.pool.store.slices())


def test_a_pid_that_was_given_out_again_is_another_process(host, program):
    me = caller(os.geteuid(), program)
    host.pool.start_run(me, "", want("run", 10, 100), "cat")
    with host.pool.store.change() as change:
        change.execute("UPDATE runs SET start_ticks = start_ticks - 1")
    host.restart()
    assert host.pool.store.slices() == [] and host.pool.store.runs() == []


def test_another_boot_ends_all_runs(host, program):
    me = caller(os.geteuid(), program)
    host.pool.start_run(me, "", want("run", 10, 100), "cat")
    with host.pool.store.change() as change:
        change.execute("UPDATE runs SET boot_id = 'earlier'")
    host.restart()
    assert host.pool.store.slices() == []


def test_a_run_of_a_process_that_is_not_there(host):
    ended = subprocess.Popen(["true"])
    ended.wait()
    host.pool.create_slice(ROOT, want("a"))
    for pid in (ended.pid, 0):
        with pytest.raises(InvalidRequest, match="not visible"):
            host.pool.start_run(Caller(0, pid, True), "a", None, "x")
    assert host.pool.store.runs() == []


def test_a_slice_on_a_card_that_is_gone_stays_known_and_is_not_pushed(host):
    host.pool.create_slice(ALICE, want("a"))
    host.pool.create_slice(ALICE, want("b", gpu="1"))
    host.driver.gpus = [gpu(1)]
    pool = host.restart()
    assert pool.slice(ALICE, "a").gpu_health == Health.MISSING
    host.broker.wait_push(lambda push: pushed_names(push) == {"b"})
    with pytest.raises(Conflict, match="missing"):
        pool.start_run(Caller(1001, os.getpid(), False), "a", None, "x")
    states = {view.state.gpu.uuid: view.state.health for view in pool.gpus()}
    assert states == {gpu(0).uuid: Health.MISSING, gpu(1).uuid: Health.OK}
    pool.delete_slice(ALICE, "a", False)
    pool = host.restart()
    assert [view.state.gpu.uuid for view in pool.gpus()] == [gpu(1).uuid]


def test_drain_lasts_and_takes_no_new_slices(host):
    host.pool.create_slice(ALICE, want("a"))
    view = host.pool.set_drained(ROOT, "0", True)
    assert view.state.drained and view.slices == 1
    pool = host.restart()
    assert pool.create_slice(ALICE, want("b")).piece.gpu_uuid == gpu(1).uuid
    with pytest.raises(Conflict, match="drained"):
        pool.create_slice(ALICE, want("c", gpu=gpu(0).uuid))
    pool.set_drained(ROOT, gpu(0).uuid, False)
    assert pool.create_slice(ALICE, want("c", gpu=gpu(0).uuid)).piece.gpu_uuid == gpu(0).uuid


def test_a_card_that_fails_is_told_and_takes_no_new_slices(host):
    host.driver.reports[gpu(0).uuid] = HealthReport(Health.FAILED, "fell off the bus")
    host.pool._monitor.look()
    assert host.pool.create_slice(ALICE, want("a")).piece.gpu_uuid == gpu(1).uuid
    event = next(e for e in host.pool.events(BOB, 0, 0)[0] if e.kind == "gpu.health")
    assert event.subject == gpu(0).uuid and "fell off the bus" in event.text


def test_the_brokers_news_become_events_and_sessions(host):
    view = host.pool.create_slice(ALICE, want("a"))
    state = session_of(host, view)
    host.broker.state.sessions.append(state)
    now = time.time_ns()
    host.broker.send(
        event=pb.Event(sequence=1, unix_ns=now, session_opened=pb.SessionOpened(session=state))
    )
    opened = until(lambda: [e for e in host.pool.store.events() if e.kind == "session.started"])[0]
    assert opened.subject == "a" and opened.owner_uid == 1001
    assert "\x1b" not in opened.text  # a hostile program's name does not reach a terminal
    assert opened.time == pytest.approx(now / 1e9)
    assert host.pool.slice(ALICE, "a").sessions == 1
    del host.broker.state.sessions[:]
    for what in (
        {"worker_ended": pb.WorkerEnded(session=state.id, lease=state.lease, why="signal 11")},
        {"session_ended": pb.SessionEnded(session=state.id, lease=state.lease, why="it crashed")},
    ):
        host.broker.send(event=pb.Event(sequence=2, unix_ns=now, **what))
    until(lambda: [e for e in host.pool.store.events() if e.kind == "session.ended"])
    assert [e.text for e in host.pool.store.events() if e.kind == "worker.failed"] == ["signal 11"]
    assert host.pool.slice(ALICE, "a").sessions == 0


def test_killing_a_session_is_for_its_owner(host):
    view = host.pool.create_slice(ALICE, want("a"))
    host.broker.state.sessions.append(session_of(host, view, 7))
    identity = str(uuid.UUID(bytes=bytes([7]) * 16))
    with pytest.raises(NotFound):
        host.pool.kill_session(BOB, identity)
    host.pool.kill_session(ALICE, identity[:8])
    asked = [r.kill_session for r in host.broker.requests if r.HasField("kill_session")]
    assert [a.session for a in asked] == [bytes([7]) * 16]


def test_what_a_tenant_writes_does_not_reach_a_terminal(host, program):
    me = caller(os.geteuid(), program)
    host.pool.create_slice(me, want("a"))
    with host.pool.store.change() as change:
        change.event("x", "a", "one\x1b[2J\ntwo\r")
    assert host.pool.store.events()[-1].text == "one?[2J?two?"


def test_a_card_that_the_broker_cannot_use_has_a_warning(host):
    host.broker.state.devices.append(
        pb.DeviceState(uuid=gpu(1).uuid, ready=False, sentence="cuInit says 999")
    )
    states = {view.state.gpu.index: view.state for view in host.pool.gpus()}
    assert states[0].health == Health.OK
    assert states[1].health == Health.WARNING and "cuInit says 999" in states[1].health_reason


@pytest.mark.parametrize("first", ["victim", "squatter"])
@pytest.mark.parametrize("taken", ["id", "virtual_uuid"])
def test_a_slices_uuid_is_never_anothers_name(host, first, taken):
    """Also where an older gpupoold took such a name, and whichever slice was made first."""
    victim = host.pool.create_slice(ALICE, want("victim")).piece
    for name in (getattr(victim, taken), getattr(victim, taken).upper()):
        with pytest.raises(InvalidRequest, match="form of a UUID"):
            host.pool.create_slice(BOB, want(name))
    squatter = host.pool.create_slice(BOB, want("squatter")).piece
    with host.pool.store.change() as change:
        change.execute(
            "UPDATE slices SET name = ? WHERE id = ?", getattr(victim, taken), squatter.id
        )
        earliest = victim if first == "victim" else squatter
        change.execute("UPDATE slices SET created_at = 1 WHERE id = ?", earliest.id)
    assert host.pool.slices(ROOT)[0].piece.id == earliest.id
    assert host.pool.slice(ALICE, getattr(victim, taken)).piece.id == victim.id
    with pytest.raises(NotPermitted):
        host.pool.delete_slice(BOB, getattr(victim, taken), force=True)
    host.pool.delete_slice(BOB, squatter.id, force=True)  # it can still be removed
    assert [view.piece.id for view in host.pool.slices(ROOT)] == [victim.id]


def test_events_are_told(host):
    told = threading.Event()
    host.pool.listen(told.set)
    last = host.pool.store.events()[-1].id
    host.pool.create_slice(ALICE, want("a"))
    assert told.wait(5)
    found, seen = host.pool.events(ALICE, last, 0)
    assert [(e.kind, e.subject) for e in found] == [("slice.created", "a")]
    assert host.pool.events(ALICE, seen, 0) == ([], seen)
    assert host.pool.events(BOB, last, 0) == ([], seen)  # nothing of others, and not asked again
    host.pool.unlisten(told.set)


def test_a_broker_that_never_answers_is_not_waited_for_for_ever(host):
    host.broker.silent = True
    with pytest.raises(BrokerUnavailable, match="did not answer"):
        host.pool.broker.client.push(seconds=0.1)
    host.pool.create_slice(ALICE, want("a"))
    host.broker.silent = False
    host.broker.wait_push(lambda push: "a" in pushed_names(push))


def test_killed_between_any_two_steps_the_next_start_repairs(host, program):
    """Each half-done state that a kill can leave is made by hand, then gpupoold starts."""
    me = caller(os.geteuid(), program)
    view = host.pool.create_slice(me, want("a"))
    run, _ = host.pool.start_run(me, "", want("run", 10, 100), "cat")
    host.stop()
    with sqlite3.connect(host.settings.database) as db:
        db.execute("DELETE FROM runs")  # the run's end was stored, the slice's not
        db.execute("DELETE FROM lease_slices WHERE lease_id = ?", (view.lease.id,))
        db.execute("DELETE FROM leases WHERE id = ?", (view.lease.id,))
    db.close()
    host.pool = host._pool()
    assert [entry.name for entry in host.pool.store.slices()] == ["a"]
    assert len(host.pool.store.leases()) == 1
    assert not Path(run.lease_file).exists()
    host.broker.wait_push(lambda push: pushed_names(push) == {"a"} and push.leases[0].key)
