"""A client's end of a ring, from the layout of doc/rings.md alone: what the tests play a good or a
bad client with. It does not sleep on the bell but looks every millisecond."""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import time

from tests.functional import wire
from tests.functional.wire import Closed, Connection, Lease

ACCEPTS_RING, ACCEPTS_REGION = 1, 2
TAKES_RING, TAKES_SOCKET = 1, 2
CONTROL_BYTES = 4096

#: offsets of the words in the control page
WORKER_DEAD, CLIENT_DEAD, MAY_SPIN = 132, 136, 256
TO_WORKER, TO_CLIENT = 384, 1152
COMMAND_TAIL, BULK_TAIL, COMMAND_HEAD, BULK_HEAD = 0, 128, 256, 384
CONSUMER_SLEEPS, PRODUCER_SLEEPS = 512, 640


class RingConnection(Connection):
    """A data connection that accepts a ring. `region` is there when one was offered: the bytes from
    its beginning on."""

    def __init__(self, lease: Lease, **options: object) -> None:
        super().__init__(lease, **options)  # type: ignore[arg-type]
        self.memory = -1
        self.region: mmap.mmap | None = None
        self.taken = False
        self.command_bytes = self.bulk_bytes = self.offset = 0
        self.written = self.read = 0

    def close(self) -> None:
        super().close()
        if self.memory >= 0:
            os.close(self.memory)
            self.memory = -1

    def open(self, **hello: object) -> RingConnection:
        """The handshake; what was offered is mapped, and not answered yet."""
        hello.setdefault("accepts", ACCEPTS_RING | ACCEPTS_REGION)
        super().open(purpose=wire.DEVICE, arena=wire.ARENA, **hello)
        kind, version, self.command_bytes, self.bulk_bytes = struct.unpack("<IIII", self.offer[:16])
        size = CONTROL_BYTES + 2 * (self.command_bytes + self.bulk_bytes)
        if kind in (1, 2):
            assert version == 1
            assert self.memory >= 0, "an offer without a descriptor"
        if kind == 1:
            self.region = mmap.mmap(self.memory, size)
        if kind == 2:
            self.offset, whole = struct.unpack("<QQ", self.offer[16:])
            assert os.fstat(self.memory).st_size == whole
            self.region = mmap.mmap(self.memory, size, offset=self.offset)
        return self

    def choose(self, choice: int) -> None:
        self.socket.sendall(struct.pack("<Q", choice))
        self.taken = choice == TAKES_RING

    def word(self, direction: int, name: int) -> int:
        assert self.region is not None
        value: int = struct.unpack_from("<Q", self.region, direction + name)[0]
        return value

    def set_word(self, direction: int, name: int, value: int) -> None:
        assert self.region is not None
        struct.pack_into("<Q", self.region, direction + name, value)
        self.ring_bell()

    def ring_bell(self) -> None:
        super().send_raw(b"!")

    def send_raw(self, data: bytes) -> None:
        if not self.taken:
            return super().send_raw(data)
        assert self.region is not None
        assert len(data) <= self.command_bytes
        for at, byte in enumerate(data, self.written):
            self.region[CONTROL_BYTES + at % self.command_bytes] = byte
        self.written += len(data)
        self.set_word(TO_WORKER, COMMAND_TAIL, self.written)
        return None

    def receive(self, size: int) -> bytes:
        if not self.taken:
            return self.receive_with_memory(size)
        assert self.region is not None
        start = CONTROL_BYTES + self.command_bytes + self.bulk_bytes
        end = time.monotonic() + (self.socket.gettimeout() or 30)
        while True:
            gone = self.gone()  # before looking: what was written last counts
            if self.word(TO_CLIENT, COMMAND_TAIL) >= self.read + size:
                break
            if gone:
                raise Closed("the ring")
            if time.monotonic() > end:
                raise TimeoutError
            time.sleep(0.001)
        positions = range(self.read, self.read + size)
        data = bytes(self.region[start + at % self.command_bytes] for at in positions)
        self.read += size
        self.set_word(TO_CLIENT, COMMAND_HEAD, self.read)
        return data

    def gone(self) -> bool:
        """Whether the worker has closed the connection; takes in its bells."""
        while select.select([self.socket], [], [], 0)[0]:
            try:
                data = self.socket.recv(4096)
            except ConnectionResetError:
                return True
            if not data:
                return True
            assert set(data) == {ord("!")}
        return False

    def receive_with_memory(self, size: int) -> bytes:
        """Exactly so many bytes, and the descriptor that comes with them."""
        data = b""
        while len(data) < size:
            piece, descriptors, _, _ = socket.recv_fds(self.socket, size - len(data), 1)
            if descriptors:
                assert self.memory < 0
                [self.memory] = descriptors
            if not piece:
                raise Closed(f"after {len(data)} of {size} bytes")
            data += piece
        return data
