"""Tells gRPC who is calling.

grpcio does not show a unix socket's peer credentials. So the public socket is ours: each
connection is accepted here, its credentials are read from the kernel, and it is joined to the gRPC
server's private socket by a connection whose own (abstract) address carries the caller's user and
process. That address is what the server sees as its peer. Nobody else can reach the private socket:
its directory belongs to gpupoold alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import socket
import stat
import struct
import threading
from collections import Counter

from gpupoold.errors import SocketError, StartError, StateError
from gpupoold.model import Caller

LOG = logging.getLogger(__name__)

CHUNK = 65536
BACKLOG = 256


def credentials(connection: socket.socket) -> tuple[int, int]:
    """(uid, pid) of the process that connected."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", data)
    return uid & 0xFFFFFFFF, pid


def not_made(path: str, error: OSError) -> StartError:
    """The error of a socket, its directory or lock: the disk's fault, or the path's."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StateError(f"state: the disk that holds {path} is full; free some space")
    if error.errno == errno.EROFS:
        return StateError(f"state: {path} is on a read-only file system")
    return SocketError(f"socket: {path} cannot be made: {error.strerror or error}")


class Claim:
    """A public socket that is ours: held by a lock on a file beside it."""

    def __init__(self, path: str) -> None:
        """Listens on `path`; takes over a socket that nobody listens on.

        Raises SocketError when another process has it, or when it cannot be made.
        """
        self.path = path
        self._lock = self._take_lock()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._remove_stale()
            self.socket.bind(path)
            os.chmod(path, 0o666)  # noqa: S103  (everybody may connect; the kernel says who)
            self.socket.listen(BACKLOG)
            self.socket.setblocking(False)
        except BaseException as error:
            self.socket.close()
            os.close(self._lock)
            if isinstance(error, OSError):
                raise not_made(path, error) from None
            raise

    def _take_lock(self) -> int:
        name = self.path + ".lock"
        try:
            fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise not_made(name, error) from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise SocketError(self._in_use()) from None
        return fd

    def _in_use(self) -> str:
        """Says who has it, as far as can be known."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(2)
            try:
                probe.connect(self.path)
                who = f"process {credentials(probe)[1]}"
            except OSError:
                who = "a process that is starting or ending"
        return f"socket: {self.path} is in use by {who}: another gpupoold runs with this run_dir"

    def _remove_stale(self) -> None:
        try:
            mode = os.lstat(self.path).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise SocketError(f"socket: {self.path} is in the way and is not a socket; remove it")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(2)
            try:
                probe.connect(self.path)
            except (ConnectionRefusedError, FileNotFoundError):
                LOG.info("took over the socket %s that an earlier gpupoold left", self.path)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.path)
                return
            except OSError:
                pass  # somebody listens and does not keep up
        # Without our lock: another program, or somebody removed the lock's file.
        raise SocketError(self._in_use())

    def close(self, *, remove: bool = True) -> None:
        """Gives it up; without `remove` as a process that is killed does."""
        self.socket.close()
        if remove:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
        os.close(self._lock)


class PeerGate:
    """Joins public connections to the private socket, in a thread of its own."""

    def __init__(
        self, listener: socket.socket, private_path: str, limit: int, limit_per_user: int
    ) -> None:
        """Root and gpupoold's own user have a tenth of `limit` more, and no limit per user."""
        self._listener = listener
        self._private_path = private_path
        self._limit = limit
        self._limit_per_user = limit_per_user
        self._admins = {0, os.geteuid()}
        self._token = secrets.token_hex(16)
        self._number = 0
        self._open: Counter[int] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="peers", daemon=True)

    def start(self) -> None:
        """Begins to accept; connections made since `claim` are waiting."""
        self._thread.start()

    def stop(self) -> None:
        """Closes all connections."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout=5)

    def caller(self, peer: str) -> Caller | None:
        """Who a gRPC context's peer() is; None for a connection that did not come through here."""
        match = re.fullmatch(
            rf"unix-abstract:gpupoold/{self._token}/(\d+)/(\d+)/\d+", peer.replace("%2F", "/")
        )
        if not match:
            return None
        uid, pid = int(match[1]), int(match[2])
        return Caller(uid, pid, uid in self._admins)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        accepting = self._loop.create_task(self._accept())
        await self._stop.wait()
        for task in [accepting, *self._tasks]:
            task.cancel()
        await asyncio.gather(accepting, *self._tasks, return_exceptions=True)

    async def _accept(self) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._listener)
                uid, pid = credentials(connection)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                    LOG.warning("no connection can be accepted now: %s", error)
                    await asyncio.sleep(0.2)
                continue
            if not self._admit(uid):
                LOG.warning("refused a connection of user %d: too many are open", uid)
                connection.close()
                continue
            self._open[uid] += 1
            task = self._loop.create_task(self._join(connection, uid, pid))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _admit(self, uid: int) -> bool:
        total = self._open.total()
        if uid in self._admins:
            return total < self._limit + max(1, self._limit // 10)
        return total < self._limit and self._open[uid] < self._limit_per_user

    async def _join(self, outer: socket.socket, uid: int, pid: int) -> None:
        inner = None
        try:
            inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            outer.setblocking(False)
            inner.setblocking(False)
            self._number += 1
            inner.bind(f"\0gpupoold/{self._token}/{uid}/{pid}/{self._number}")
            await self._loop.sock_connect(inner, self._private_path)
            # Both must have ended before their sockets may be closed.
            await asyncio.gather(
                self._pump(outer, inner), self._pump(inner, outer), return_exceptions=True
            )
        except OSError as error:
            LOG.debug("a connection of user %d ended: %s", uid, error)
        finally:
            outer.close()
            if inner is not None:
                inner.close()
            self._open[uid] -= 1
            if not self._open[uid]:
                del self._open[uid]

    async def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := await self._loop.sock_recv(source, CHUNK):
                await self._loop.sock_sendall(sink, data)
        finally:
            # Either direction's end ends the other: gRPC never uses half a connection.
            for end in (source, sink):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
