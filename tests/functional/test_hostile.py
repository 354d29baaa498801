"""What strangers and wrong clients send, beside a control program that must stay right."""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.functional import wire
from tests.functional.pool import Pool, wait_for
from tests.functional.wire import Closed, Connection, Lease, Refused, encode_frame
from tests.programs.toolchain import Compiler


@pytest.fixture(scope="module")
def hostile_pool(simulated_driver) -> Iterator[Pool]:
    with Pool(
        driver_directory=simulated_driver, options={"broker": {"tcp_listen": "127.0.0.1:0"}}
    ) as pool:
        pool.slice("main", compute=25, memory=4096)
        yield pool


@pytest.fixture
def control(hostile_pool: Pool, compiler: Compiler) -> Iterator[subprocess.Popen[str]]:
    """A program that works during the whole test and is asked for its result at the end."""
    done = hostile_pool.root / "done"
    done.unlink(missing_ok=True)
    loop = str(compiler.driver("loop"))
    script = (
        f"{loop} 20 >/dev/null && echo ready && while ! [ -e {done} ]; do {loop} 20 "
        f">{done}.out 2>&1 || exit 1; done; cat {done}.out"
    )
    with hostile_pool.started("main", ["sh", "-c", script]) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        yield program
        done.touch()
        output, _ = program.communicate(timeout=60)
        assert program.returncode == 0, output
        assert output in ("ready\nok\n", "")  # "": it was between two rounds from the start


@pytest.fixture
def lease(hostile_pool: Pool) -> Iterator[Lease]:
    """A lease that lives as long as the test."""
    with hostile_pool.started("main", ["sh", "-c", "cat $GPUPOOL_LEASE_FILE; exec cat"]) as holder:
        assert holder.stdout is not None
        yield Lease.parse(holder.stdout.readline())


def ends(connection: Connection, seconds: float = 20) -> Refused | None:
    """Waits until the other side ends the connection; what it refused with, if it did."""
    connection.socket.settimeout(seconds)
    try:
        while True:
            connection.receive_frame()
    except Refused as refused:
        return refused
    except Closed:
        return None


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
def test_random_bytes(control, lease: Lease, tcp: bool) -> None:
    for size in (1, 7, 47, 48, 49, 216, 4096, 300000):
        with Connection(lease, tcp=tcp) as connection:
            connection.send_raw(os.urandom(size))
            if size >= 48:
                refused = ends(connection)
                assert refused is None or refused.code == wire.BAD_FRAME


def test_half_a_frame_then_silence(control, lease: Lease) -> None:
    with Connection(lease) as connection:
        whole = encode_frame(wire.HELLO, connection.hello())
        connection.send_raw(whole[:100])
        start = time.monotonic()
        ends(connection, seconds=60)
        waited = time.monotonic() - start
    assert 3 < waited < 30  # 5 s by the protocol; a busy machine may be late


def test_silence_after_the_challenge(control, lease: Lease) -> None:
    with Connection(lease) as connection:
        connection.send_raw(encode_frame(wire.HELLO, connection.hello()))
        assert connection.receive_frame().kind == wire.CHALLENGE
        ends(connection, seconds=60)


def test_wrong_secret(control, hostile_pool: Pool, lease: Lease) -> None:
    with Connection(lease) as connection, pytest.raises(Refused) as refused:
        connection.open(key=bytes(32))
    assert refused.value.code == wire.PROOF_WRONG
    assert refused.value.sentence
    assert not any(s["pid"] == os.getpid() for s in hostile_pool.sessions())


def test_unknown_lease(control, lease: Lease) -> None:
    with Connection(lease) as connection, pytest.raises(Refused) as refused:
        connection.open(lease=os.urandom(16))
    assert refused.value.code in (wire.UNKNOWN_LEASE, wire.PROOF_WRONG)


@pytest.mark.parametrize(
    "versions",
    [{"major": 9}, {"minor": 99, "minor_min": 99}, {"minor": 1, "minor_min": 7}],
    ids=str,
)
def test_no_version_in_common(control, lease: Lease, versions: dict[str, int]) -> None:
    with Connection(lease) as connection, pytest.raises(Refused) as refused:
        connection.open(**versions)
    assert refused.value.code in (wire.VERSION, wire.BAD_FRAME)


def test_later_minor_version_is_served_at_ours(control, lease: Lease) -> None:
    with Connection(lease) as session:
        session.open(minor=99)
        assert session.minor == wire.MINOR
        assert session.device_count == 1
        with wire.open_device(lease, session.session, minor=99) as device:
            assert device.minor == wire.MINOR
            assert wire.create_context(device).status == 0


def test_device_connection_of_a_session_that_is_not_there(control, lease: Lease) -> None:
    with pytest.raises((Refused, Closed)):
        wire.open_device(lease, os.urandom(16))


def test_unknown_operation(control, lease: Lease) -> None:
    with Connection(lease).open() as session, wire.open_device(lease, session.session) as device:
        assert wire.create_context(device).status == 0
        assert device.ask(60000, b"some future parameters!!").status == 801
        device.send(wire.command(60001, b"12345678"))
        assert device.ask(wire.CTX_SYNCHRONIZE, context=1).status == 0
        # Beside the command's own bulk data, which have to be skipped.
        device.send(wire.command(60002, bulk_count=2), bulk=[b"x" * 100, b"y" * 5000])
        reply = device.ask(wire.MEM_GET_INFO, context=1)
        assert reply.status == 0
        assert struct.unpack_from("<QQ", reply.body)[1] == 4096 << 20
        errors = [
            struct.unpack_from("<iH", body)
            for kind, body in wire.event_kinds(device.events)
            if kind == wire.ASYNC_ERROR
        ]
        assert (801, 60001) in errors and (801, 60002) in errors


BAD_FRAMES = {
    "magic": lambda c: c.frame(wire.COMMANDS, b"", magic=0x12345678),
    "sequence": lambda c: c.frame(wire.COMMANDS, wire.command(6, call=9), sequence=77),
    "epoch": lambda c: c.frame(wire.COMMANDS, wire.command(6, call=9), epoch=c.epoch + 1),
    "kind": lambda c: c.frame(999, b""),
    "huge body": lambda c: struct.pack(
        "<IHHIIQQQQ",
        wire.FRAME_MAGIC,
        wire.COMMANDS,
        0,
        1 << 30,
        c.epoch,
        c.sequence + 1,
        0,
        1 << 40,
        0,
    ),
    "odd body": lambda c: c.frame(wire.COMMANDS, b"123"),
    "too many segments": lambda c: struct.pack(
        "<IHHIIQQQQ",
        wire.FRAME_MAGIC,
        wire.COMMANDS,
        60000,
        0,
        c.epoch,
        c.sequence + 1,
        0,
        1 << 40,
        1 << 50,
    ),
    "huge segment": lambda c: struct.pack(
        "<IHHIIQQQQII",
        wire.FRAME_MAGIC,
        wire.COMMANDS,
        1,
        0,
        c.epoch,
        c.sequence + 1,
        0,
        1 << 40,
        0xFFFFFFFF,
        0xFFFFFFFF,
        0,
    ),
    "sum of segments": lambda c: struct.pack(
        "<IHHIIQQQQII",
        wire.FRAME_MAGIC,
        wire.COMMANDS,
        1,
        0,
        c.epoch,
        c.sequence + 1,
        0,
        1 << 40,
        4096,
        64,
        0,
    )
    + bytes(64),
    "command longer than its frame": lambda c: c.frame(
        wire.COMMANDS, struct.pack("<IHBBII", 4096, 6, 0, 0, 1, 0)
    ),
    "command shorter than its header": lambda c: c.frame(
        wire.COMMANDS, struct.pack("<IHBBII", 8, 6, 0, 0, 1, 0)
    ),
    "command without length": lambda c: c.frame(
        wire.COMMANDS, struct.pack("<IHBBII", 0, 6, 0, 0, 1, 0)
    ),
    "more bulk than there is": lambda c: c.frame(
        wire.COMMANDS, wire.command(25, bytes(48), bulk_count=9)
    ),
}


@pytest.mark.parametrize("what", BAD_FRAMES)
def test_bad_frame_ends_the_session_only(
    control, hostile_pool: Pool, lease: Lease, what: str
) -> None:
    with Connection(lease).open() as session, wire.open_device(lease, session.session) as device:
        assert wire.create_context(device).status == 0
        device.send_raw(BAD_FRAMES[what](device))
        refused = ends(device)
        assert refused is not None, "the connection ended without a word"
        assert refused.code == wire.BAD_FRAME
        assert refused.sentence
    assert hostile_pool.broker is not None and hostile_pool.broker.poll() is None


def test_half_a_frame_in_a_session(control, hostile_pool: Pool, lease: Lease) -> None:
    """A client that stops within a frame costs nothing but its own session."""
    with Connection(lease).open() as session:
        device = wire.open_device(lease, session.session)
        assert wire.create_context(device).status == 0
        device.send_raw(device.frame(wire.COMMANDS, wire.command(6, call=9))[:60])
        device.close()
    wait_for(
        "the session's end",
        lambda: not any(s["pid"] == os.getpid() for s in hostile_pool.sessions()),
        15,
    )


def test_many_half_open_connections(
    control, hostile_pool: Pool, compiler: Compiler, lease: Lease
) -> None:
    """Others still get in."""
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            with contextlib.suppress(OSError):
                stack.enter_context(Connection(lease, timeout=5)).send_raw(b"GPPF")
        done = hostile_pool.run("main", [str(compiler.driver("vector_add"))])
        assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


GRAPH_DEFINE, GRAPH_UPDATE, GRAPH_DESTROY, GRAPH_LAUNCH = 100, 101, 102, 103
EMPTY, KERNEL, COPY, FILL, RECORD = range(5)
MAX_NODES = 1 << 18


def node(kind: int, index: int, body: bytes = b"", before: tuple[int, ...] = ()) -> bytes:
    """One node of a graph's description (native/wire/graph_nodes.h)."""
    edges = struct.pack(f"<{len(before)}I", *before)
    return struct.pack("<IIII", kind, index, 1, len(before)) + edges + bytes(-len(edges) % 8) + body


def fill(address: int, count: int) -> bytes:
    return struct.pack("<QQQQII", address, 0, count, 1, 7, 4)


def define_graph(
    device: Connection, handle: int, description: bytes, count: int, operation: int = GRAPH_DEFINE
) -> wire.Reply:
    segments = [description[at : at + (1 << 20)] for at in range(0, len(description), 1 << 20)]
    body = struct.pack("<IIQII", handle, 1, len(description), count, 0)
    device.send(
        wire.command(operation, body, call=7000 + handle, context=1, bulk_count=len(segments)),
        bulk=segments,
    )
    [reply] = device.replies()
    return reply


def test_graphs_with_wrong_handles_and_ranges(control, lease: Lease) -> None:
    with Connection(lease).open() as session, wire.open_device(lease, session.session) as device:
        assert wire.create_context(device).status == 0
        allocated = device.ask(20, struct.pack("<Q", 4096), context=1)
        (address,) = struct.unpack("<Q", allocated.body)
        right = node(FILL, 0, fill(address, 1024))
        assert define_graph(device, 1, right, 1).status == 0
        assert define_graph(device, 1, right, 1).status == 400  # in use
        wrong = {
            "beyond the end": (node(FILL, 0, fill(address, 1025)), 1),
            "nowhere": (node(FILL, 0, fill(0x1000, 1)), 1),
            "no such kernel": (node(KERNEL, 0, struct.pack("<IIII", 9, 9, 0, 0) + bytes(48)), 400),
            "no such event": (node(RECORD, 0, struct.pack("<II", 5, 5)), 400),
            "copy from nowhere": (
                node(COPY, 0, struct.pack("<9Q", address, 64, 1, 64, 64, 1, 64, 1, 1)),
                1,
            ),
        }
        for handle, (what, (description, status)) in enumerate(wrong.items(), start=10):
            assert define_graph(device, handle, description, 1).status == status, what
        # What is wrong in an update is an error; the node stays as it was.
        assert define_graph(device, 1, node(FILL, 1, fill(address, 1)), 1, GRAPH_UPDATE).status == 1
        assert define_graph(device, 1, node(EMPTY, 0), 1, GRAPH_UPDATE).status == 1
        device.send(wire.command(GRAPH_LAUNCH, struct.pack("<IIII", 77, 1, 1, 0), context=1))
        device.send(wire.command(GRAPH_LAUNCH, struct.pack("<IIII", 1, 1, 1, 0), context=1))
        assert device.ask(wire.CTX_SYNCHRONIZE, context=1).status == 0
        errors = [
            struct.unpack_from("<iH", body)
            for kind, body in wire.event_kinds(device.events)
            if kind == wire.ASYNC_ERROR
        ]
        assert errors == [(400, GRAPH_LAUNCH)]
        back = device.ask(26, struct.pack("<QQQQIIQ", address, 4096, 0, 0, 1, 0, 0), context=1)
        assert b"".join(back.bulk) == struct.pack("<I", 7) * 1024


BAD_GRAPHS = {
    "depends on itself": (node(EMPTY, 0, before=(0,)), 1),
    "a cycle": (node(EMPTY, 0, before=(1,)) + node(EMPTY, 1, before=(0,)), 2),
    "fewer than it says": (node(EMPTY, 0), 2),
    "more than it says": (node(EMPTY, 0) + node(EMPTY, 1), 1),
    "wrong index": (node(EMPTY, 3), 1),
    "unknown kind": (node(99, 0), 1),
    "no room for its dependencies": (struct.pack("<IIII", EMPTY, 0, 1, 0xFFFFFFFF), 1),
    "too many": (node(EMPTY, 0), MAX_NODES + 1),
    "sizes that overflow": (
        node(COPY, 0, struct.pack("<9Q", 0, *[1 << 39] * 8)),
        1,
    ),
    "huge parameters": (
        node(KERNEL, 0, struct.pack("<IIII", 1, 1, 0, 0) + bytes(44) + b"\xff\xff\xff\xff"),
        1,
    ),
}


def test_bad_graphs_end_the_session_only(control, hostile_pool: Pool, lease: Lease) -> None:
    for what, (description, count) in BAD_GRAPHS.items():
        with (
            Connection(lease).open() as session,
            wire.open_device(lease, session.session) as device,
        ):
            assert wire.create_context(device).status == 0
            with pytest.raises(Refused) as refused:
                define_graph(device, 1, description, count)
            assert refused.value.code == wire.BAD_FRAME, what
    assert hostile_pool.broker is not None and hostile_pool.broker.poll() is None


def test_nodes_of_a_session_are_limited(control, lease: Lease) -> None:
    """Two graphs of as many nodes as a graph may have; no third one until one is gone."""
    largest = b"".join(node(EMPTY, index) for index in range(MAX_NODES))
    with Connection(lease).open() as session, wire.open_device(lease, session.session) as device:
        assert wire.create_context(device).status == 0
        device.socket.settimeout(60)
        assert define_graph(device, 1, largest, MAX_NODES).status == 0
        assert define_graph(device, 2, largest, MAX_NODES).status == 0
        assert define_graph(device, 3, node(EMPTY, 0), 1).status == 2
        device.send(wire.command(GRAPH_DESTROY, struct.pack("<II", 1, 1), context=1))
        assert define_graph(device, 3, node(EMPTY, 0), 1).status == 0


def test_no_session_is_left(hostile_pool: Pool) -> None:
    wait_for("no session", lambda: hostile_pool.sessions() == [], 15)
    assert hostile_pool.used_mib("main") == 0
