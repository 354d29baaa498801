"""The limits of a context (cuCtxSetLimit) hold; what they set aside is of the slice's memory."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tests.functional.pool import Pool
from tests.programs.catalog import Program
from tests.programs.toolchain import Compiler

MIB = 1 << 20
OUT_OF_MEMORY = 2


@pytest.fixture
def memory(compiler: Compiler) -> str:
    return str(compiler.driver("memory"))


@pytest.mark.parametrize("limit", ["heap", "output"])
def test_what_a_limit_sets_aside_is_the_slices(pool: Pool, memory: str, limit: str) -> None:
    """The slice has 4096 MiB; the driver's own heap of 8 MiB is the context's."""
    commands = f"info {limit} 100000 {limit} 3000 info alloc 1200 alloc 1000 free {limit} 4080"
    done = pool.run("main", [memory, *f"{commands} {limit} 1 info alloc 4000".split()])
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    free = [int(line.split()[1]) for line in lines if line.startswith("free")]
    assert [line for line in lines if not line.startswith("free")] == [
        f"{limit} 100000: {OUT_OF_MEMORY}",
        f"{limit} 3000: 0",
        f"alloc 1200: {OUT_OF_MEMORY}",
        "alloc 1000: 0",
        f"{limit} 4080: 0",
        f"{limit} 1: 0",
        "alloc 4000: 0",
        "ok",
    ]
    assert 2990 * MIB <= free[0] - free[1] <= 3000 * MIB
    assert free[2] == free[0]
    # What ended without giving it back has given it back.
    done = pool.run("main", [memory, "heap", "3000", "end"])
    assert done.returncode == 0, done.stderr
    done = pool.run("main", [memory, "alloc", "4000"])
    assert done.stdout == "alloc 4000: 0\nok\n", done.stdout + done.stderr


def test_sessions_of_a_slice_share_it(pool: Pool, memory: str) -> None:
    with pool.started("main", [memory, "heap", "3000", "wait"]) as first:
        assert first.stdout is not None and first.stdin is not None
        assert first.stdout.readline() == "heap 3000: 0\n"
        assert first.stdout.readline() == "waiting\n"
        second = pool.run("main", [memory, "alloc", "1500", "heap", "1500", "alloc", "500"])
        assert second.stdout.splitlines() == [
            f"alloc 1500: {OUT_OF_MEMORY}",
            f"heap 1500: {OUT_OF_MEMORY}",
            "alloc 500: 0",
            "ok",
        ], second.stderr
        first.stdin.write("\n")
        first.stdin.flush()
        assert first.wait(30) == 0


def test_the_newest_output_is_kept(pool: Pool, compiler: Compiler) -> None:
    """Of 2000 lines, more than printf's buffer holds: whole ones, in order, and the last one."""
    program = Program("limits", "cuda", output=None)
    for done in (
        pool.direct(program.command(compiler)),
        pool.run("main", program.command(compiler)),
    ):
        assert program.problem(done.returncode, done.stdout) is None, done.stdout + done.stderr
        *lines, last = done.stdout.splitlines()
        assert last == "ok"
        numbers = []
        for line in lines:
            match = re.fullmatch(r"line (\d+) of the output of one kernel", line)
            assert match, line
            numbers.append(int(match[1]))
        assert 100 < len(numbers) < 1000
        assert numbers == list(range(2000 - len(numbers), 2000))


def test_much_output_arrives(pool: Pool, compiler: Compiler) -> None:
    """40 MiB in two goes, of which each is more than pipes and buffers on the way hold."""
    program = Program("flood", "cuda", output=None)
    done = pool.run("main", program.command(compiler), timeout=200)
    assert program.problem(done.returncode, done.stdout[-200:]) is None, done.stderr
    lines = done.stdout.splitlines()
    expected = Counter(
        f"thread {thread} of block {block}: line {line}"
        for thread in range(32)
        for block in range(32)
        for line in range(600)
    )
    got = Counter(lines)
    assert sum(got.values()) == 2 * 32 * 32 * 600 + 2
    assert got == expected + expected + Counter(["thread 0 of block 0: line 0", "ok"])
