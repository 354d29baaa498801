"""The protocol of doc/protocol.md, written once more and from the layouts alone: what the tests say
to broker and workers when they play a client, a good or a bad one."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import socket
import struct
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field

FRAME_MAGIC = 0x46505047
HELLO_MAGIC = 0x004C4F4F50555047
MAJOR, MINOR = 0, 2
HELLO, CHALLENGE, PROOF, WELCOME, REFUSED, STATUS = 1, 2, 3, 4, 5, 6
COMMANDS, REPLIES, EVENTS, CREDIT = 16, 17, 18, 19
SESSION, DEVICE, ASK_STATUS = 1, 2, 3
BAD_FRAME, VERSION, UNKNOWN_LEASE, PROOF_WRONG = 1, 2, 3, 4
ASYNC_ERROR = 3
UNLIMITED_CREDIT = (1 << 64) - 1
CTX_CREATE, CTX_SYNCHRONIZE, MEM_GET_INFO = 4, 6, 19

_HEADER = struct.Struct("<IHHIIQQQQ")
_HELLO = struct.Struct("<QHHHH16s32s16sII64sQQ")
_COMMAND = struct.Struct("<IHBBII")
_REPLY = struct.Struct("<IHHQiI")
_EVENT = struct.Struct("<IHHII")


class Refused(Exception):
    """The other side refused: its code and sentence."""

    def __init__(self, code: int, sentence: str) -> None:
        super().__init__(f"refused ({code}): {sentence}")
        self.code = code
        self.sentence = sentence


class Closed(Exception):
    """The other side closed the connection."""


@dataclass
class Frame:
    kind: int
    body: bytes
    bulk: list[bytes] = field(default_factory=list)
    epoch: int = 0
    sequence: int = 0
    credit: int = 0


@dataclass
class Reply:
    call: int
    status: int
    flags: int
    body: bytes
    bulk: list[bytes]


@dataclass
class Lease:
    """What a lease file says."""

    lease: bytes
    key: bytes
    path: str
    tcp: tuple[str, int] | None

    @classmethod
    def parse(cls, text: str) -> Lease:
        data = json.loads(text)
        unix = next(c["path"] for c in data["carriers"] if c["kind"] == "unix")
        tcp = next(((c["host"], c["port"]) for c in data["carriers"] if c["kind"] == "tcp"), None)
        return cls(uuid.UUID(data["lease"]).bytes, bytes.fromhex(data["key"]), unix, tcp)


def encode_frame(
    kind: int,
    body: bytes,
    *,
    bulk: Iterable[bytes] = (),
    epoch: int = 0,
    sequence: int = 0,
    acknowledged: int = 0,
    credit: int = UNLIMITED_CREDIT,
    magic: int = FRAME_MAGIC,
) -> bytes:
    """A frame as it travels."""
    segments = list(bulk)
    sizes = b"".join(struct.pack("<I", len(s)) for s in segments)
    sizes += bytes(-len(sizes) % 8)
    header = _HEADER.pack(
        magic,
        kind,
        len(segments),
        len(body),
        epoch,
        sequence,
        acknowledged,
        credit,
        sum(map(len, segments)),
    )
    return header + sizes + body + b"".join(segments)


def command(
    operation: int,
    body: bytes = b"",
    *,
    call: int | None = None,
    thread: int = 1,
    context: int = 0,
    bulk_count: int = 0,
) -> bytes:
    """A command; `call` is given when a reply is wanted."""
    if call is not None:
        body = struct.pack("<Q", call) + body
    body += bytes(-len(body) % 8)
    flags = 1 if call is not None else 0
    return (
        _COMMAND.pack(_COMMAND.size + len(body), operation, flags, bulk_count, thread, context)
        + body
    )


def commands_of(body: bytes) -> list[tuple[int, int, bytes]]:
    """Operation, flags and body of each command of a kCommands frame."""
    found, offset = [], 0
    while offset < len(body):
        if len(body) - offset < _COMMAND.size:
            raise struct.error("a command that does not fit")
        size, operation, flags, _bulk, _thread, _context = _COMMAND.unpack_from(body, offset)
        if size < _COMMAND.size:
            raise struct.error("a command shorter than its header")
        found.append((operation, flags, body[offset + _COMMAND.size : offset + size]))
        offset += size
    return found


class Connection:
    """One connection to a broker or, behind the handshake, to a worker."""

    def __init__(
        self, lease: Lease, *, tcp: bool = False, timeout: float = 30, source: str = ""
    ) -> None:
        """source: the address that a TCP connection comes from."""
        if tcp:
            assert lease.tcp is not None
            own = (source, 0) if source else None
            self.socket = socket.create_connection(lease.tcp, timeout, own)
        else:
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.socket.settimeout(timeout)
            self.socket.connect(lease.path)
        self.lease = lease
        self.epoch = 0
        self.sequence = 0
        self.received = 0
        self.minor = 0
        self.session = bytes(16)
        self.device_count = 0
        self.initial_credit = 0
        self.offer = b""  # what a data connection's welcome ends with

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send_raw(self, data: bytes) -> None:
        """Sends bytes as they are; what the other side does about them is read, not raised."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(data)

    def receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            try:
                piece = self.socket.recv(size - len(data))
            except ConnectionResetError:
                piece = b""
            if not piece:
                raise Closed(f"after {len(data)} of {size} bytes")
            data += piece
        return data

    def receive_frame(self) -> Frame:
        """The next frame. Raises Refused for a kRefused, Closed at the end of the stream."""
        (
            magic,
            kind,
            bulk_count,
            body_bytes,
            epoch,
            sequence,
            _acknowledged,
            credit,
            _bulk_bytes,
        ) = _HEADER.unpack(self.receive(_HEADER.size))
        assert magic == FRAME_MAGIC
        sizes = struct.unpack(f"<{bulk_count}I", self.receive(bulk_count * 4))
        if bulk_count % 2:
            self.receive(4)
        body = self.receive(body_bytes)
        bulk = [self.receive(size) for size in sizes]
        if sequence:
            self.received = sequence
        if kind == REFUSED:
            code, length = struct.unpack_from("<II", body)
            raise Refused(code, body[8 : 8 + length].rstrip(b"\0").decode())
        return Frame(kind, body, bulk, epoch, sequence, credit)

    def hello(
        self,
        *,
        purpose: int = SESSION,
        session: bytes = bytes(16),
        device: int = 0,
        major: int = MAJOR,
        minor: int = MINOR,
        minor_min: int = MINOR,
        arena: tuple[int, int] = (0, 0),
        lease: bytes | None = None,
        magic: int = HELLO_MAGIC,
        accepts: int | None = None,
        pid: int | None = None,
    ) -> bytes:
        """The body of a kHello; with `accepts` as from minor version 2 on."""
        self.nonce = os.urandom(32)
        body = _HELLO.pack(
            magic,
            major,
            minor,
            minor_min,
            purpose,
            self.lease.lease if lease is None else lease,
            self.nonce,
            session,
            device,
            os.getpid() if pid is None else pid,
            b"a test",
            *arena,
        )
        return body if accepts is None else body + struct.pack("<II", accepts, 0)

    def open(self, *, key: bytes | None = None, **hello: object) -> Connection:
        """The whole handshake. Raises Refused or Closed."""
        key = self.lease.key if key is None else key
        body = self.hello(**hello)  # type: ignore[arg-type]
        self.send_raw(encode_frame(HELLO, body))
        challenge = self.receive_frame()
        assert challenge.kind == CHALLENGE
        major, self.minor, _, server_nonce = struct.unpack("<HHI32s", challenge.body[:40])
        assert major == MAJOR
        proof = hmac.digest(key, b"gpupool client 1" + server_nonce + body, hashlib.sha256)
        self.send_raw(encode_frame(PROOF, proof))
        welcome = self.receive_frame()
        assert welcome.kind == WELCOME
        proof, self.session, self.epoch, self.device_count, self.initial_credit = struct.unpack(
            "<32s16sIIQ", welcome.body[:64]
        )
        expected = hmac.digest(
            self.lease.key, b"gpupool server 1" + self.nonce + server_nonce, hashlib.sha256
        )
        assert hmac.compare_digest(proof, expected), "the broker does not know the key"
        self.offer = welcome.body[64:]
        return self

    def frame(self, kind: int, body: bytes, bulk: Iterable[bytes] = (), **fields: int) -> bytes:
        """The next frame of this connection; `fields` are wrong on purpose."""
        self.sequence += 1
        values = {
            "epoch": self.epoch,
            "sequence": self.sequence,
            "acknowledged": self.received,
            **fields,
        }
        return encode_frame(kind, body, bulk=bulk, **values)

    def send(self, body: bytes, bulk: Iterable[bytes] = ()) -> None:
        """Sends a frame of commands."""
        self.send_raw(self.frame(COMMANDS, body, bulk))

    def replies(self) -> list[Reply]:
        """The replies of the next frame that has some; events before it are in `self.events`."""
        while True:
            frame = self.receive_frame()
            if frame.kind == EVENTS:
                self.events.append(frame)
                continue
            if frame.kind != REPLIES:
                continue
            found, offset, used = [], 0, 0
            while offset < len(frame.body):
                size, flags, bulk_count, call, status, _ = _REPLY.unpack_from(frame.body, offset)
                found.append(
                    Reply(
                        call,
                        status,
                        flags,
                        frame.body[offset + _REPLY.size : offset + size],
                        frame.bulk[used : used + bulk_count],
                    )
                )
                used += bulk_count
                offset += size
            return found

    @property
    def events(self) -> list[Frame]:
        """Event frames that came so far."""
        return self.__dict__.setdefault("_events", [])

    def ask(self, operation: int, body: bytes = b"", **fields: int) -> Reply:
        """Sends one command that wants a reply and returns the reply."""
        self._call = getattr(self, "_call", 0) + 1
        self.send(command(operation, body, call=self._call, **fields))
        [reply] = self.replies()
        assert reply.call == self._call
        return reply


def event_kinds(frames: Iterable[Frame]) -> list[tuple[int, bytes]]:
    """Kind and body of each event."""
    found = []
    for frame in frames:
        offset = 0
        while offset < len(frame.body):
            size, kind, _, _context, _thread = _EVENT.unpack_from(frame.body, offset)
            found.append((kind, frame.body[offset + _EVENT.size : offset + size]))
            offset += size
    return found


ARENA = (0x2000_0000_0000, 16 << 30)  # base and bytes, as a client proposes


def open_device(lease: Lease, session: bytes, **options: object) -> Connection:
    """The data connection of the session's first device."""
    return Connection(lease).open(purpose=DEVICE, session=session, arena=ARENA, **options)


def create_context(connection: Connection) -> Reply:
    """Makes the primary context with the handle (1, 1)."""
    return connection.ask(CTX_CREATE, struct.pack("<IIIIQQ", 1, 1, 0, 1, *ARENA), context=1)
