"""Who waits for room."""

from __future__ import annotations

import os

import pytest

from gpupoold.errors import NoCapacity
from gpupoold.model import Caller
from gpupoold.programs import Waits
from gpupoold.slices.planning import Request
from gpupoold.slices.waiting import GONE_SECONDS, PLACES_MAX, WaitingLine

ME = Caller(os.getuid(), os.getpid(), False)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_priority_then_first_come() -> None:
    line = WaitingLine()
    assert line.ask("a", 1, 5) == 1
    assert line.ask("b", 1, 5) == 2
    assert line.ask("c", 2, 7) == 1
    assert [line.ask(name, 1, 5) for name in "ab"] == [2, 3]
    line.leave("c")
    assert [line.ask(name, 1, 5) for name in "ba"] == [2, 1]


def test_who_does_not_ask_has_gone() -> None:
    clock = Clock()
    line = WaitingLine(clock)
    line.ask("a", 1, 5)
    clock.now = GONE_SECONDS
    assert line.ask("b", 1, 5) == 2
    clock.now += 0.1
    assert line.ask("b", 1, 5) == 1
    # Who comes back is the last.
    assert line.ask("a", 1, 5) == 2


def test_one_user_does_not_fill_the_line() -> None:
    line = WaitingLine()
    for number in range(PLACES_MAX):
        line.ask(str(number), 1, 5)
    with pytest.raises(NoCapacity):
        line.ask("one more", 1, 5)
    assert line.ask("another user's", 2, 6) == 1
    # A ticket that somebody else has guessed is a new one.
    assert line.ask("another user's", 3, 5) == PLACES_MAX + 1


def test_programs_get_their_turn(host) -> None:
    programs = host.pool.programs

    def want(compute: int, priority: int = 5) -> Request:
        return Request("run", compute, 100, priority=priority)

    host.pool.create_slice(ME, Request("all-0", 100, 1, gpu="0"))
    host.pool.create_slice(ME, Request("all-1", 100, 1, gpu="1"))
    first = programs.wait(ME, want(10), "first", "first")
    assert isinstance(first, Waits) and first.place == 1 and "no GPU has room" in first.why
    second = programs.wait(ME, want(10, priority=9), "second", "second")
    assert isinstance(second, Waits) and second.place == 1
    assert programs.wait(ME, want(10), "first", "first") == Waits(2, "others wait for room, too")
    host.pool.delete_slice(ME, "all-0", force=False)
    # There is room, and it is not the first one's turn.
    assert isinstance(programs.wait(ME, want(10), "first", "first"), Waits)
    run, piece = programs.wait(ME, want(10, priority=9), "second", "second")
    assert piece.compute_percent == 10 and run.command == "second"
    run, piece = programs.wait(ME, want(10), "first", "first")
    assert run.command == "first"
