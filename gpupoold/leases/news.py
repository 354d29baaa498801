"""Turns the broker's news into stored events, in a thread of its own and many at a time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gpupoold.errors import PoolError, StateError
from gpupoold.leases import broker_pb2 as pb
from gpupoold.leases.inbox import CHURN_SECONDS, Churn, Inbox, News
from gpupoold.leases.sessions import session_of, text_of
from gpupoold.store import Store, Transaction

LOG = logging.getLogger(__name__)

#: between two transactions; a single event is stored at once
PAUSE_SECONDS = 0.1
#: leases that are gone by the time their last events are stored
REMEMBERED = 4096


@dataclass(frozen=True)
class _Known:
    owner_uid: int
    subject: str


#: of a lease that nobody knows: for root alone
_UNKNOWN = _Known(0, "")


class NewsWriter:
    """Stores what was put into its inbox."""

    def __init__(self, store: Store, on_stored: Callable[[], None]) -> None:
        """on_stored: called after events were stored."""
        self.inbox = Inbox()
        self._store = store
        self._on_stored = on_stored
        self._leases: dict[str, _Known] = {}
        self._thread = threading.Thread(target=self._run, name="news", daemon=True)

    def start(self) -> None:
        """Begins to store."""
        self._thread.start()

    def stop(self) -> None:
        """Stores what is there and ends."""
        self.inbox.close()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def _run(self) -> None:
        while (news := self.inbox.take()) is not None:
            try:
                if self.record(news):
                    self._on_stored()
            except (PoolError, StateError) as error:
                LOG.error(
                    "%d events were not stored: %s", len(news.events) + len(news.churns), error
                )
            except Exception:
                LOG.exception("events were not stored")
            time.sleep(PAUSE_SECONDS)

    def record(self, news: News) -> bool:
        """Stores all in one transaction; False if none of it is for people."""
        if news.lost:
            LOG.error("%d events of the broker were too many to keep", news.lost)
        present = self._look_up()
        with self._store.change(new_generation=False) as change:
            for event in news.events:
                self._put(change, event, present)
            for churn in news.churns:
                self._put_churn(change, churn)
            return bool(change.events)

    def _look_up(self) -> set[str]:
        """The leases of now; remembers whose they are for events that come after their end."""
        _, slices, leases, _ = self._store.snapshot()
        names = {piece.id: piece.name for piece in slices}
        for lease in leases:
            self._leases.pop(lease.id, None)  # to the end, as the one seen last
            self._leases[lease.id] = _Known(
                lease.owner_uid, ",".join(names.get(entry, "?") for entry in lease.slice_ids)
            )
        for gone in list(self._leases)[: -max(REMEMBERED, len(leases))]:
            del self._leases[gone]
        return {lease.id for lease in leases}

    def _put(self, change: Transaction, event: pb.Event, present: Iterable[str]) -> None:
        what = event.WhichOneof("what")
        at = event.unix_ns / 1e9 if event.unix_ns else None
        if what == "device_probed":
            device = event.device_probed.device
            if not device.ready:
                text = f"the broker cannot use it: {device.sentence}"
                change.event("gpu.not_ready", device.uuid, text, at=at)
        elif what == "session_opened":
            session = session_of(event.session_opened.session)
            known = self._leases.get(session.lease_id, _UNKNOWN)
            change.event(
                "session.started",
                known.subject,
                f"{session.program or 'a program'} (process {session.pid}, {session.carrier})",
                owner_uid=known.owner_uid,
                at=at,
                session=session.id,
                pid=session.pid,
                lease=session.lease_id,
            )
        elif what == "session_ended":
            lease_id = text_of(event.session_ended.lease)
            known = self._leases.get(lease_id, _UNKNOWN)
            change.event(
                "session.ended",
                known.subject,
                event.session_ended.why,
                owner_uid=known.owner_uid,
                at=at,
                session=text_of(event.session_ended.session),
                lease=lease_id,
            )
        elif what == "worker_ended":
            known = self._leases.get(text_of(event.worker_ended.lease), _UNKNOWN)
            change.event(
                "worker.failed",
                known.subject,
                event.worker_ended.why,
                owner_uid=known.owner_uid,
                at=at,
                session=text_of(event.worker_ended.session),
                pid=event.worker_ended.pid,
            )
        elif what == "lease_ended":
            lease_id = text_of(event.lease_ended.lease)
            if lease_id not in present:
                return  # the end of its process was seen here first and told as run.ended
            known = self._leases[lease_id]
            change.event(
                "lease.ended",
                known.subject,
                event.lease_ended.why,
                owner_uid=known.owner_uid,
                at=at,
                lease=lease_id,
            )

    def _put_churn(self, change: Transaction, churn: Churn) -> None:
        lease_id = text_of(churn.lease)
        known = self._leases.get(lease_id, _UNKNOWN)
        text = (
            f"{churn.opened} more sessions opened and {churn.ended} ended within "
            f"{CHURN_SECONDS:.0f} s, too many to be told one by one"
        )
        if churn.failed:
            text += f"; {churn.failed} workers failed"
        LOG.warning("lease %s of user %d: %s", lease_id, known.owner_uid, text)
        change.event(
            "session.churn",
            known.subject,
            text,
            owner_uid=known.owner_uid,
            lease=lease_id,
            opened=churn.opened,
            ended=churn.ended,
            failed=churn.failed,
        )
