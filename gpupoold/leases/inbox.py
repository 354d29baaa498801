"""Holds the broker's events between the thread that reads them and the one that stores them.

Who reads must never wait: the broker closes a connection that is not read. A tenant decides how
many sessions it opens and closes, so beyond a rate those of one lease are counted instead of kept.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gpupoold.leases import broker_pb2 as pb

#: events of one lease that are kept one by one: at once, and a second for longer
BURST = 512
RATE = 5.0
#: events that wait to be stored; beyond, those that can be counted are
KEPT_MAX = 8192
#: one count covers this long
CHURN_SECONDS = 10.0

#: those that a tenant causes as often as it likes
_COUNTED = ("session_opened", "session_ended", "worker_ended")
#: nothing that is stored
_PASSING = (None, "slice_usage", "worker_started")


@dataclass
class Churn:
    """The events of one lease that were only counted."""

    lease: bytes
    began: float
    opened: int = 0
    ended: int = 0
    failed: int = 0


@dataclass
class News:
    """What is to be stored."""

    events: list[pb.Event] = field(default_factory=list)
    churns: list[Churn] = field(default_factory=list)
    lost: int = 0

    def __bool__(self) -> bool:
        return bool(self.events or self.churns or self.lost)


@dataclass
class _Allowance:
    left: float
    at: float


class Inbox:
    """Thread-safe. `put` takes bounded time and memory whatever comes."""

    def __init__(
        self,
        burst: int = BURST,
        rate: float = RATE,
        kept_max: int = KEPT_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._burst = burst
        self._rate = rate
        self._kept_max = kept_max
        self._clock = clock
        self._changed = threading.Condition()
        self._news = News()
        self._churns: dict[bytes, Churn] = {}
        self._allowances: dict[bytes, _Allowance] = {}
        self._closed = False

    def put(self, event: pb.Event) -> None:
        """Keeps or counts an event."""
        what = event.WhichOneof("what")
        if what in _PASSING or (what == "worker_ended" and event.worker_ended.expected):
            return
        with self._changed:
            kept = self._news.events
            if what in _COUNTED:
                lease = (
                    event.session_opened.session.lease
                    if what == "session_opened"
                    else getattr(event, what).lease
                )
                if len(kept) >= self._kept_max or not self._allow(lease):
                    self._count(lease, what)
                    return
            elif len(kept) >= 2 * self._kept_max:
                self._news.lost += 1
                return
            kept.append(event)
            if len(kept) == 1:
                self._changed.notify()

    def _allow(self, lease: bytes) -> bool:
        now = self._clock()
        allowance = self._allowances.get(lease)
        if allowance is None:
            allowance = self._allowances[lease] = _Allowance(self._burst, now)
        allowance.left = min(self._burst, allowance.left + (now - allowance.at) * self._rate)
        allowance.at = now
        if allowance.left < 1:
            return False
        allowance.left -= 1
        return True

    def _count(self, lease: bytes, what: str) -> None:
        churn = self._churns.get(lease)
        if churn is None:
            churn = self._churns[lease] = Churn(lease, self._clock())
            self._changed.notify()
        if what == "session_opened":
            churn.opened += 1
        elif what == "session_ended":
            churn.ended += 1
        else:
            churn.failed += 1

    def take(self) -> News | None:
        """Waits for news and takes all there are; None: closed and empty."""
        with self._changed:
            while True:
                news = self._take_due()
                if news or self._closed:
                    return news or None
                due = [churn.began + CHURN_SECONDS for churn in self._churns.values()]
                # Not less than a moment, should the clock stand still.
                self._changed.wait(max(0.01, min(due) - self._clock()) if due else None)

    def _take_due(self) -> News:
        now = self._clock()
        news, self._news = self._news, News()
        news.churns = [
            churn
            for churn in self._churns.values()
            if self._closed or now - churn.began >= CHURN_SECONDS
        ]
        for churn in news.churns:
            del self._churns[churn.lease]
        # An allowance that is whole again is as good as none.
        rest = self._burst / self._rate
        self._allowances = {
            lease: entry for lease, entry in self._allowances.items() if now - entry.at < rest
        }
        return news

    def close(self) -> None:
        """What is there can still be taken; nobody waits any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
