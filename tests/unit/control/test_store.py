"""The state file: transactions, upgrades, and what is said when it does not work."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import pytest

import gpupoold
from gpupoold.errors import AlreadyExists, StateError, StateWriteFailed
from gpupoold.model import Lease, LeaseKind, ProcessIdentity, Run
from gpupoold.store import Store, schema

from .fakes import gpu
from .test_planning import piece


def lease(*slice_ids: str, lease_id: str = "l", kind: LeaseKind = LeaseKind.OWNER) -> Lease:
    return Lease(lease_id, kind, 1000, slice_ids, time.time(), bytes(range(32)))


@pytest.fixture
def store(root):
    made = Store(str(root / "state.sqlite3"), event_limit=100)
    made.open()
    with made.change() as change:
        change.put_gpu(gpu(0))
    yield made
    made.close()


def reopened(store: Store) -> Store:
    store.close()
    again = Store(store.path, event_limit=100)
    again.open()
    return again


def test_everything_is_there_after_reopening(store):
    part = piece(0, 25, 4096)
    run = Run("r", "l", 1000, ProcessIdentity(4711, 99, "boot"), "./a b", "/x.json", 5.5)
    with store.change() as change:
        change.add_slice(part)
        change.add_lease(lease(part.id))
        change.add_run(run)
        change.event("slice.created", part.name, "made", owner_uid=1000, extra=[1, 2])
    generation = store.generation()
    again = reopened(store)
    assert again.slices() == [part]
    assert [(e.slice_ids, e.key, e.kind) for e in again.leases()] == [
        ((part.id,), bytes(range(32)), LeaseKind.OWNER)
    ]
    assert again.runs() == [run]
    assert again.generation() == generation
    event = again.events()[-1]
    assert (event.kind, event.data, event.owner_uid) == ("slice.created", {"extra": [1, 2]}, 1000)
    again.close()


def test_an_error_in_the_middle_changes_nothing(store):
    before = store.generation()
    with pytest.raises(RuntimeError), store.change() as change:
        change.add_slice(piece(0, 25, 4096))
        change.event("slice.created", "x", "never happened")
        raise RuntimeError("in the middle")
    assert store.slices() == [] and store.events() == [] and store.generation() == before


def test_kill_in_the_middle_of_a_change_leaves_the_last_whole_state(root):
    script = textwrap.dedent(
        """
        import os, sys
        from gpupoold.store import Store
        from control.fakes import gpu
        from control.test_planning import piece
        store = Store(sys.argv[1]); store.open()
        with store.change() as change:
            change.put_gpu(gpu(0)); change.add_slice(piece(0, 25, 1, 1))
        with store.change() as change:
            change.add_slice(piece(0, 25, 1, 2))
            print("half", flush=True)
            os.kill(os.getpid(), 9)
        """
    )
    path = str(root / "state.sqlite3")
    packages = [Path(gpupoold.__file__).parents[1], Path(__file__).parents[1]]
    done = subprocess.run(
        [sys.executable, "-c", script, path],
        capture_output=True,
        text=True,
        cwd="/",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, packages))},
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "half\n"), done.stderr
    store = Store(path)
    store.open()
    assert [part.name for part in store.slices()] == ["s0-1"]
    store.close()


def test_each_change_raises_the_generation_and_events_alone_do_not(store):
    first = store.generation()
    with store.change() as change:
        change.set_drained(gpu(0).uuid, True)
    with store.change(new_generation=False) as change:
        change.event("x", "y", "z")
    assert store.generation() == first + 1


def test_a_name_is_taken_once(store):
    with store.change() as change:
        change.add_slice(piece(0, 1, 1, 1))
    twin = piece(0, 1, 1, 2)
    object.__setattr__(twin, "name", "s0-1")
    with pytest.raises(AlreadyExists, match="s0-1"), store.change() as change:
        change.add_slice(twin)
    assert len(store.slices()) == 1


def test_a_slice_is_in_one_lease(store):
    part = piece(0, 1, 1)
    with store.change() as change:
        change.add_slice(part)
        change.add_lease(lease(part.id, lease_id="a"))
    with pytest.raises(StateWriteFailed), store.change() as change:
        change.add_lease(lease(part.id, lease_id="b"))
    assert [entry.id for entry in store.leases()] == ["a"]


def test_deleting_a_slice_takes_its_lease_and_runs(store):
    part = piece(0, 1, 1)
    with store.change() as change:
        change.add_slice(part)
        change.add_lease(lease(part.id))
        change.add_run(Run("r", "l", 0, ProcessIdentity(1, 2, "b"), "", "", 0.0))
    with store.change() as change:
        change.delete_slice(part.id)
    assert (store.slices(), store.leases(), store.runs()) == ([], [], [])


def test_deleting_one_of_two_slices_keeps_the_lease(store):
    one, two = piece(0, 1, 1, 1), piece(0, 1, 1, 2)
    with store.change() as change:
        change.add_slice(one)
        change.add_slice(two)
        change.add_lease(lease(one.id, two.id))
    with store.change() as change:
        change.delete_slice(one.id)
    assert store.leases()[0].slice_ids == (two.id,)


def test_old_events_are_dropped_and_ids_go_on(store):
    for number in range(250):
        with store.change(new_generation=False) as change:
            change.event("tick", str(number), "")
    events = store.events()
    assert [event.subject for event in events] == [str(n) for n in range(150, 250)]
    assert store.events(after_id=events[-2].id) == events[-1:]
    assert store.events(limit=3) == events[-3:]
    last = events[-1].id
    again = reopened(store)
    with again.change(new_generation=False) as change:
        change.event("tick", "after", "")
    assert again.events()[-1].id == last + 1
    again.close()


def test_nobody_pushes_out_the_events_of_others(store):
    """The store of these tests has room for 100."""

    def tell(kind: str, owner: int | None, count: int, each: int = 1) -> None:
        for first in range(0, count, each):
            with store.change(new_generation=False) as change:
                for number in range(first, first + each):
                    change.event(kind, str(number), "", owner_uid=owner)

    tell("gpu.added", None, 5)
    tell("slice.created", 1002, 3)
    tell("session.started", 1001, 20)
    tell("session.started", 1002, 500, 50)
    with pytest.raises(ZeroDivisionError), store.change() as change:
        change.event("session.started", "never", "", owner_uid=1001)
        raise ZeroDivisionError
    store = reopened(store)
    tell("session.ended", 1002, 500)
    kept = [(event.kind, event.owner_uid) for event in store.events()]
    assert kept == [
        *[("gpu.added", None)] * 5,
        *[("slice.created", 1002)] * 3,
        *[("session.started", 1001)] * 20,
        *[("session.ended", 1002)] * 72,
    ]
    assert [event.subject for event in store.events()[-72:]] == [str(n) for n in range(428, 500)]
    tell("session.started", 1001, 500)  # both without end: each has half of what is left
    counts = Counter((event.kind, event.owner_uid) for event in store.events())
    assert counts == {
        ("gpu.added", None): 5,
        ("slice.created", 1002): 3,
        ("session.started", 1001): 46,
        ("session.ended", 1002): 46,
    }
    seen = store.events(limit=3, uid=1002)  # the newest that this user may see
    assert [(event.kind, event.subject) for event in seen] == [
        ("session.ended", str(number)) for number in (497, 498, 499)
    ]
    assert {event.owner_uid for event in store.events(uid=1001)} == {None, 1001}
    store.close()


def test_the_file_is_for_its_owner_alone(store):
    assert os.stat(store.path).st_mode & 0o777 == 0o600


def test_one_process_at_a_time(store):
    second = Store(store.path)
    with pytest.raises(StateError, match="in use by another gpupoold"):
        second.open()


def test_a_newer_schema_is_refused_and_left_alone(store):
    store.close()
    with sqlite3.connect(store.path) as db:
        db.execute(f"PRAGMA user_version = {schema.VERSION + 1}")
    db.close()
    before = Path(store.path).read_bytes()
    with pytest.raises(StateError, match="newer gpupoold"):
        Store(store.path).open()
    assert Path(store.path).read_bytes() == before


def test_another_programs_file_is_refused(root):
    path = str(root / "other.sqlite3")
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE mine (x)")
    db.close()
    with pytest.raises(StateError, match="another program"):
        Store(path).open()


@pytest.mark.parametrize("where", [0, 100, 4096 + 8])
def test_a_damaged_file_is_refused(store, where):
    store.close()
    with open(store.path, "r+b") as stream:
        stream.seek(where)
        stream.write(b"\xff" * 64)
    with pytest.raises(StateError, match=r"damaged|another program|contradicts"):
        Store(store.path).open()


def test_a_state_directory_that_is_a_file(root):
    (root / "f").write_text("")
    with pytest.raises(StateError):
        Store(str(root / "f" / "state.sqlite3")).open()


def test_every_migration_runs_from_each_earlier_version(root, monkeypatch):
    more = [*schema.MIGRATIONS, ["ALTER TABLE slices ADD COLUMN color TEXT", "DELETE FROM events"]]
    path = str(root / "state.sqlite3")
    old = Store(path)
    old.open()
    with old.change() as change:
        change.put_gpu(gpu(0))
        change.add_slice(piece(0, 10, 10))
    old.close()
    monkeypatch.setattr(schema, "MIGRATIONS", more)
    monkeypatch.setattr(schema, "VERSION", len(more))
    new = Store(path)
    new.open()
    assert [part.name for part in new.slices()] == ["s0-0"]
    new.close()
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA user_version").fetchone()[0] == len(more)
        assert db.execute("SELECT color FROM slices").fetchall() == [(None,)]
    db.close()


def test_a_migration_that_fails_leaves_the_old_version(root, monkeypatch):
    path = str(root / "state.sqlite3")
    first = Store(path)
    first.open()
    first.close()
    bad = [*schema.MIGRATIONS, ["CREATE TABLE half (x)", "this is no SQL"]]
    monkeypatch.setattr(schema, "MIGRATIONS", bad)
    monkeypatch.setattr(schema, "VERSION", len(bad))
    broken = Store(path)
    with pytest.raises(StateError, match="syntax"):
        broken.open()
    monkeypatch.undo()
    good = Store(path)
    good.open()
    assert good.generation() >= 1
    good.close()
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT name FROM sqlite_master WHERE name = 'half'").fetchall() == []
    db.close()


def _full_disk(path: str) -> subprocess.CompletedProcess[str]:
    """Opens the store where no file may grow beyond some KiB, as on a full disk."""
    script = textwrap.dedent(
        """
        import resource, signal, sys
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
        from gpupoold.errors import StateError, StateWriteFailed
        from gpupoold.store import Store
        store = Store(sys.argv[1], event_limit=10**6)
        try:
            store.open()
            while True:
                with store.change(new_generation=False) as change:
                    change.event("x", "y", "z" * 500)
        except (StateError, StateWriteFailed) as error:
            print(type(error).__name__, error)
        try:
            print(len(store.events()), "events,", store.slices())
        except Exception as error:
            print("cannot read", error)
        """
    )

    return subprocess.run(
        [sys.executable, "-c", script, path],
        capture_output=True,
        text=True,
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(Path(gpupoold.__file__).parents[1])},
    )


def test_a_disk_that_gets_full_refuses_the_change_and_keeps_the_rest(root):
    done = _full_disk(str(root / "state.sqlite3"))
    assert "StateWriteFailed nothing was changed" in done.stdout, done.stdout + done.stderr
    assert "events, []" in done.stdout
    store = Store(str(root / "state.sqlite3"))
    store.open()  # and with room again, all goes on
    assert len(store.events()) > 10
    store.close()


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM meta WHERE key = 'generation'",
        "UPDATE meta SET value = 'many' WHERE key = 'generation'",
        "UPDATE meta SET value = '99999999999999999999' WHERE key = 'generation'",
    ],
)
def test_a_file_without_a_generation_is_damaged(store, damage):
    store.close()
    with sqlite3.connect(store.path) as db:
        db.execute(damage)
    db.close()
    with pytest.raises(StateError, match="is damaged"):
        Store(store.path, 1000).open()


def test_leases_and_runs_survive_the_table_that_is_made_anew(root):
    """Version 2 makes the table of leases again; what refers to it must not go with the old one."""
    path = str(root / "state.sqlite3")
    db = sqlite3.connect(path, isolation_level=None)
    for statement in schema.MIGRATIONS[0]:
        db.execute(statement)
    db.execute(f"PRAGMA application_id = {schema.APPLICATION_ID}")
    db.execute("PRAGMA user_version = 1")
    db.execute("INSERT INTO gpus VALUES ('GPU-a', 0, 'n', 1, 0, '9.0', 'p', 0, 'shared', 0)")
    db.execute(
        "INSERT INTO slices VALUES ('s', 'name', 'shared', 'GPU-a', 1, 1, 'hard', 5, 'v', 'q', 7,"
        " 0, 1.5)"
    )
    db.execute("INSERT INTO leases VALUES ('l', 'run', 7, ?, 2.5)", (bytes(range(32)),))
    db.execute("INSERT INTO lease_slices VALUES ('l', 0, 's')")
    db.execute("INSERT INTO runs VALUES ('r', 'l', 7, 1, 2, 'boot', 'c', '/f', 3.5)")
    db.close()
    store = Store(path)
    store.open()
    (lease,) = store.leases()
    assert (lease.id, lease.owner_uid, lease.key) == ("l", 7, bytes(range(32)))
    assert lease.slice_ids == ("s",)
    assert [run.lease_id for run in store.runs()] == ["l"]
    with store.change() as change:
        change.delete_lease("l")  # the references are to the new table
    assert store.runs() == []
    store.close()
