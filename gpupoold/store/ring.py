"""Which events are kept: the latest, and nobody's at the cost of those who have fewer.

There is room for so many in all. Where one more does not fit, whoever has most loses the oldest. So
a user who makes events without end pushes out the own ones, and others lose none as long as they
have less than an equal share. What belongs to nobody (cards, the broker) counts as one more user,
and a user's programs are counted apart from the user's slices, which tell more and change rarely.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

Key = tuple[int | None, bool]

#: kinds of events that come and go with programs begin so
_OF_PROGRAMS = ("run.", "session.", "worker.", "lease.")


def _key(kind: str, owner_uid: int | None) -> Key:
    return owner_uid, owner_uid is not None and kind.startswith(_OF_PROGRAMS)


class EventRing:
    """The numbers of the stored events by whose they are."""

    def __init__(self, limit: int, events: Iterable[tuple[int, str, int | None]]) -> None:
        """events: (id, kind, owner) of those there are, oldest first."""
        self._limit = limit
        self._ids: dict[Key, deque[int]] = {}
        self._total = 0
        for event_id, kind, owner_uid in events:
            self.add(event_id, kind, owner_uid)

    def add(self, event_id: int, kind: str, owner_uid: int | None) -> None:
        """One more event, later than all others."""
        self._ids.setdefault(_key(kind, owner_uid), deque()).append(event_id)
        self._total += 1

    def take_excess(self) -> list[int]:
        """The events that have no room."""
        gone = []
        while self._total > self._limit:
            # Of those who have the same number, who has the oldest one.
            key = max(self._ids, key=lambda key: (len(self._ids[key]), -self._ids[key][0]))
            gone.append(self._ids[key].popleft())
            self._total -= 1
            if not self._ids[key]:
                del self._ids[key]
        return gone
