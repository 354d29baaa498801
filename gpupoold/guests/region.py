"""The shared region of a virtual machine: a file below /dev/shm that QEMU maps (ivshmem-plain).

This is the one place that knows its path, its size and its first bytes. The guest may write
anywhere in it: nothing read from it decides anything but whether the header is written again.

The header, little endian, at offset 0:

    offset  size
    0       8     "GPPREGN1"
    8       8     epoch: which boot of the guest under this lease, from 1
    16      16    the lease
    32      16    whose it is: the gpupoold that made it
    48      4     1: the lease stands, 2: it has ended
    52      4     offset of what follows (4096)
    56      8     size of the region in bytes

What follows is divided by the broker (doc/rings.md).
"""

from __future__ import annotations

import contextlib
import grp
import hashlib
import os
import struct
import uuid

from gpupoold.errors import PoolError

DIRECTORY = "/dev/shm"  # noqa: S108  (where QEMU looks)
PREFIX = "gpupool-"
MODE = 0o660
HEADER_BYTES = 4096
LIVE, ENDED = 1, 2
_MAGIC = b"GPPREGN1"
_HEADER = struct.Struct("<8sQ16s16sIIQ")


class RegionError(PoolError):
    """The region cannot be made."""

    status = "INTERNAL"


class Regions:
    """The regions of one gpupoold."""

    def __init__(self, run_dir: str, size_mib: int, group: str, directory: str = DIRECTORY) -> None:
        """group: the group that QEMU runs as; empty: gpupoold's own."""
        self.size_mib = size_mib
        self._directory = directory
        self._group = group
        self._tag = hashlib.sha256(os.fsencode(run_dir)).digest()[:16]

    def path(self, name: str) -> str:
        """Where QEMU opens the region of this name."""
        return os.path.join(self._directory, name)

    def make(self, name: str, lease: str) -> tuple[str, int]:
        """Makes the region, in place of an earlier one of this name: its path and inode.

        The memory is reserved, so that writing to it later cannot fail. Raises RegionError.
        """
        path = self.path(name)
        # Others may make names in this directory: never open one that is there.
        fresh = f"{path}.{uuid.uuid4().hex}"
        try:
            fd = os.open(
                fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
        except OSError as error:
            raise RegionError(f"the region {path} cannot be made: {error.strerror}") from None
        try:
            try:
                os.posix_fallocate(fd, 0, self.size_mib << 20)
                os.pwrite(fd, self._header(lease, 1, LIVE), 0)
                if self._group:
                    os.fchown(fd, -1, grp.getgrnam(self._group).gr_gid)
                os.fchmod(fd, MODE)
                os.rename(fresh, path)
                return path, os.fstat(fd).st_ino
            finally:
                os.close(fd)
        except (OSError, KeyError) as error:
            with contextlib.suppress(OSError):
                os.unlink(fresh)
            why = (
                f"there is no group {self._group}"
                if isinstance(error, KeyError)
                else error.strerror or str(error)
            )
            raise RegionError(
                f"the region {path} of {self.size_mib} MiB cannot be made: {why}"
            ) from None

    def _header(self, lease: str, epoch: int, state: int) -> bytes:
        return _HEADER.pack(
            _MAGIC,
            epoch,
            uuid.UUID(lease).bytes,
            self._tag,
            state,
            HEADER_BYTES,
            self.size_mib << 20,
        )

    @staticmethod
    def _open(path: str, inode: int) -> int | None:
        """The very file that was made, or None."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        if os.fstat(fd).st_ino != inode:
            os.close(fd)
            return None
        return fd

    def is_current(self, path: str, inode: int, lease: str, epoch: int) -> bool:
        """Whether the header is what it should be; a migration brings that of the other host."""
        fd = self._open(path, inode)
        if fd is None:
            return False
        try:
            return os.pread(fd, _HEADER.size, 0) == self._header(lease, epoch, LIVE)
        finally:
            os.close(fd)

    def write_header(
        self, path: str, inode: int, lease: str, epoch: int, *, ended: bool = False
    ) -> bool:
        """Writes it; False if the file is gone."""
        fd = self._open(path, inode)
        if fd is None:
            return False
        try:
            os.pwrite(fd, self._header(lease, epoch, ENDED if ended else LIVE), 0)
        finally:
            os.close(fd)
        return True

    def remove(self, path: str, inode: int) -> None:
        """Removes the file, if it is still the one that was made."""
        fd = self._open(path, inode)
        if fd is not None:
            os.close(fd)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def remove_strangers(self, known: set[str]) -> list[str]:
        """Removes regions that this gpupoold made and does not know: it ended in between."""
        removed = []
        with os.scandir(self._directory) as entries:
            candidates = [
                entry.path
                for entry in entries
                if entry.name.startswith(PREFIX)
                and entry.path not in known
                and entry.is_file(follow_symlinks=False)
                and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
            ]
        for path in candidates:
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    data = os.pread(fd, _HEADER.size, 0)
                finally:
                    os.close(fd)
                if len(data) == _HEADER.size and _HEADER.unpack(data)[3] == self._tag:
                    os.unlink(path)
                    removed.append(path)
        return removed
