"""Sends wrong handshakes, frames and commands to a real broker and its workers.

    python -m tests.fuzz.protocol [--seed N] [--count N]

A case changes bytes of a right handshake, changes a frame of a recorded session, or sends commands
of existing operations with random bodies. It may end in any answer; the broker has to stay, no
worker may end by a signal of its own making, and a session that behaves must be served afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import struct
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent.parent))

from tests.functional import wire
from tests.functional.pool import Pool, wait_for
from tests.functional.test_golden import GOLDEN, frames_of
from tests.functional.wire import Closed, Connection, Lease, Refused

OPERATIONS = 120  # numbers up to here are tried; those that are not given out are unknown ones
INTERESTING = [
    0,
    1,
    2,
    7,
    8,
    0x7F,
    0x80,
    0xFF,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
    wire.ARENA[0],
    wire.ARENA[0] + (1 << 21),
]
ENDS = (Refused, Closed, TimeoutError, AssertionError, struct.error, OSError)


def mutate(rng: random.Random, data: bytes) -> bytes:
    """The data with some bytes, words or its length changed."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        choice = rng.random()
        if choice < 0.5 and out:
            at = rng.randrange(len(out))
            out[at] = rng.randrange(256)
        elif choice < 0.8 and len(out) >= 8:
            at = rng.randrange(len(out) // 4) * 4
            word = struct.pack("<Q", rng.choice(INTERESTING))[: rng.choice([2, 4, 8])]
            out[at : at + len(word)] = word
        elif choice < 0.9:
            del out[rng.randrange(len(out) + 1) :]
        else:
            out += rng.randbytes(rng.randint(1, 64))
    return bytes(out)


def random_body(rng: random.Random, size: int) -> bytes:
    """Words that are numbers, handles and addresses rather than noise."""
    words = []
    while 8 * len(words) < size:
        kind = rng.random()
        if kind < 0.4:
            words.append(struct.pack("<II", rng.randint(0, 4), rng.randint(0, 3)))
        elif kind < 0.8:
            words.append(struct.pack("<Q", rng.choice(INTERESTING)))
        else:
            words.append(rng.randbytes(8))
    return b"".join(words)[:size]


def broken_handshake(rng: random.Random, lease: Lease) -> None:
    """A right Hello or proof with something changed."""
    with Connection(lease, timeout=1) as connection:
        hello = wire.encode_frame(wire.HELLO, connection.hello())
        if rng.random() < 0.6:
            connection.send_raw(mutate(rng, hello))
            connection.receive_frame()
            return
        connection.send_raw(hello)
        connection.receive_frame()
        connection.send_raw(mutate(rng, wire.encode_frame(wire.PROOF, rng.randbytes(32))))
        connection.receive_frame()


def random_commands(rng: random.Random, device: Connection) -> bytes:
    """The body of a frame with well-formed commands of random content."""
    body = b""
    for _ in range(rng.randint(1, 6)):
        call = rng.randint(1, 1 << 20) if rng.random() < 0.5 else None
        body += wire.command(
            rng.randint(1, OPERATIONS),
            random_body(rng, 8 * rng.randint(0, 16)),
            call=call,
            thread=rng.randint(0, 3),
            context=rng.randint(0, 2),
        )
    return body


def in_a_session(rng: random.Random, lease: Lease, session: bytes) -> None:
    """Some frames on a data connection that began right."""
    with wire.open_device(lease, session) as device:
        device.socket.settimeout(1)
        if rng.random() < 0.8:
            wire.create_context(device)
        for _ in range(rng.randint(1, 5)):
            body = random_commands(rng, device)
            bulk = [rng.randbytes(rng.randint(0, 200)) for _ in range(rng.randint(0, 2))]
            frame = device.frame(wire.COMMANDS, body, bulk)
            device.send_raw(mutate(rng, frame) if rng.random() < 0.4 else frame)
        # Whatever comes back has to be frames; the session is asked something to see it alive.
        with contextlib.suppress(*ENDS):
            device.send(wire.command(wire.CTX_SYNCHRONIZE, call=1 << 30, context=1))
            while True:
                device.receive_frame()


def changed_recording(
    rng: random.Random, lease: Lease, session: bytes, frames: list[tuple[bytes, list[bytes]]]
) -> None:
    """A recorded session with one frame changed: the commands, or what travels beside them."""
    victim = rng.randrange(len(frames))
    with wire.open_device(lease, session) as device:
        device.socket.settimeout(2)
        for number, (body, bulk) in enumerate(frames):
            if number == victim and bulk and rng.random() < 0.6:
                at = rng.randrange(len(bulk))
                bulk = [mutate(rng, b) if i == at else b for i, b in enumerate(bulk)]
            elif number == victim:
                body = mutate(rng, body)
                body += bytes(-len(body) % 8)
            device.send(body, bulk)
            waiting = sum(flags & 1 for _, flags, _ in wire.commands_of(body))
            while waiting > 0:
                waiting -= sum(not reply.flags & 1 for reply in device.replies())


def crashed(pool: Pool) -> list[str]:
    """Lines of the broker's log and the workers' that tell of a crash."""
    words = ("ended by signal", "AddressSanitizer", "runtime error:", "terminate called")
    lines = pool.broker_log.read_text(errors="replace").splitlines()
    lines += pool.worker_logs().splitlines()
    ended_by_broker = ("signal 15", "signal 9")
    return [
        line
        for line in lines
        if any(word in line for word in words)
        and not any(signal in line for signal in ended_by_broker)
    ]


def run(
    pool: Pool,
    lease: Lease,
    seed: int,
    count: int,
    progress: Callable[[int], None] = lambda number: None,
) -> None:
    """`count` cases. AssertionError with the case's number when something broke."""
    recording = frames_of(GOLDEN / f"loop-0.{wire.MINOR}.rec")
    for number in range(count):
        rng = random.Random(f"{seed}.{number}")
        progress(number)
        with contextlib.suppress(*ENDS):
            kind = rng.random()
            if kind < 0.3:
                broken_handshake(rng, lease)
            else:
                with Connection(lease, timeout=10).open() as session:
                    if kind < 0.65:
                        in_a_session(rng, lease, session.session)
                    else:
                        changed_recording(rng, lease, session.session, recording)
        assert pool.broker is not None and pool.broker.poll() is None, (
            f"seed {seed}, case {number}: the broker ended\n{pool.logs()}"
        )
        lines = crashed(pool) if number % 20 == 19 else []
        assert not lines, f"seed {seed}, case {number} or shortly before: {lines}"
    # One that behaves is served.
    with Connection(lease).open() as session, wire.open_device(lease, session.session) as device:
        assert wire.create_context(device).status == 0
        assert device.ask(wire.CTX_SYNCHRONIZE, context=1).status == 0
    wait_for("the end of the sessions", lambda: pool.sessions() == [])
    assert not crashed(pool), f"seed {seed}: {crashed(pool)}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz broker and workers over the protocol.")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--count", type=int, default=1000)
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with Pool() as pool:
        pool.slice("main")
        with pool.started("main", ["sh", "-c", "cat $GPUPOOL_LEASE_FILE; exec cat"]) as holder:
            assert holder.stdout is not None
            lease = Lease.parse(holder.stdout.readline())
            run(
                pool,
                lease,
                arguments.seed,
                arguments.count,
                lambda number: print(f"\r{number}", end="", flush=True),
            )
    print("\nok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
