"""The memory of a slice: shown, enforced at the call, shared by its sessions, given back."""

from __future__ import annotations

import os
import signal

import pytest

from tests.functional.pool import Pool, wait_for
from tests.programs.toolchain import Compiler

MIB = 1 << 20
OUT_OF_MEMORY = 2


@pytest.fixture
def memory(compiler: Compiler) -> str:
    return str(compiler.driver("memory"))


def test_the_slice_is_what_cuda_sees(pool: Pool, memory: str) -> None:
    done = pool.run("main", [memory, "info"])
    assert done.returncode == 0, done.stdout + done.stderr
    words = done.stdout.split()
    assert int(words[3]) == 4096 * MIB  # total
    assert 0 < int(words[1]) <= 4096 * MIB  # free


def test_one_mib_too_many_is_refused_at_the_call(pool: Pool, memory: str) -> None:
    done = pool.run(
        "main",
        [
            memory,
            "alloc",
            "4097",
            "alloc",
            "2048",
            "touch",
            "alloc",
            "2049",
            "alloc",
            "1024",
            "touch",
            "free",
            "alloc",
            "1024",
            "touch",
            "info",
        ],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[:7] == [
        f"alloc 4097: {OUT_OF_MEMORY}",
        "alloc 2048: 0",
        "touched",
        f"alloc 2049: {OUT_OF_MEMORY}",
        "alloc 1024: 0",
        "touched",
        "alloc 1024: 0",
    ]
    free = int(lines[8].split()[1])
    assert free <= 1024 * MIB


def test_two_sessions_share_it(pool: Pool, memory: str) -> None:
    with pool.started("main", [memory, "alloc", "3000", "wait", "free", "wait"]) as first:
        assert first.stdout is not None and first.stdin is not None
        assert first.stdout.readline() == "alloc 3000: 0\n"
        assert first.stdout.readline() == "waiting\n"
        second = pool.run("main", [memory, "alloc", "2000", "alloc", "1000", "touch"])
        assert second.stdout.splitlines()[:3] == [
            f"alloc 2000: {OUT_OF_MEMORY}",
            "alloc 1000: 0",
            "touched",
        ], second.stderr
        assert 3000 <= pool.used_mib("main") <= 4096
        first.stdin.write("\n")
        first.stdin.flush()
        assert first.stdout.readline() == "waiting\n"
        third = pool.run("main", [memory, "alloc", "3000"])
        assert third.stdout.splitlines()[0] == "alloc 3000: 0", third.stderr


def test_a_running_program_uses_what_its_slice_grew_by(pool: Pool, memory: str) -> None:
    resize = ("slice", "resize", "main", "--memory")
    with pool.started("main", [memory, "wait", "alloc", "6000", "info", "wait", "end"]) as program:
        assert program.stdout is not None and program.stdin is not None
        assert program.stdout.readline() == "waiting\n"
        pool.ctl(*resize, "8192", check=True)
        program.stdin.write("\n")
        program.stdin.flush()
        assert program.stdout.readline() == "alloc 6000: 0\n"
        assert program.stdout.readline().split()[3] == str(8192 * MIB)
        assert program.stdout.readline() == "waiting\n"
        assert pool.ctl(*resize, "4096").returncode == 5  # it is in use
    pool.ctl(*resize, "4096", check=True)


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_all_is_free_a_second_after_the_end(pool: Pool, memory: str, end: str) -> None:
    with pool.started(
        "main", [memory, "alloc", "2048", "touch", "alloc", "1024", "wait", "end"]
    ) as program:
        assert program.stdout is not None and program.stdin is not None
        lines = [program.stdout.readline() for _ in range(4)]
        assert lines[3] == "waiting\n", lines
        wait_for("the charge to be shown", lambda: pool.used_mib("main") >= 3072, 5)
        if end == "exit":
            program.stdin.write("\n")
            program.stdin.flush()
        else:
            for pid in descendants(program.pid):
                os.kill(pid, signal.SIGKILL)
        program.wait(timeout=30)
        # The promise is one second; gpupoolctl itself takes most of one on a busy machine.
        wait_for("the memory to be free", lambda: pool.used_mib("main") == 0, 5)
        done = pool.run("main", [memory, "alloc", "3500", "touch"])
        assert done.stdout.splitlines()[:2] == ["alloc 3500: 0", "touched"], done.stderr


def test_kill_and_start_again_many_times(pool: Pool, memory: str) -> None:
    """Accounts do not drift: never below zero, and zero in the end."""
    for _ in range(5):
        with pool.started("main", [memory, "alloc", "3000", "wait"]) as program:
            assert program.stdout is not None
            assert program.stdout.readline() == "alloc 3000: 0\n"
            assert program.stdout.readline() == "waiting\n"
            for pid in descendants(program.pid):
                os.kill(pid, signal.SIGKILL)
            program.wait(timeout=30)
        wait_for("the memory to be free", lambda: pool.used_mib("main") == 0, 5)
    assert pool.used_mib("main") == 0


def test_small_allocations_are_charged_as_what_they_take(pool: Pool, memory: str) -> None:
    """Memory is handed out in pieces of 2 MiB; small allocations share them."""
    done = pool.run("main", [memory, *["alloc", "1"] * 300, "info"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": 0\n") == 300
    free = int(done.stdout.splitlines()[300].split()[1])
    assert (4096 - 300 - 64) * MIB <= free <= (4096 - 300) * MIB


def test_memory_pools_count(pool: Pool, compiler: Compiler) -> None:
    """What a pool keeps is charged like any memory; it is given up where it would be in the way."""
    pools = str(compiler.driver("pools"))
    script = """alloc 3000 free alloc 3000 alloc 1000 alloc 200 free free plain 4000
        keep alloc 3500 free sync plain 4000 alloc 3500 plain 1000"""
    done = pool.run("main", [pools, "quota", *script.split()])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        "alloc 3000: 0",
        "alloc 3000: 0",  # the same memory again
        "alloc 1000: 0",
        f"alloc 200: {OUT_OF_MEMORY}",
        "plain 4000: 0",
        "alloc 3500: 0",
        "plain 4000: 0",  # though the pool was told to keep everything
        "alloc 3500: 0",
        f"plain 1000: {OUT_OF_MEMORY}",
        "ok",
    ]
    wait_for("the memory to be free", lambda: pool.used_mib("main") == 0, 5)


def descendants(pid: int) -> list[int]:
    """The process and all below it, the deepest first."""
    found = [pid]
    for parent in found:
        try:
            with open(f"/proc/{parent}/task/{parent}/children", encoding="ascii") as children:
                found += [int(child) for child in children.read().split()]
        except OSError:
            continue
    return found[::-1]
