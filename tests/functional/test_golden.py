"""Recorded sessions of released clients are served by this release (tests/functional/golden).

    python -m tests.functional.record

makes the recordings of this release again. Only programs without variables of their own are fit:
the addresses of those are the driver's.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tests.functional import wire
from tests.functional.pool import Pool
from tests.functional.wire import Connection, Lease

GOLDEN = Path(__file__).parent / "golden"
MAGIC = b"GPUPOOLREC1\n"
COPY_TO_HOST = 26


def frames_of(file: Path) -> list[tuple[bytes, list[bytes]]]:
    """Body and bulk segments of each frame that the client sent."""
    data = file.read_bytes()
    assert data.startswith(MAGIC)
    at, frames = len(MAGIC), []
    while at < len(data):
        body_bytes, bulk_count = struct.unpack_from("<II", data, at)
        at += 8
        sizes = struct.unpack_from(f"<{bulk_count}I", data, at)
        at += 4 * bulk_count
        body = data[at : at + body_bytes]
        at += body_bytes
        bulk = []
        for size in sizes:
            bulk.append(data[at : at + size])
            at += size
        frames.append((body, bulk))
    return frames


def arena_of(frames: list[tuple[bytes, list[bytes]]]) -> tuple[int, int]:
    """The arena of the recorded addresses, from the command that makes the context."""
    for body, _ in frames:
        for operation, flags, content in wire.commands_of(body):
            if operation == wire.CTX_CREATE:
                return struct.unpack_from("<QQ", content, 8 * (flags & 1) + 16)
    raise AssertionError("no context is made in the recording")


def expected_of_loop() -> bytes:
    """What tests/programs/driver/loop.c copies back in five rounds."""
    n = 2048
    return b"".join(struct.pack(f"<{n}I", *(r + i for i in range(n))) for r in range(5))


def expected_of_transpose() -> bytes:
    """What tests/programs/cuda/transpose.cu copies back: 187 rows and 301 columns, transposed."""
    width, height = 301, 187
    values = (y * 1000.0 + x for x in range(width) for y in range(height))
    return struct.pack(f"<{width * height}f", *values)


RECORDINGS = {"loop": expected_of_loop, "transpose": expected_of_transpose}


@pytest.mark.parametrize("file", sorted(GOLDEN.glob("*.rec")), ids=lambda f: f.stem)
def test_recorded_session(pool: Pool, file: Path) -> None:
    program, _, minor = file.stem.rpartition("-0.")
    frames = frames_of(file)
    copied: list[bytes] = []
    with pool.started("main", ["sh", "-c", "cat $GPUPOOL_LEASE_FILE; exec cat"]) as holder:
        assert holder.stdout is not None
        lease = Lease.parse(holder.stdout.readline())
        with (
            Connection(lease).open() as session,
            Connection(lease).open(
                purpose=wire.DEVICE,
                session=session.session,
                arena=arena_of(frames),
                minor=int(minor),
                minor_min=int(minor),
            ) as device,
        ):
            for body, bulk in frames:
                waiting = {
                    struct.unpack_from("<Q", content)[0]: operation
                    for operation, flags, content in wire.commands_of(body)
                    if flags & 1
                }
                device.send(body, bulk)
                while waiting:
                    for reply in device.replies():
                        assert reply.status == 0, (waiting[reply.call], reply.status)
                        if waiting[reply.call] == COPY_TO_HOST:
                            copied.append(b"".join(reply.bulk) or reply.body)
                        if not reply.flags & 1:
                            del waiting[reply.call]
            assert wire.event_kinds(device.events) == []
    assert b"".join(copied) == RECORDINGS[program]()


def test_there_are_recordings_of_this_release() -> None:
    for program in RECORDINGS:
        assert (GOLDEN / f"{program}-0.{wire.MINOR}.rec").exists()
