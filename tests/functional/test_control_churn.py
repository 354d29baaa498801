"""kill -9 of gpupoold at any point of its work: the next start finds a state that is whole."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import threading
import time
from collections.abc import Iterator

import grpc
import pytest

from gpupoold.api import gpupool_pb2 as pb
from gpupoold.api import gpupool_pb2_grpc as pb_grpc
from gpupoold.testing.sandbox import Sandbox
from tests.functional.pool import Pool, wait_for

ROUNDS = 12


class Worker(threading.Thread):
    """Makes, resizes and removes slices by the API, as fast as it goes, whatever happens."""

    def __init__(self, pool: Sandbox, number: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.pool = pool
        self.number = number
        self.stop = stop
        self.random = random.Random(number)
        #: what the daemon has confirmed: name -> (percent, MiB); None: deleted
        self.confirmed: dict[str, tuple[int, int] | None] = {}
        #: names whose last change was not answered: either state is right
        self.unsure: set[str] = set()
        self.wrong: list[str] = []

    def run(self) -> None:
        while not self.stop.is_set():
            options = [("grpc.use_local_subchannel_pool", 1)]
            with grpc.insecure_channel(self.pool.connect, options=options) as channel:
                stub = pb_grpc.PoolStub(channel)
                with contextlib.suppress(grpc.RpcError):
                    self._look(stub)
                    while not self.stop.is_set() and self._step(stub):
                        pass
            time.sleep(0.02)

    def _look(self, stub: pb_grpc.PoolStub) -> None:
        """Finds out what became of the changes that were not answered: they are whole."""
        for name in sorted(self.unsure):
            try:
                found = stub.GetSlice(pb.GetSliceRequest(name=name), timeout=10)
                self.confirmed[name] = (found.compute_percent, found.memory_mib)
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.NOT_FOUND:  # type: ignore[attr-defined]
                    raise
                self.confirmed[name] = None
            self.unsure.discard(name)

    def _step(self, stub: pb_grpc.PoolStub) -> bool:
        name = f"w{self.number}-{self.random.randrange(4)}"
        size = (self.random.randint(1, 5), self.random.randint(1, 2000))
        what = self.random.choice(["create", "create", "resize", "delete"])
        try:
            if what == "create":
                request = pb.CreateSliceRequest(
                    name=name, compute_percent=size[0], memory_mib=size[1]
                )
                stub.CreateSlice(request, timeout=10)
                result: tuple[int, int] | None = size
            elif what == "resize":
                stub.ResizeSlice(
                    pb.ResizeSliceRequest(name=name, compute_percent=size[0], memory_mib=size[1]),
                    timeout=10,
                )
                result = size
            else:
                stub.DeleteSlice(pb.DeleteSliceRequest(name=name), timeout=10)
                result = None
        except grpc.RpcError as error:
            code = error.code()  # type: ignore[attr-defined]
            details = error.details() or ""  # type: ignore[attr-defined]
            if code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION):
                return True  # the daemon's own answer: nothing was changed
            if code in (grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.RESOURCE_EXHAUSTED):
                return True
            if code == grpc.StatusCode.UNAVAILABLE and details.startswith("slice "):
                return True
            if code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                self.wrong.append(f"{what} {name}: {code} {details}")
            self.unsure.add(name)
            return False
        self.confirmed[name] = result
        self.unsure.discard(name)
        return True


def sleeper(pool: Pool) -> subprocess.Popen[str]:
    """A program with a temporary slice."""
    return pool.popen("run", "--compute", "1", "--memory", "16", "--", "sleep", "600")


@pytest.fixture
def programs() -> Iterator[list[subprocess.Popen[str]]]:
    """A list of processes that are killed at the end."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for program in started:
        program.kill()
        program.communicate()


def test_killed_at_any_point(pool: Pool, programs: list[subprocess.Popen[str]]) -> None:
    chance = random.Random(1)
    stop = threading.Event()
    workers = [Worker(pool, number, stop) for number in range(3)]
    for worker in workers:
        worker.start()
    try:
        for _ in range(ROUNDS):
            programs.append(sleeper(pool))
            time.sleep(chance.uniform(0.0, 0.7))
            pool.end_daemon(signal.SIGKILL)
            victim = chance.choice(programs)  # may be in the middle of its own start
            with contextlib.suppress(ProcessLookupError):
                victim.send_signal(signal.SIGKILL)
            # Checked as a restarted machine would find it, before the next start mends anything.
            with sqlite3.connect(f"file:{pool.state_dir}/gpupoold.sqlite3", uri=True) as db:
                assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
                assert db.execute("PRAGMA foreign_key_check").fetchall() == []
            db.close()
            pool.start_daemon()
        wait_for("every worker to work again", lambda: not any(w.unsure for w in workers), 20)
    finally:
        stop.set()
        for worker in workers:
            worker.join(30)
    assert [wrong for worker in workers for wrong in worker.wrong] == []

    # Every confirmed change is there; those that were not answered are there or not.
    slices = {entry["name"]: entry for entry in pool.ctl_json("slice", "list")}
    confirmed = 0
    for worker in workers:
        for name, size in worker.confirmed.items():
            if name in worker.unsure:
                continue
            confirmed += 1
            found = slices.get(name)
            shown = (found["compute_percent"], found["memory_mib"]) if found else None
            assert shown == size, name
    assert confirmed > 0
    assert "main" in slices

    # A temporary slice for each program that lives, and for no other; likewise the lease files.
    living = [program for program in programs if program.poll() is None]

    def temporary() -> int:
        return sum(entry["temporary"] for entry in pool.ctl_json("slice", "list"))

    wait_for(
        "temporary slices to be those of living programs",
        lambda: temporary() == len([p for p in programs if p.poll() is None]),
        20,
    )
    assert len(os.listdir(pool.run_dir / "leases")) == len(
        [program for program in programs if program.poll() is None]
    )
    uuids = [entry["uuid"] for entry in slices.values()]
    addresses = [entry["pci_address"] for entry in slices.values()]
    assert len(set(uuids)) == len(uuids) and len(set(addresses)) == len(addresses)
    leases = pool.ctl_json("lease", "list")
    assert sorted(name for lease in leases for name in lease["slices"]) == sorted(
        entry["name"] for entry in pool.ctl_json("slice", "list")
    )
    for program in living:
        program.kill()
    for program in programs:
        program.communicate()
    wait_for("no temporary slice", lambda: temporary() == 0, 20)
    wait_for("no lease file", lambda: os.listdir(pool.run_dir / "leases") == [], 20)
