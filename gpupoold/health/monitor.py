"""A thread that asks the driver how each card is doing and reports changes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from gpupoold.gpus import Driver, HealthReport

LOG = logging.getLogger(__name__)


class HealthMonitor:
    """Calls `on_report` with each card's report every `interval` seconds."""

    def __init__(
        self,
        driver: Driver,
        uuids: list[str],
        interval: float,
        on_report: Callable[[str, HealthReport], None],
    ) -> None:
        self._driver = driver
        self._uuids = uuids
        self._interval = interval
        self._on_report = on_report
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)

    def look(self) -> None:
        """One look at all cards."""
        for uuid in self._uuids:
            self._on_report(uuid, self._driver.health(uuid))

    def start(self) -> None:
        """Begins to look; the first look was the caller's."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            try:
                self.look()
            except Exception:
                LOG.exception("the cards' health could not be looked at")
