"""Who waits for room: by priority, then first come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from gpupoold.errors import NoCapacity

#: who has not asked for so long has gone
GONE_SECONDS = 10.0
#: places of one user other than root
PLACES_MAX = 64


@dataclass
class _Place:
    uid: int
    priority: int
    number: int
    asked_at: float


class WaitingLine:
    """Thread-safe. Whoever waits asks again and again; nobody is kept who does not."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._places: dict[str, _Place] = {}
        self._next = 0

    def ask(self, ticket: str, uid: int, priority: int) -> int:
        """The place of a ticket, 1: it is its turn. A new one is put at the end of its priority.

        Raises NoCapacity if the user has the most places there are for one.
        """
        now = self._clock()
        with self._lock:
            self._places = {
                key: place
                for key, place in self._places.items()
                if now - place.asked_at <= GONE_SECONDS
            }
            place = self._places.get(ticket)
            if place is None or place.uid != uid:
                if uid != 0 and sum(p.uid == uid for p in self._places.values()) >= PLACES_MAX:
                    raise NoCapacity(f"a user may wait with {PLACES_MAX} programs at once")
                self._next += 1
                place = self._places[ticket] = _Place(uid, priority, self._next, now)
            place.asked_at = now
            place.priority = priority
            return 1 + sum(
                (-other.priority, other.number) < (-place.priority, place.number)
                for other in self._places.values()
            )

    def leave(self, ticket: str) -> None:
        """It has got what it waited for, or does not want it any more."""
        with self._lock:
            self._places.pop(ticket, None)
