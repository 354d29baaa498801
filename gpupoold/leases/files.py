"""Lease files: what a program needs to reach its slices, readable by its user alone."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterable
from typing import Any

from gpupoold.access import let_read
from gpupoold.directories import own_directory
from gpupoold.model import Lease

SUFFIX = ".json"


def content(lease: Lease, session_socket: str, tcp_address: str) -> dict[str, Any]:
    """The JSON of a lease file; `tcp_address` is HOST:PORT or empty."""
    carriers: list[dict[str, Any]] = [{"kind": "unix", "path": session_socket}]
    if tcp_address:
        host, _, port = tcp_address.rpartition(":")
        carriers.append({"kind": "tcp", "host": host.strip("[]"), "port": int(port)})
    return {"version": 1, "lease": lease.id, "key": lease.key.hex(), "carriers": carriers}


class LeaseFiles:
    """The directory of lease files. Only gpupoold can make or remove a name in it."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def prepare(self) -> None:
        """Makes the directory; others may pass through it to a file they know."""
        own_directory(self.directory, 0o711)

    def path(self, run_id: str) -> str:
        """Where the file of a run is."""
        return os.path.join(self.directory, run_id + SUFFIX)

    def write(self, run_id: str, uid: int, text: dict[str, Any]) -> str:
        """Writes the file for user `uid` in one step and returns its path; raises OSError."""
        path = self.path(run_id)
        temporary = f"{path}.{uuid.uuid4().hex}"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "w") as stream:
                json.dump(text, stream)
                stream.write("\n")
                stream.flush()
                if uid != os.geteuid():
                    # Not its owner, who could fill run_dir with it.
                    let_read(fd, uid)
            os.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        return path

    def remove(self, run_id: str) -> None:
        """Removes the file of a run, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path(run_id))

    def remove_all_but(self, run_ids: Iterable[str]) -> list[str]:
        """Removes what earlier runs left and returns the names."""
        keep = {run_id + SUFFIX for run_id in run_ids}
        removed = []
        with os.scandir(self.directory) as entries:
            for entry in entries:
                if entry.name not in keep and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(entry.path)
                    removed.append(entry.name)
        return removed
