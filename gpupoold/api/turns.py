"""Whose request is worked on next: users take turns, so that none can keep out the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gpupoold.model import Caller

T = TypeVar("T")


class Turns:
    """A number of threads, of which a user other than root may hold a quarter.

    All users other than root together hold at most three quarters. Whoever has no turn yet waits
    without a thread. Belongs to one event loop.
    """

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="request")
        self._share = max(1, threads // 4)
        self._others = asyncio.Semaphore(max(1, threads * 3 // 4))
        self._users: dict[int, tuple[asyncio.Semaphore, int]] = {}  # and how many use it

    async def take(self, caller: Caller, work: Callable[[], T]) -> T:
        """What `work` returns or raises. It runs to its end even if nobody waits any more."""
        if caller.is_admin:
            return await asyncio.shield(self._start(work))
        mine = self._enter(caller.uid)
        try:
            await mine.acquire()
        except BaseException:
            self._leave(caller.uid)
            raise
        try:
            await self._others.acquire()
        except BaseException:
            mine.release()
            self._leave(caller.uid)
            raise
        running = self._start(work)

        def over(done: asyncio.Future[T]) -> None:
            # Not before: whoever hangs up early would get more than a share otherwise.
            self._others.release()
            mine.release()
            self._leave(caller.uid)
            if not done.cancelled():
                done.exception()  # seen, even if nobody waits

        running.add_done_callback(over)
        return await asyncio.shield(running)

    def close(self) -> None:
        """Takes no more work."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _enter(self, uid: int) -> asyncio.Semaphore:
        semaphore, users = self._users.get(uid) or (asyncio.Semaphore(self._share), 0)
        self._users[uid] = (semaphore, users + 1)
        return semaphore

    def _leave(self, uid: int) -> None:
        semaphore, users = self._users[uid]
        if users == 1:
            del self._users[uid]
        else:
            self._users[uid] = (semaphore, users - 1)
