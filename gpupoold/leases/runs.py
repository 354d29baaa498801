"""Running programs: their lease files, and what happens when they end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from gpupoold.conf import Settings
from gpupoold.errors import InvalidRequest
from gpupoold.leases import files, processes
from gpupoold.model import Lease, ProcessIdentity, Run

LOG = logging.getLogger(__name__)


class Runs:
    """Lease files and processes of the runs; what they mean for slices is the pool's business."""

    def __init__(self, settings: Settings, on_end: Callable[[str], None]) -> None:
        """`on_end` gets a run's id when its process has ended."""
        self._settings = settings
        self._files = files.LeaseFiles(settings.lease_dir)
        self._watcher = processes.ProcessWatcher(on_end)
        self._tcp_address = ""

    def start(self) -> None:
        """Begins to watch; raises OSError if the directory cannot be made."""
        self._files.prepare()
        self._watcher.start()

    def stop(self) -> None:
        """Ends watching; the files stay for the programs that run."""
        self._watcher.stop()

    @staticmethod
    def identify(pid: int) -> ProcessIdentity:
        """The calling process; raises InvalidRequest if it is not visible here."""
        found = processes.identify(pid) if pid > 0 else None
        if found is None:
            raise InvalidRequest(
                "the calling process is not visible to gpupoold (is it in another PID namespace?)"
            )
        return found

    def file_of(self, run_id: str) -> str:
        """The path of a run's lease file."""
        return self._files.path(run_id)

    def resume(self, run: Run, lease: Lease) -> bool:
        """Writes the lease file and watches the process; False if it has ended."""
        self._write(run, lease)
        return self._watcher.watch(run.id, run.process)

    def _write(self, run: Run, lease: Lease) -> None:
        content = files.content(lease, self._settings.session_socket, self._tcp_address)
        self._files.write(run.id, run.uid, content)

    def remove_file(self, run_id: str) -> None:
        """Removes a run's lease file."""
        self._files.remove(run_id)

    def forget_strangers(self, run_ids: Sequence[str]) -> None:
        """Removes lease files of runs that are not known any more."""
        for name in self._files.remove_all_but(run_ids):
            LOG.info("removed the lease file %s of an earlier run", name)

    def set_tcp_address(self, address: str) -> bool:
        """Remembers where the broker listens; True if that changed."""
        changed = address != self._tcp_address
        self._tcp_address = address
        return changed

    def rewrite(self, runs: Sequence[Run], leases: Mapping[str, Lease]) -> None:
        """Writes all files again, with the carriers of now."""
        for run in runs:
            try:
                self._write(run, leases[run.lease_id])
            except OSError as error:
                LOG.error("the lease file %s cannot be written: %s", run.lease_file, error)
