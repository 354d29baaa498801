"""Knows processes for good, and tells when one has ended."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable
from pathlib import Path

from gpupoold.model import ProcessIdentity

LOG = logging.getLogger(__name__)


def boot_id() -> str:
    """Identifies this boot of the host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def identify(pid: int) -> ProcessIdentity | None:
    """The identity of a process that runs now; None if there is none (or only its zombie)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name may hold blanks and parentheses
    if fields[0] in "ZXx":
        return None
    return ProcessIdentity(pid, int(fields[19]), boot_id())


def owner_of(pid: int) -> int | None:
    """The user of a process; None if there is none."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def is_running(identity: ProcessIdentity) -> bool:
    """Whether this very process still runs."""
    return identify(identity.pid) == identity


class ProcessWatcher:
    """Calls back, in a thread of its own, when a watched process has ended."""

    def __init__(self, on_end: Callable[[str], None]) -> None:
        """`on_end` gets the key that the process was watched under."""
        self._on_end = on_end
        self._lock = threading.Lock()
        self._keys: dict[int, str] = {}  # pidfd -> key
        self._poll = select.epoll()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poll.register(self._wake_read, select.EPOLLIN)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="processes", daemon=True)

    def start(self) -> None:
        """Begins to call back."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; no callback comes afterwards."""
        self._stopping = True
        os.write(self._wake_write, b"x")
        self._thread.join()
        with self._lock:
            for fd in self._keys:
                os.close(fd)
            self._keys.clear()
        self._poll.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def watch(self, key: str, identity: ProcessIdentity) -> bool:
        """Watches a process; False if it has ended already (then there is no callback)."""
        try:
            fd = os.pidfd_open(identity.pid)
        except OSError:
            return False
        # The descriptor is held, so the pid cannot be given out again: now the check holds.
        if not is_running(identity):
            os.close(fd)
            return False
        with self._lock:
            self._keys[fd] = key
        self._poll.register(fd, select.EPOLLIN)
        return True

    def _run(self) -> None:
        while not self._stopping:
            for fd, _ in self._poll.poll():
                if fd == self._wake_read:
                    continue
                with self._lock:
                    key = self._keys.pop(fd, None)
                self._poll.unregister(fd)
                os.close(fd)
                if key is None or self._stopping:
                    continue
                try:
                    self._on_end(key)
                except Exception:
                    LOG.exception("the end of process %s was not handled", key)
