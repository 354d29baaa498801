"""Keeps the CDI specifications those of the slices: one file for each slice made by hand."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import threading
import uuid
from collections.abc import Iterable

from gpupoold import paths
from gpupoold.conf import Settings
from gpupoold.guests import cdi
from gpupoold.model import LeaseKind, Slice
from gpupoold.pool import Pool
from gpupoold.slices.planning import is_reserved

LOG = logging.getLogger(__name__)

#: seconds between two looks at files that others may have removed
INTERVAL = 30.0
#: the same while something is wrong: a broker that starts puts its directories right
RETRY = 3.0
#: where runtimes look; an earlier configuration may have written there
WELL_KNOWN = ("/etc/cdi", "/var/run/cdi")


class SpecFiles:
    """The specifications of one gpupoold in a directory that it shares with others."""

    def __init__(self, directory: str, state_dir: str) -> None:
        self.directory = directory
        # Two gpupoolds may share the directory: each knows its own files by their names.
        tag = hashlib.sha256(os.fsencode(state_dir)).hexdigest()[:12]
        self._prefix = f"gpupool-slice-{tag}-"
        own = re.escape(self._prefix)
        self._own = re.compile(rf"{own}[0-9a-f-]+\.json|\.{own}[0-9a-f-]+\.[0-9a-f]+\.new")

    def name(self, piece: Slice) -> str:
        """The name of the slice's file."""
        return f"{self._prefix}{piece.id}.json"

    def put(self, wanted: dict[str, str]) -> list[str]:
        """Makes own files exactly these (name: text); the names that changed. Raises OSError."""
        if wanted:
            os.makedirs(self.directory, mode=0o755, exist_ok=True)
        changed = self.remove_all_but(wanted)
        for name, text in wanted.items():
            if self._read(name) != text:
                self._write(name, text)
                changed.append(name)
        return changed

    def remove_all_but(self, keep: Iterable[str]) -> list[str]:
        """Removes own files of other names, and what an earlier end left half written."""
        keep = set(keep)
        try:
            names = os.listdir(self.directory)
        except (FileNotFoundError, NotADirectoryError):
            return []
        removed = []
        for name in names:
            if name not in keep and self._own.fullmatch(name):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(self.directory, name))
                removed.append(name)
        return removed

    def _read(self, name: str) -> str | None:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            with open(os.open(os.path.join(self.directory, name), flags), encoding="utf-8") as file:
                return file.read()
        except (OSError, UnicodeDecodeError):
            return None

    def _write(self, name: str, text: str) -> None:
        # A name that runtimes do not read, then one step.
        fresh = os.path.join(
            self.directory, f".{name.removesuffix('.json')}.{uuid.uuid4().hex}.new"
        )
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(fresh, flags, 0o600)
        try:
            with open(fd, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fchmod(fd, 0o644)
                os.fsync(fd)
            os.rename(fresh, os.path.join(self.directory, name))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(fresh)
            raise


class Containers:
    """Follows the pool's changes; safe to use from several threads."""

    def __init__(self, settings: Settings, pool: Pool) -> None:
        self._settings = settings
        self._pool = pool
        self._files = SpecFiles(settings.cdi_dir, settings.state_dir)
        self._lock = threading.Lock()
        self._said = ""
        self._unnamed: set[str] = set()  # slices whose names were said not to be offered
        self._changed = threading.Event()
        self._wake = self._changed.set
        self._stopping = False
        self._thread = threading.Thread(target=self._follow, name="containers", daemon=True)

    def start(self) -> None:
        """Puts in order what an earlier end left, and goes to work."""
        clean_up(self._settings)
        self.sync()
        # What a change brings is there when the change is answered; the rest soon after.
        self._pool.after_slices_change.append(self.sync)
        self._pool.listen(self._wake)
        self._thread.start()

    def stop(self) -> None:
        """Stops following; the files stay, as containers go on and new ones may start."""
        self._stopping = True
        self._pool.unlisten(self._wake)
        self._wake()
        self._thread.join(timeout=5)

    def sync(self) -> None:
        """Makes the files those of the slices of now."""
        with self._lock:
            problem = ""
            try:
                wanted, problem = self._wanted()
                for name in self._files.put(wanted):
                    LOG.debug("CDI specification %s changed", name)
            except OSError as error:
                problem = self._sentence(error)
            if problem and problem != self._said:
                LOG.warning("containers get no slices: %s", problem)
                self._pool.broker.tell("containers.failed", self._settings.host, problem)
            self._said = problem

    def _sentence(self, error: OSError) -> str:
        return f"{error.filename or self._files.directory}: {error.strerror or error}"

    def _wanted(self) -> tuple[dict[str, str], str]:
        """The files, and why a slice has none."""
        libraries = client_libraries()
        _, slices, leases, _ = self._pool.store.snapshot()
        owned = {
            slice_id
            for lease in leases
            if lease.kind == LeaseKind.OWNER
            for slice_id in lease.slice_ids
        }
        if owned and not libraries:
            raise FileNotFoundError(2, "the client library is missing", paths.client_directory())
        reserved = {piece.id for piece in slices if is_reserved(piece.name)}
        for slice_id in reserved - self._unnamed:
            LOG.warning(
                "slice %s is no device under its name, which has the form of a UUID", slice_id
            )
        self._unnamed = reserved
        wanted, problem = {}, ""
        for piece in slices:
            if piece.id not in owned:
                continue
            directory = self._settings.slice_socket_directory(piece.virtual_uuid)
            try:
                cdi.check_directory(self._settings.run_dir, directory)
            except OSError as error:
                problem = problem or self._sentence(error)
                continue
            wanted[self._files.name(piece)] = cdi.text_of(
                cdi.specification(
                    piece, directory, libraries, self._settings.container_library_dirs
                )
            )
        return wanted, problem

    def _follow(self) -> None:
        while not self._stopping:
            self._changed.wait(RETRY if self._said else INTERVAL)
            self._changed.clear()
            if not self._stopping:
                try:
                    self.sync()
                except Exception:
                    LOG.exception("the CDI specifications were not looked at")


def client_libraries() -> list[tuple[str, str]]:
    """(file of this host, name in a container) of each client library that there is."""
    directory = paths.client_directory()
    found = []
    for file in ("libcuda.so.1", "libnvidia-ml.so.1"):
        path = directory / file
        if path.is_file():
            # Linkers, Numba and others look for the name without a version: the same file.
            names = (file, file.removesuffix(".1"))
            found += [(str(path.resolve()), name) for name in names]
    return found


def clean_up(settings: Settings) -> None:
    """Removes what an earlier configuration of this gpupoold wrote elsewhere."""
    current = os.path.realpath(settings.cdi_dir) if settings.cdi_dir else ""
    for directory in WELL_KNOWN:
        if os.path.realpath(directory) == current:
            continue
        try:
            removed = SpecFiles(directory, settings.state_dir).remove_all_but(())
        except OSError as error:
            LOG.warning("old CDI specifications stay in %s: %s", directory, error)
            continue
        for name in removed:
            LOG.info("removed the CDI specification %s/%s", directory, name)
