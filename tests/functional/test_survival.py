"""kill -9 of anything: an error or nothing at all for the client, never a hang; nothing is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess

from tests.functional.pool import Pool, wait_for
from tests.programs.toolchain import Compiler

UNAVAILABLE = 46  # CUDA_ERROR_DEVICE_UNAVAILABLE


def rest_of(process: subprocess.Popen[str]) -> str:
    """What the process says until its end; a hang is a failure."""
    output, _ = process.communicate(timeout=30)
    return output


def test_worker_killed(pool: Pool, compiler: Compiler) -> None:
    loop = str(compiler.driver("loop"))
    with pool.started("main", [loop]) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        sessions = pool.sessions()
        assert len(sessions) == 1
        for pid in pool.worker_pids():
            # One of them may be a warm one that has not been given work.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        output = rest_of(program)
        assert program.returncode == 9, output
        assert f"error {UNAVAILABLE}, again {UNAVAILABLE}" in output
    wait_for("the memory to be free", lambda: pool.used_mib("main") == 0, 5)
    after = pool.run("main", [loop, "3"])
    assert (after.returncode, after.stdout) == (0, "ready\nok\n"), after.stderr + pool.logs()


def test_broker_killed(pool: Pool, compiler: Compiler) -> None:
    loop = str(compiler.driver("loop"))
    with pool.started("main", [loop]) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        workers = pool.worker_pids()
        assert workers
        pool.end_broker(signal.SIGKILL)
        output = rest_of(program)
        assert program.returncode == 9, output
        assert f"error {UNAVAILABLE}, again {UNAVAILABLE}" in output
        # Nobody is left behind.
        wait_for("the workers' end", lambda: not any(alive(pid) for pid in workers), 10)
    pool.start_broker()
    wait_for(
        "a program that works again", lambda: pool.run("main", [loop, "1"]).returncode == 0, 20
    )
    assert pool.used_mib("main") == 0


def test_gpupoold_killed_and_restarted(pool: Pool, compiler: Compiler) -> None:
    pool.slice("other", compute=10, memory=512)
    loop = str(compiler.driver("loop"))
    with pool.started("main", [loop]) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        before = {
            "slices": sorted(
                (s["name"], s["uuid"], s["memory_mib"], s["gpu_uuid"])
                for s in pool.ctl_json("slice", "list")
            ),
            "leases": sorted(lease["id"] for lease in pool.ctl_json("lease", "list")),
            "sessions": sorted(s["id"] for s in pool.sessions()),
        }
        assert len(before["slices"]) == 2 and len(before["sessions"]) == 1
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
            pool.end_daemon(number)
            assert program.poll() is None
            pool.start_daemon()
            wait_for(
                "the sessions to be known again",
                lambda: sorted(s["id"] for s in pool.sessions()) == before["sessions"],
                10,
            )
            assert (
                sorted(
                    (s["name"], s["uuid"], s["memory_mib"], s["gpu_uuid"])
                    for s in pool.ctl_json("slice", "list")
                )
                == before["slices"]
            )
            assert (
                sorted(lease["id"] for lease in pool.ctl_json("lease", "list"))
                == (before["leases"])
            )
            assert program.poll() is None, "the program noticed"
        with pool.started("other", [loop, "3"]) as later:
            assert rest_of(later) == "ready\nok\n"
        assert program.poll() is None


def test_a_run_ends_while_gpupoold_is_down(pool: Pool, compiler: Compiler) -> None:
    """The broker ends what belongs to a dead process by itself."""
    memory = str(compiler.driver("memory"))
    with pool.started("main", [memory, "alloc", "1000", "wait"]) as program:
        assert program.stdout is not None and program.stdin is not None
        assert program.stdout.readline() == "alloc 1000: 0\n"
        assert program.stdout.readline() == "waiting\n"
        pool.end_daemon(signal.SIGKILL)
        os.killpg(program.pid, signal.SIGKILL)
        program.wait(timeout=30)
    pool.start_daemon()
    wait_for("no session", lambda: pool.sessions() == [], 10)
    assert pool.used_mib("main") == 0
    done = pool.run("main", [memory, "alloc", "4000"])
    assert done.stdout.splitlines()[0] == "alloc 4000: 0", done.stderr


def test_session_killed_by_the_operator(pool: Pool, compiler: Compiler) -> None:
    with pool.started("main", [str(compiler.driver("loop"))]) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        [session] = pool.sessions()
        pool.ctl("session", "kill", session["id"])
        output = rest_of(program)
        assert program.returncode == 9, output
        assert f"error {UNAVAILABLE}" in output
    wait_for("no session", lambda: pool.sessions() == [], 10)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
