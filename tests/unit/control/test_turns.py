"""How users share the threads that answer."""

from __future__ import annotations

import asyncio
import threading

import pytest

from gpupoold.api.turns import Turns
from gpupoold.model import Caller

ROOT = Caller(0, 1, True)


def user(uid: int) -> Caller:
    return Caller(uid, 1, False)


class Gate:
    """Work that goes on until it is opened, and counts who is in it."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.inside = 0

    def work(self) -> None:
        self.inside += 1
        assert self.opened.wait(10)


async def settled(gate: Gate, count: int) -> None:
    for _ in range(500):
        if gate.inside == count:
            break
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)  # nobody else comes in
    assert gate.inside == count


def test_one_user_holds_a_quarter_all_users_three_and_root_the_rest():
    async def scenario() -> None:
        turns, gate = Turns(8), Gate()
        first = [asyncio.ensure_future(turns.take(user(1), gate.work)) for _ in range(20)]
        await settled(gate, 2)
        others = [
            asyncio.ensure_future(turns.take(user(uid), gate.work))
            for uid in range(2, 12)
            for _ in range(3)
        ]
        await settled(gate, 6)
        assert await asyncio.wait_for(turns.take(ROOT, lambda: 7), 5) == 7
        gate.opened.set()
        await asyncio.wait_for(asyncio.gather(*first, *others), 10)
        assert gate.inside == 50
        assert not turns._users
        turns.close()

    asyncio.run(scenario())


def test_hanging_up_gives_no_second_turn():
    async def scenario() -> None:
        turns, gate = Turns(8), Gate()
        for _ in range(10):
            task = asyncio.ensure_future(turns.take(user(1), gate.work))
            await asyncio.sleep(0.02)
            task.cancel()
        await settled(gate, 2)
        gate.opened.set()
        assert await asyncio.wait_for(turns.take(user(1), lambda: 3), 5) == 3
        assert gate.inside == 2  # those who hung up in the queue were not worked for
        turns.close()

    asyncio.run(scenario())


def test_an_error_of_the_work_is_the_callers():
    async def scenario() -> None:
        turns = Turns(2)
        with pytest.raises(ZeroDivisionError):
            await turns.take(user(1), lambda: 1 // 0)
        assert await turns.take(user(1), lambda: 4) == 4
        turns.close()

    asyncio.run(scenario())
