"""Keeps the broker's state that of the store, and the store's events and the book those of the
broker.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from gpupoold.conf import Settings
from gpupoold.errors import PoolError, StateError
from gpupoold.gpus import Driver
from gpupoold.leases import broker_pb2 as pb
from gpupoold.leases.broker import BrokerClient
from gpupoold.leases.desired import Desired
from gpupoold.leases.news import NewsWriter
from gpupoold.leases.runs import Runs
from gpupoold.leases.sessions import SessionBook
from gpupoold.store import Store

LOG = logging.getLogger(__name__)

#: how long a change waits for the broker; it is stored by then and pushed again later
SYNC_SECONDS = 5.0


class BrokerLink:
    """The broker as the pool uses it; listens to the client's thread.

    What the broker's news call takes no lock of the pool, so the pool may ask while it holds one.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        runs: Runs,
        driver: Driver,
        gpu_uuids: Callable[[], tuple[str, ...]],
        on_event: Callable[[], None],
    ) -> None:
        """gpu_uuids: the cards that are here. on_event: called after events were stored."""
        self._settings = settings
        self._store = store
        self._runs = runs
        self._gpu_uuids = gpu_uuids
        self._driver = driver
        self._on_event = on_event
        self.book = SessionBook()
        self._news = NewsWriter(store, on_event)
        self.client = BrokerClient(settings.broker_socket, self)
        self._dirty = threading.Event()
        self._stopping = False
        self.relay_address = ""  #: where relays of other hosts are waited for
        self._pusher = threading.Thread(target=self._push_when_dirty, name="pusher", daemon=True)

    @property
    def connected(self) -> bool:
        """Whether the broker has a pushed state on a connection that stands."""
        return self.client.connected

    @property
    def problem(self) -> str:
        """Why it is not connected."""
        return self.client.problem

    def start(self) -> None:
        """Begins to connect."""
        self._news.start()
        self.client.start()
        self._pusher.start()

    def stop(self) -> None:
        """Leaves the broker with what it has."""
        self._stopping = True
        self._dirty.set()
        self.client.stop()
        self._news.stop()

    def sync(self) -> None:
        """Pushes now if the broker is there, else as soon as it comes back."""
        try:
            self.client.push(SYNC_SECONDS)
        except PoolError as error:
            LOG.info("the broker gets generation %d later: %s", self._store.generation(), error)
            self._dirty.set()

    def sync_soon(self) -> None:
        """Pushes in another thread."""
        self._dirty.set()

    def refresh(self) -> None:
        """Asks the broker for the truth; without a broker, what was last known has to do."""
        try:
            self.client.query(2)
        except PoolError as error:
            LOG.debug("not refreshed: %s", error)

    def _push_when_dirty(self) -> None:
        while not self._stopping:
            self._dirty.wait()
            self._dirty.clear()
            while not self.client.wait_connected(1):
                if self._stopping:
                    return
            if self._stopping:
                return
            try:
                self.client.push()
            except (PoolError, StateError) as error:
                if self._stopping:  # the state is closed by now
                    return
                LOG.warning("the state was not pushed: %s", error)

    def desired(self) -> Desired:
        """The state to push (Listener)."""
        generation, slices, leases, runs = self._store.snapshot()
        return Desired(
            generation,
            self._settings,
            self._gpu_uuids(),
            {piece.id: piece for piece in slices},
            leases,
            runs,
            self._store.guests(),
            self._driver.version,
            self._store.borrowed(),
            self._store.lent(),
        )

    def broker_state(self, state: pb.State) -> None:
        """The truth about sessions and accounts (Listener)."""
        self.book.take_state(state)

    def broker_event(self, event: pb.Event) -> None:
        """Something happened (Listener). Stored elsewhere: the reading thread never waits."""
        self.book.take_event(event)
        self._news.inbox.put(event)

    def broker_applied(self, applied: pb.Applied) -> None:
        """A pushed state is in force (Listener)."""
        if applied.tcp_error:
            LOG.error("the broker does not listen on TCP: %s", applied.tcp_error)
        if applied.relay_error:
            LOG.error("relays of other hosts cannot come: %s", applied.relay_error)
        self.relay_address = applied.relay_address
        for refused in applied.refused:
            LOG.warning("the broker refused %s: %s", refused.id.hex(), refused.sentence)
        if self._runs.set_tcp_address(applied.tcp_address):
            leases = {lease.id: lease for lease in self._store.leases()}
            self._runs.rewrite(self._store.runs(), leases)

    def broker_connected(self, hello: pb.Hello, restarted: bool) -> None:
        """The connection stands (Listener)."""
        LOG.info("connected to the broker %s, pid %d", hello.version, hello.pid)
        if restarted:
            self.book.clear()
        self.tell("broker.connected", self._settings.host, f"broker of pid {hello.pid}")

    def broker_disconnected(self, why: str) -> None:
        """The connection is lost (Listener)."""
        self.book.clear()
        self.tell("broker.disconnected", self._settings.host, why)

    def tell(self, kind: str, subject: str, text: str) -> None:
        """Stores an event that belongs to no change; a disk that is full does not stop the work."""
        try:
            with self._store.change(new_generation=False) as change:
                change.event(kind, subject, text)
        except PoolError as error:
            LOG.error("an event was not stored: %s", error)
        self._on_event()
