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
import select
import socket
import stat
import struct
import threading
import time
from collections import Counter
from collections.abc import Sequence

from gpupoold.errors import SocketError, StartError, StateError
from gpupoold.model import Caller

LOG = logging.getLogger(__name__)

CHUNK = 65536
BACKLOG = 4096  # the kernel takes net.core.somaxconn if that is less
ROUND = 64  # connections of one socket before the next one is looked at
#: new connections of one user: at once, and a second for longer
BURST = 256
RATE = 64.0
INNER_SECONDS = 5.0  # the server's own queue may be full for a moment
SAY_SECONDS = 10.0  # refusals of one user are told in one line of the log


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
    """A socket that is ours: held by a lock on a file beside it."""

    def __init__(self, path: str, mode: int = 0o666) -> None:
        """Listens on `path`; takes over a socket that nobody listens on.

        Everybody may connect unless `mode` says otherwise; the kernel says who does.

        Raises SocketError when another process has it, or when it cannot be made.
        """
        self.path = path
        self._lock = self._take_lock()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._remove_stale()
            self.socket.bind(path)
            os.chmod(path, mode)
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


class Refusals:
    """Tells of refused connections: the first at once, then one line for many."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._next: dict[int, float] = {}

    def add(self, uid: int) -> None:
        """Counts one, and says it if that is due."""
        self._counts[uid] += 1
        now = time.monotonic()
        if now >= self._next.get(uid, 0.0):
            self._say(uid, now)

    def look(self) -> float | None:
        """Says what is due; when to look again, in seconds."""
        now = time.monotonic()
        for uid, due in list(self._next.items()):
            if now < due:
                continue
            if self._counts[uid]:
                self._say(uid, now)
            else:
                del self._next[uid], self._counts[uid]
        return max(0.0, min(self._next.values()) - now) if self._next else None

    def _say(self, uid: int, now: float) -> None:
        count = self._counts[uid]
        LOG.warning(
            "refused %d connection%s of user %d: too many are open, or were made at once",
            count, "s" if count > 1 else "", uid,
        )  # fmt: skip
        self._counts[uid] = 0
        self._next[uid] = now + SAY_SECONDS


class Rates:
    """How often users connect."""

    def __init__(self) -> None:
        self._left: dict[int, tuple[float, float]] = {}  # connections, at this time

    def allow(self, uid: int) -> bool:
        """Whether one more may be; counts it then."""
        now = time.monotonic()
        left, at = self._left.get(uid, (BURST, now))
        left = min(BURST, left + (now - at) * RATE)
        if left < 1:
            self._left[uid] = (left, now)
            return False
        if len(self._left) > 1024:  # those who could have all again are as good as unknown
            self._left = {
                other: entry for other, entry in self._left.items() if now - entry[1] < BURST / RATE
            }
        self._left[uid] = (left - 1, now)
        return True


class PeerGate:
    """Joins public connections to the private socket.

    One thread accepts and turns away who has too many or comes too often: nothing else may keep it,
    since whoever fills the kernel's queue of connections keeps all others out. Another moves the
    bytes.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        private_path: str,
        limit: int,
        limit_per_user: int,
    ) -> None:
        """listeners: what comes on an earlier one does not wait for the later.

        Root and gpupoold's own user have a tenth of `limit` more, and no limit per user.
        """
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._private_path = private_path
        self._limit = limit
        self._limit_per_user = limit_per_user
        self._admins = {0, os.geteuid()}
        self._token = secrets.token_hex(16)
        self._number = 0
        self._open: Counter[int] = Counter()
        self._open_lock = threading.Lock()
        self._refusals = Refusals()
        self._rates = Rates()
        self._exhausted_until = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._stopping = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="peers", daemon=True)
        self._acceptor = threading.Thread(target=self._accept, name="acceptor", daemon=True)

    def start(self) -> None:
        """Begins to accept; connections made since `claim` are waiting."""
        self._thread.start()
        self._acceptor.start()

    def stop(self) -> None:
        """Closes all connections."""
        self._stopping = True
        if self._acceptor.is_alive():
            os.eventfd_write(self._wake, 1)
            self._acceptor.join(timeout=5)
            os.close(self._wake)
        if self._thread.is_alive():
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
        await self._stop.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self) -> None:
        poll = select.poll()
        for fd in (self._wake, *self._listeners):
            poll.register(fd, select.POLLIN)
        while not self._stopping:
            pause = self._refusals.look()
            ready = {fd for fd, _ in poll.poll(None if pause is None else pause * 1000 + 1)}
            for fd, listener in self._listeners.items():
                if fd in ready:
                    self._accept_round(listener)

    def _accept_round(self, listener: socket.socket) -> None:
        for _ in range(ROUND):
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                    self._say_exhausted(error)
                    time.sleep(0.2)
                    return
                continue
            try:
                uid, pid = credentials(connection)
            except OSError:
                connection.close()
                continue
            if not (uid in self._admins or self._rates.allow(uid)) or not self._admit(uid):
                connection.close()
                self._refusals.add(uid)
                continue
            try:
                self._loop.call_soon_threadsafe(self._begin, connection, uid, pid)
            except RuntimeError:  # the loop has ended
                connection.close()
                return

    def _say_exhausted(self, error: OSError) -> None:
        now = time.monotonic()
        if now >= self._exhausted_until:
            LOG.warning("no connection can be accepted now: %s", error)
            self._exhausted_until = now + SAY_SECONDS

    def _admit(self, uid: int) -> bool:
        """Counts the connection in, if it may be."""
        with self._open_lock:
            total = self._open.total()
            if uid in self._admins:
                admitted = total < self._limit + max(1, self._limit // 10)
            else:
                admitted = total < self._limit and self._open[uid] < self._limit_per_user
            if admitted:
                self._open[uid] += 1
            return admitted

    def _begin(self, connection: socket.socket, uid: int, pid: int) -> None:
        task = self._loop.create_task(self._join(connection, uid, pid))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _join(self, outer: socket.socket, uid: int, pid: int) -> None:
        inner = None
        try:
            inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            outer.setblocking(False)
            inner.setblocking(False)
            self._number += 1
            inner.bind(f"\0gpupoold/{self._token}/{uid}/{pid}/{self._number}")
            await self._connect(inner)
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
            with self._open_lock:
                self._open[uid] -= 1
                if not self._open[uid]:
                    del self._open[uid]

    async def _connect(self, inner: socket.socket) -> None:
        """To the server, also where its queue is full, which asyncio takes for being connected."""
        deadline = self._loop.time() + INNER_SECONDS
        while True:
            try:
                inner.connect(self._private_path)
                return
            except BlockingIOError:
                if self._loop.time() >= deadline:
                    raise
            await asyncio.sleep(0.01)

    async def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := await self._loop.sock_recv(source, CHUNK):
                await self._loop.sock_sendall(sink, data)
        finally:
            # Either direction's end ends the other: gRPC never uses half a connection.
            for end in (source, sink):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
