"""The same over every carrier of this host: programs are right, and ends are noticed.

All other tests use rings, which every program of the host gets unless they are off.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.functional.pool import Pool, wait_for
from tests.functional.test_survival import UNAVAILABLE, rest_of
from tests.programs.catalog import DRIVER_PROGRAMS, RUNTIME_PROGRAMS, Program
from tests.programs.toolchain import Compiler

SOME = {
    "driver": {"threads_streams", "errors", "graph_nodes", "fork", "sticky", "loop", "link"},
    "cuda": {"transpose", "printf", "callbacks", "stream_ordered", "streams_events", "graphs"},
}


@dataclass
class Carried:
    """A pool, and the one carrier that its programs use."""

    carrier: str
    pool: Pool

    @property
    def environment(self) -> dict[str, str]:
        return {"GPUPOOL_CARRIER": "tcp"} if self.carrier == "tcp" else {}

    def looping(self, loop: str) -> AbstractContextManager[subprocess.Popen[str]]:
        return self.pool.started("main", [loop], environment=self.environment)


def carried_by(carrier: str, driver: Path) -> Iterator[Carried]:
    rings = str(carrier == "ring").lower()
    options = {"broker": {"rings": rings, "tcp_listen": "127.0.0.1:0"}}
    with Pool(driver_directory=driver, options=options) as pool:
        pool.slice("main", compute=25, memory=4096)
        yield Carried(carrier, pool)


@pytest.fixture(scope="module", params=["unix", "tcp"])
def socket(request: pytest.FixtureRequest, simulated_driver: Path) -> Iterator[Carried]:
    yield from carried_by(request.param, simulated_driver)


@pytest.fixture(params=["ring", "unix", "tcp"])
def own(request: pytest.FixtureRequest, simulated_driver: Path) -> Iterator[Carried]:
    """For tests that kill."""
    yield from carried_by(request.param, simulated_driver)


@pytest.mark.parametrize(
    "program",
    [p for p in DRIVER_PROGRAMS if p.name in SOME["driver"]]
    + [p for p in RUNTIME_PROGRAMS if p.name in SOME["cuda"]],
    ids=lambda p: f"{p.kind}-{p.name}",
)
def test_programs(socket: Carried, compiler: Compiler, program: Program) -> None:
    environment = {**program.environment, **socket.environment}
    done = socket.pool.run("main", program.command(compiler), environment=environment)
    problem = program.problem(done.returncode, done.stdout)
    assert problem is None, f"{problem}\n{done.stderr}\n{socket.pool.logs()}"


def test_the_carrier_is_shown(own: Carried, compiler: Compiler) -> None:
    with own.looping(str(compiler.driver("loop"))) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        wait_for(
            "the carrier", lambda: [s["carrier"] for s in own.pool.sessions()] == [own.carrier]
        )


def test_worker_killed(own: Carried, compiler: Compiler) -> None:
    loop = str(compiler.driver("loop"))
    with own.looping(loop) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        for pid in own.pool.worker_pids():
            os.kill(pid, signal.SIGKILL)
        output = rest_of(program)
        assert program.returncode == 9, output
        assert f"error {UNAVAILABLE}, again {UNAVAILABLE}" in output
    wait_for("the memory to be free", lambda: own.pool.used_mib("main") == 0, 5)
    after = own.pool.run("main", [loop, "3"], environment=own.environment)
    assert (after.returncode, after.stdout) == (0, "ready\nok\n"), after.stderr + own.pool.logs()


def test_client_killed(own: Carried, compiler: Compiler) -> None:
    with own.looping(str(compiler.driver("loop"))) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        [shown] = own.pool.sessions()
        os.kill(shown["pid"], signal.SIGKILL)
        wait_for("the session's end", lambda: not own.pool.sessions(), 20)
    wait_for("the memory to be free", lambda: own.pool.used_mib("main") == 0, 5)


def test_broker_killed(own: Carried, compiler: Compiler) -> None:
    with own.looping(str(compiler.driver("loop"))) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        own.pool.end_broker(signal.SIGKILL)
        output = rest_of(program)
        assert program.returncode == 9, output
        assert f"error {UNAVAILABLE}, again {UNAVAILABLE}" in output
