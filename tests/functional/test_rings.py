"""Sessions over rings in shared memory: what is agreed, and that nothing that a client does to the
region harms anybody but its own session."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.functional import ring as ring_module
from tests.functional import wire
from tests.functional.pool import Pool, wait_for
from tests.functional.ring import (
    BULK_HEAD,
    BULK_TAIL,
    COMMAND_HEAD,
    COMMAND_TAIL,
    TAKES_RING,
    TAKES_SOCKET,
    TO_CLIENT,
    TO_WORKER,
    RingConnection,
)
from tests.functional.wire import Closed, Connection, Lease, Refused
from tests.programs.toolchain import Compiler


@pytest.fixture(scope="module")
def ring_pool(simulated_driver) -> Iterator[Pool]:
    with Pool(driver_directory=simulated_driver) as pool:
        pool.slice("main", compute=25, memory=4096)
        yield pool


@pytest.fixture
def lease(ring_pool: Pool) -> Iterator[Lease]:
    with ring_pool.started("main", ["sh", "-c", "cat $GPUPOOL_LEASE_FILE; exec cat"]) as holder:
        assert holder.stdout is not None
        yield Lease.parse(holder.stdout.readline())


@pytest.fixture
def session(lease: Lease) -> Iterator[Connection]:
    """A control connection."""
    with Connection(lease).open() as connection:
        yield connection


# ---- The agreement -----------------------------------------------------------------------------


def test_a_client_of_the_first_version_stays_on_the_socket(
    lease: Lease, session: Connection
) -> None:
    with wire.open_device(lease, session.session, minor=1, minor_min=1) as device:
        assert device.minor == 1
        assert device.offer == b""
        assert wire.create_context(device).status == 0


def test_a_client_may_decline(lease: Lease, session: Connection) -> None:
    with RingConnection(lease).open(session=session.session) as device:
        assert device.region is not None
        device.choose(TAKES_SOCKET)
        assert wire.create_context(device).status == 0


def test_over_tcp_nothing_is_offered(simulated_driver) -> None:
    options = {"broker": {"tcp_listen": "127.0.0.1:0"}}
    with Pool(driver_directory=simulated_driver, options=options) as pool:
        pool.slice("main")
        with pool.started("main", ["sh", "-c", "cat $GPUPOOL_LEASE_FILE; exec cat"]) as holder:
            assert holder.stdout is not None
            lease = Lease.parse(holder.stdout.readline())
            with (
                Connection(lease, tcp=True).open() as session,
                RingConnection(lease, tcp=True).open(session=session.session) as device,
            ):
                assert device.offer == bytes(16)
                assert wire.create_context(device).status == 0


@pytest.mark.parametrize("choice", [b"", b"\x01\0\0", struct.pack("<Q", 7)])
def test_a_wrong_choice_or_none_ends_the_session(
    lease: Lease, session: Connection, choice: bytes
) -> None:
    with RingConnection(lease, timeout=60).open(session=session.session) as device:
        device.socket.sendall(choice)
        with pytest.raises(Closed):
            device.receive(1)  # after 5 s, where nothing is wrong but what is missing


def test_the_region_cannot_be_cut_off(lease: Lease, session: Connection) -> None:
    with RingConnection(lease).open(session=session.session) as device:
        device.choose(TAKES_RING)
        assert wire.create_context(device).status == 0
        for size in (0, 4096, 1 << 30):
            with pytest.raises(PermissionError):
                os.ftruncate(device.memory, size)
        assert device.ask(wire.CTX_SYNCHRONIZE, context=1).status == 0


# ---- Its memory --------------------------------------------------------------------------------


def blocks(file: int) -> int:
    """Bytes that the host keeps for it."""
    return os.fstat(file).st_blocks * 512


def test_memory_goes_back_to_the_host_while_a_client_keeps_the_file(lease: Lease) -> None:
    with Connection(lease).open() as session:
        device = RingConnection(lease).open(session=session.session)
        device.choose(TAKES_RING)
        assert wire.create_context(device).status == 0
        kept = os.dup(device.memory)
        assert device.region is not None
        for at in range(4096, len(device.region), 4096):
            device.region[at] = 1
        assert blocks(kept) >= len(device.region) - 4096
        region = device.region
        device.close()
        # What the worker said last may still be read.
        assert blocks(kept) > 0
    wait_for("the memory is the host's again", lambda: blocks(kept) == 0)
    assert region[4096] == 0  # and nothing faults
    os.close(kept)


def test_a_session_that_is_killed_keeps_nothing_of_the_broker(
    ring_pool: Pool, lease: Lease
) -> None:
    """Whoever keeps the connection of a killed session holds neither a descriptor nor memory."""
    assert ring_pool.broker is not None
    descriptors = Path(f"/proc/{ring_pool.broker.pid}/fd")
    maps = Path(f"/proc/{ring_pool.broker.pid}/maps")

    def held() -> int:
        return maps.read_text().count("gpupool-ring")

    kept = []
    before = len(list(descriptors.iterdir()))
    for _ in range(5):
        session = Connection(lease).open()
        device = RingConnection(lease).open(session=session.session)
        device.choose(TAKES_RING)
        assert wire.create_context(device).status == 0
        kept.append((session, device, os.dup(device.memory)))
        [own] = wait_for("the session", ring_pool.sessions)
        ring_pool.ctl("session", "kill", own["id"], check=True)
        wait_for("its end", lambda: not ring_pool.sessions())
    wait_for("no ring is left", lambda: held() == 0)
    wait_for("the memory is the host's", lambda: not any(blocks(file) for _, _, file in kept))
    wait_for("descriptors", lambda: len(list(descriptors.iterdir())) <= before + 2)
    for session, device, file in kept:
        session.close()
        device.close()
        os.close(file)


def test_rings_count_as_the_hosts_memory_that_a_slice_may_have(simulated_driver) -> None:
    options = {"broker": {"worker_host_memory": "64"}}
    with Pool(driver_directory=simulated_driver, options=options) as pool:
        pool.slice("main")
        with pool.started("main", ["sh", "-c", "cat $GPUPOOL_LEASE_FILE; exec cat"]) as holder:
            assert holder.stdout is not None
            lease = Lease.parse(holder.stdout.readline())

            def offered() -> tuple[Connection, RingConnection]:
                session = Connection(lease).open()
                device = RingConnection(lease).open(session=session.session)
                device.choose(TAKES_RING if device.region is not None else TAKES_SOCKET)
                return session, device

            # 8.5 MiB each: seven fit. The others have their sockets.
            sessions = [offered() for _ in range(8)]
            assert [device.region is not None for _, device in sessions] == [True] * 7 + [False]
            for connection in sessions[0]:
                connection.close()
            wait_for("sessions", lambda: len(pool.sessions()) == 7)
            sessions.append(offered())
            assert sessions[-1][1].region is not None
            for pair in sessions[1:]:
                for connection in pair:
                    connection.close()


# ---- Hostile clients ---------------------------------------------------------------------------

FAR = 1 << 40


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        (COMMAND_TAIL, FAR, "written"),
        (COMMAND_TAIL, 1, "written"),  # back
        (COMMAND_TAIL, (1 << 64) - 1, "written"),
    ],
)
def test_impossible_positions_are_told(
    ring_pool: Pool, lease: Lease, session: Connection, name: int, value: int, sentence: str
) -> None:
    with RingConnection(lease).open(session=session.session) as device:
        device.choose(TAKES_RING)
        assert wire.create_context(device).status == 0
        device.set_word(TO_WORKER, name, value)
        with pytest.raises(Refused) as refused:
            device.receive_frame()
        assert refused.value.code == wire.BAD_FRAME
        assert sentence in refused.value.sentence
        with pytest.raises(Closed):
            device.receive(1)
    wait_for("the reason in the log", lambda: sentence in ring_pool.logs(), 10)


def test_impossible_bulk_is_told(lease: Lease, session: Connection) -> None:
    with RingConnection(lease).open(session=session.session) as device:
        device.choose(TAKES_RING)
        assert wire.create_context(device).status == 0
        # A frame with one segment of 4 KiB behind a position that cannot be.
        head = device.frame(wire.COMMANDS, b"", [bytes(4096)])[:-4096]
        body = wire.command(wire.CTX_SYNCHRONIZE, bulk_count=1, call=99, context=1)
        head = head[:8] + struct.pack("<I", len(body)) + head[12:] + body
        device.set_word(TO_WORKER, BULK_TAIL, FAR)
        device.send_raw(head)
        with pytest.raises(Refused) as refused:
            while True:
                device.receive_frame()
        assert "written" in refused.value.sentence


@pytest.mark.parametrize("name", [COMMAND_HEAD, BULK_HEAD])
def test_impossible_room_ends_the_session(lease: Lease, session: Connection, name: int) -> None:
    with RingConnection(lease).open(session=session.session) as device:
        device.choose(TAKES_RING)
        assert wire.create_context(device).status == 0
        device.set_word(TO_CLIENT, name, FAR)
        # As many answers as there is room for, and one more.
        count = device.command_bytes // 72 + 1000
        for start in range(0, count, 1000):
            body = b"".join(
                wire.command(wire.MEM_GET_INFO, call=start + i + 1000, context=1)
                for i in range(1000)
            )
            if name == BULK_HEAD or device.gone():
                break
            device.send_raw(device.frame(wire.COMMANDS, body))
        if name == BULK_HEAD:
            # Nobody sends bulk data here: the word is not even looked at.
            assert device.ask(wire.CTX_SYNCHRONIZE, context=1).status == 0
        else:
            wait_for("the end", device.gone, 20)


def test_frames_are_checked_as_on_a_socket(lease: Lease, session: Connection) -> None:
    for wrong in ({"magic": 1}, {"epoch": 1}, {"sequence": 99}):
        with RingConnection(lease).open(session=session.session) as device:
            device.choose(TAKES_RING)
            assert wire.create_context(device).status == 0
            device.send_raw(device.frame(wire.COMMANDS, b"", **wrong))
            with pytest.raises(Refused):
                device.receive_frame()


def test_random_bytes_in_the_region(
    ring_pool: Pool, compiler: Compiler, lease: Lease, session: Connection
) -> None:
    """Whatever stands in it: the session ends, or waits; another one beside it is right."""
    numbers = random.Random(5)
    for round_ in range(12):
        with RingConnection(lease).open(session=session.session) as device:
            assert device.region is not None
            if round_ % 2:
                device.choose(TAKES_RING)
                assert wire.create_context(device).status == 0
            size = ring_module.CONTROL_BYTES + device.command_bytes
            first = 0 if round_ % 3 else 384
            device.region[first:size] = numbers.randbytes(size - first)
            if not round_ % 2:
                device.choose(TAKES_RING)
            device.ring_bell()
            done = ring_pool.run("main", [str(compiler.driver("loop")), "3"])
            assert (done.returncode, done.stdout) == (0, "ready\nok\n"), done.stderr
            wait_for("the end", device.gone, 20)


def test_bells_without_end_keep_nobody_else_waiting(
    ring_pool: Pool, compiler: Compiler, lease: Lease, session: Connection
) -> None:
    with RingConnection(lease).open(session=session.session) as device:
        device.choose(TAKES_RING)
        assert wire.create_context(device).status == 0
        for _ in range(2000):
            device.socket.sendall(b"!" * 1000)
        assert device.ask(wire.CTX_SYNCHRONIZE, context=1).status == 0
        done = ring_pool.run("main", [str(compiler.driver("loop")), "3"])
        assert (done.returncode, done.stdout) == (0, "ready\nok\n"), done.stderr
