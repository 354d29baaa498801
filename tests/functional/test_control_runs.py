"""gpupoolctl with real processes: users, temporary slices, resizing and deleting under load."""

from __future__ import annotations

import json
import os
import pwd
import signal
import subprocess
import sys

import pytest

from tests.functional.pool import Pool, wait_for
from tests.programs.toolchain import Compiler


def temporary_slices(pool: Pool) -> list[str]:
    return [entry["name"] for entry in pool.ctl_json("slice", "list") if entry["temporary"]]


def test_a_temporary_slice_lives_as_long_as_its_program(pool: Pool, compiler: Compiler) -> None:
    memory = str(compiler.driver("memory"))
    program = pool.popen(
        "run", "--compute", "10", "--memory", "64", "--", memory, "alloc", "100", "info", "wait",
        stdin=subprocess.PIPE,
    )  # fmt: skip
    assert program.stdout is not None and program.stdin is not None
    assert program.stdout.readline() == "alloc 100: 2\n"
    assert f"total {64 << 20}" in program.stdout.readline()
    assert program.stdout.readline() == "waiting\n"
    [name] = temporary_slices(pool)
    assert pool.ctl_json("slice", "show", name)["sessions"] == 1
    [session] = pool.sessions()
    assert (session["pid"], session["slice"]) == (program.pid, name)
    program.communicate("\n", timeout=60)
    assert program.returncode == 0
    wait_for("the slice's end", lambda: temporary_slices(pool) == [], 10)
    assert pool.sessions() == []


def test_a_program_that_ends_while_gpupoold_is_down(pool: Pool, compiler: Compiler) -> None:
    memory = str(compiler.driver("memory"))
    program = pool.popen(
        "run", "--compute", "10", "--memory", "64", "--", memory, "alloc", "32", "wait",
        stdin=subprocess.PIPE,
    )  # fmt: skip
    assert program.stdout is not None
    assert program.stdout.readline() == "alloc 32: 0\n"
    assert len(os.listdir(pool.run_dir / "leases")) == 1
    pool.end_daemon(signal.SIGKILL)
    program.kill()
    program.communicate()
    pool.start_daemon()
    assert temporary_slices(pool) == []
    assert os.listdir(pool.run_dir / "leases") == []
    assert pool.ctl_json("gpu", "show", "0")["memory_allocated_mib"] == 4096  # "main"


def test_the_programs_own_exit_status(pool: Pool) -> None:
    for status in (0, 1, 3, 6, 77, 255):
        done = pool.ctl("run", "--slice", "main", "--", "sh", "-c", f"exit {status}")
        assert (done.returncode, done.stderr) == (status, "")
    assert pool.ctl("run", "--slice", "main", "--", "sh", "-c", "kill -15 $$").returncode == -15


def test_a_slice_that_is_in_use(pool: Pool, compiler: Compiler) -> None:
    memory = str(compiler.driver("memory"))
    with pool.started(
        "main", [memory, "alloc", "1000", "wait", "info", "alloc", "3000"]
    ) as program:
        assert program.stdout is not None and program.stdin is not None
        assert program.stdout.readline() == "alloc 1000: 0\n"
        assert program.stdout.readline() == "waiting\n"
        assert pool.used_mib("main") >= 1000
        refused = pool.ctl("slice", "resize", "main", "--memory", "999")
        assert refused.returncode == 5, refused.stderr
        assert pool.ctl_json("slice", "show", "main")["memory_mib"] == 4096
        refused = pool.ctl("slice", "delete", "main")
        assert refused.returncode == 5 and "1 running session" in refused.stderr
        # Down to less than what the program will ask for, while it runs.
        assert pool.ctl_json("slice", "resize", "main", "--memory", "2000")["memory_mib"] == 2000
        program.stdin.write("\n")
        program.stdin.flush()
        free = int(program.stdout.readline().split()[1])
        assert free <= 1000 << 20
        assert program.stdout.readline() == "alloc 3000: 2\n"
        program.wait(timeout=60)


def test_a_slice_that_grows_is_larger_for_later_programs(pool: Pool, compiler: Compiler) -> None:
    memory = str(compiler.driver("memory"))
    with pool.started("main", [memory, "alloc", "4000", "wait", "info"]) as program:
        assert program.stdout is not None and program.stdin is not None
        assert program.stdout.readline() == "alloc 4000: 0\n"
        assert program.stdout.readline() == "waiting\n"
        pool.ctl("slice", "resize", "main", "--memory", "6000", check=True)
        later = pool.run("main", [memory, "alloc", "2100", "alloc", "1900", "info"])
        assert later.stdout.splitlines()[:2] == ["alloc 2100: 2", "alloc 1900: 0"], later.stderr
        assert later.stdout.splitlines()[2].endswith(f"total {6000 << 20}")
        program.stdin.write("\n")
        program.stdin.flush()
        output, _ = program.communicate(timeout=60)  # goes on, undisturbed
        assert (program.returncode, output.splitlines()[-1]) == (0, "ok"), output


def test_deleting_by_force_ends_the_programs(pool: Pool, compiler: Compiler) -> None:
    with pool.started("main", [str(compiler.driver("loop"))]) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        pool.ctl("slice", "delete", "--force", "main", check=True)
        output, _ = program.communicate(timeout=30)
        assert program.returncode == 9 and "error 46" in output
    assert pool.sessions() == []
    assert os.listdir(pool.run_dir / "leases") == []


def test_events_tell_the_story(pool: Pool, compiler: Compiler) -> None:
    follower = pool.popen("--json", "events", "--follow")
    done = pool.run("main", [str(compiler.driver("memory")), "alloc", "1"])
    assert done.returncode == 0, done.stderr
    assert follower.stdout is not None
    kinds = []
    for line in follower.stdout:
        event = json.loads(line)
        if event["subject"] == "main":
            kinds.append(event["kind"])
        if event["kind"] == "session.ended":
            break
    follower.kill()
    follower.communicate()
    told = [
        kind for kind in kinds if kind != "run.ended"
    ]  # comes before or after the session's end
    assert told == ["slice.created", "run.started", "session.started", "session.ended"]


@pytest.fixture
def nobody() -> dict:
    """Keywords of subprocess to be an unprivileged user who can read this installation."""
    if os.geteuid() != 0:
        pytest.skip("only root can be somebody else")
    user = pwd.getpwnam("nobody")
    keywords = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": [], "cwd": "/"}
    probe = [sys.executable, "-c", "import gpupoold.cmd.ctl, grpc"]
    try:
        subprocess.run(probe, capture_output=True, check=True, **keywords)
    except (subprocess.CalledProcessError, PermissionError):
        pytest.skip("other users cannot read this Python environment")
    return keywords


def test_a_program_needs_no_root(pool: Pool, compiler: Compiler, nobody: dict) -> None:
    memory = str(compiler.driver("memory"))
    try:
        subprocess.run(["test", "-x", memory], check=True, **nobody)
    except subprocess.CalledProcessError:
        pytest.skip("other users cannot read the compiled programs")
    made = pool.ctl(
        "slice", "create", "--name", "own", "--compute", "5", "--memory", "256", **nobody
    )
    assert made.returncode == 0, made.stderr
    done = pool.ctl("run", "--slice", "own", "--", memory, "alloc", "300", "info", **nobody)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "alloc 300: 2"
    temporary = pool.ctl(
        "run", "--compute", "1", "--memory", "64", "--", memory, "alloc", "32", "touch", **nobody
    )
    assert (temporary.returncode, temporary.stdout) == (0, "alloc 32: 0\ntouched\nok\n")
    refused = pool.ctl("run", "--slice", "main", "--", memory, "info", **nobody)
    assert refused.returncode == 7, refused.stderr
    assert pool.ctl("session", "list", **nobody).stdout == "there are no sessions\n"


def test_a_run_waits_for_room(pool: Pool) -> None:
    size = ("--compute", "80", "--memory", "100")
    for number in range(2):
        pool.ctl("slice", "create", "--name", f"full-{number}", *size, "--gpu", str(number))
    done = pool.ctl("run", *size, "--", "true")
    assert done.returncode == 4
    waiting = pool.popen("run", *size, "--wait", "--", "echo", "it is my turn")
    assert waiting.stderr is not None
    assert "waiting, place 1: no GPU has room" in waiting.stderr.readline()
    pool.ctl("slice", "delete", "full-1", check=True)
    output, errors = waiting.communicate(timeout=60)
    assert (waiting.returncode, output) == (0, "it is my turn\n"), errors
