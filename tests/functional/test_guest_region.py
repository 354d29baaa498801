"""Rings in the region that a virtual machine shares with its host: programs are right, slots go to
one at a time, and whatever a guest writes into its region harms its own sessions only."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpupoold.guests.region import HEADER_BYTES
from gpupoold.leases import broker_pb2 as pb
from tests.functional import wire
from tests.functional.broker_host import MIB
from tests.functional.guest_machine import Host, Machine
from tests.functional.pool import wait_for
from tests.functional.ring import (
    ACCEPTS_RING,
    COMMAND_HEAD,
    COMMAND_TAIL,
    CONTROL_BYTES,
    TAKES_RING,
    TAKES_SOCKET,
    TO_CLIENT,
    TO_WORKER,
    RingConnection,
)
from tests.functional.test_guest_port import check, fails, looping, program
from tests.functional.wire import Closed, Connection, Lease, Refused
from tests.programs.toolchain import Compiler

REGION_MIB = 2
SLOTS = 5  # of 388 KiB each, behind the first 64 KiB of 2 MiB
FIRST_SLOT = 65536
EPOCH = 128  # where it lies in a slot
REFUSED = 4  # how a worker ends that has said why
SANITIZER = 1  # and one with AddressSanitizer in place of a signal


@pytest.fixture
def host() -> Iterator[Host]:
    with Host.running() as own:
        own.broker.settings.regions = True
        own.broker.settings.spinners = 1
        yield own


def lease_of(machine: Machine) -> Lease:
    """What a client in the machine needs: the helper's socket, and no key."""
    return Lease(bytes(16), bytes(32), str(machine.run_dir / "guest.sock"), None)


def carriers(host: Host) -> list[str]:
    return sorted(s.carrier for s in host.sessions())


@contextlib.contextmanager
def connected(machine: Machine) -> Iterator[tuple[Connection, RingConnection]]:
    """A session and a data connection with a slot, which is taken."""
    lease = lease_of(machine)
    with (
        Connection(lease).open() as session,
        RingConnection(lease).open(session=session.session) as device,
    ):
        assert device.region is not None
        device.choose(TAKES_RING)
        assert wire.create_context(device).status == 0
        yield session, device


def kill(host: Host, session: pb.SessionState, why: str) -> None:
    assert host.broker.channel is not None
    request = pb.KillSession(session=session.id, why=why)
    [answer] = host.broker.channel.ask(pb.ToBroker(kill_session=request))
    assert answer.code == pb.OK


def wait_for_end_of(host: Host, session: bytes) -> None:
    """Of its workers, too."""
    assert host.broker.channel is not None
    host.broker.channel.event("session_ended", matches=lambda ended: ended.session == session)


def test_programs_run_over_slots(host: Host, compiler: Compiler) -> None:
    machine = host.machine("vm", REGION_MIB)
    region = machine.status()["region"]
    assert (region["state"], region["path"]) == ("usable", str(machine.region))
    assert region["bytes"] == REGION_MIB * MIB
    assert min(region["read_mib_per_second"], region["write_mib_per_second"]) >= 100
    for name in (
        "reduction",
        "streams_events",
        "callbacks",
        "graphs",
        "printf",
        "pools",
        "transpose",
        "threads_streams",
        "fork",
    ):
        check(machine, name, compiler)
    with looping(machine, compiler):
        assert carriers(host) == ["ivshmem"]
    host.wait_idle()


def test_who_finds_no_slot_uses_the_port(host: Host, compiler: Compiler) -> None:
    machine = host.machine("vm", REGION_MIB)
    for _ in range(2):  # all slots come back
        with contextlib.ExitStack() as stack:
            loops = [stack.enter_context(looping(machine, compiler)) for _ in range(SLOTS + 2)]
            assert carriers(host) == ["ivshmem"] * SLOTS + ["virtio-serial"] * 2
            check(machine, "reduction", compiler)
            assert all(loop.poll() is None for loop in loops)
            # A slot is free when its worker is gone, too: some time after its client.
            [first] = [s.id for s in host.sessions() if s.pid == loops[0].pid]
            loops[0].kill()
            wait_for_end_of(host, first)
            stack.enter_context(looping(machine, compiler))
            assert carriers(host).count("ivshmem") == SLOTS
        host.wait_idle()


def test_regions_are_off_unless_configured(host: Host, compiler: Compiler) -> None:
    host.broker.settings.regions = False
    machine = host.machine("vm", REGION_MIB)
    with looping(machine, compiler):
        assert carriers(host) == ["virtio-serial"]
    host.broker.settings.regions = True
    host.push()
    with looping(machine, compiler):
        assert carriers(host) == ["ivshmem"]


def test_a_slot_in_use_is_not_given_again_when_regions_are_switched(
    host: Host, compiler: Compiler
) -> None:
    machine = host.machine("vm", REGION_MIB)
    with connected(machine) as (_, first):
        for regions in (False, True):
            host.broker.settings.regions = regions
            host.push()
        with contextlib.ExitStack() as stack:
            others = [stack.enter_context(connected(machine)) for _ in range(SLOTS - 1)]
            assert len({first.offset, *(device.offset for _, device in others)}) == SLOTS
            # The end of one is nothing to the others.
            first.close()
            for _, device in others:
                assert device.ask(wire.CTX_SYNCHRONIZE, context=1).status == 0


def test_a_slow_region_is_not_used_and_status_says_so(host: Host, compiler: Compiler) -> None:
    machine = host.machine("vm", REGION_MIB, ["--region-speed", "1000000000"])
    status = machine.status()
    assert status["region"]["state"] == "slow"
    assert "too slow to be used: reads " in status["sentence"]
    with looping(machine, compiler):
        wait_for("the carrier", lambda: carriers(host) == ["virtio-serial"])
    # What was declined is nobody's.
    for _ in range(SLOTS + 1):
        check(machine, "vector_add", compiler)
    machine.end_helper()
    machine.helper_options = []
    machine.start_helper()
    machine.wait_ready()
    with looping(machine, compiler):
        assert carriers(host) == ["ivshmem"]


@pytest.mark.parametrize("wrong", ["inode", "bytes", "path", "link"])
def test_another_file_is_not_used(host: Host, compiler: Compiler, wrong: str) -> None:
    machine = host.machine("vm", REGION_MIB)
    lease = host.leases["vm"]
    if wrong == "inode":
        lease.region.inode += 1
    elif wrong == "bytes":
        lease.region.bytes *= 2
    elif wrong == "path":
        lease.region.path += "-not"
    else:
        link = Path(lease.region.path + "-link")
        link.symlink_to(lease.region.path)
        lease.region.path = str(link)
    host.push()
    with looping(machine, compiler):
        assert carriers(host) == ["virtio-serial"]
    assert f"the region {lease.region.path} is not used: " in host.broker.log()


# ---- The agreement -------------------------------------------------------------------------------


def test_a_client_may_decline_or_know_nothing_of_it(host: Host) -> None:
    machine = host.machine("vm", REGION_MIB)
    lease = lease_of(machine)
    with Connection(lease).open() as session:
        for _ in range(SLOTS + 1):  # what was declined is free again
            with RingConnection(lease).open(session=session.session) as device:
                assert device.offset >= FIRST_SLOT
                device.choose(TAKES_SOCKET)
                assert wire.create_context(device).status == 0
        with RingConnection(lease).open(session=session.session, accepts=ACCEPTS_RING) as device:
            assert device.offer == bytes(16)
            assert wire.create_context(device).status == 0
        with wire.open_device(lease, session.session, minor=1, minor_min=1) as device:
            assert device.offer == b""
            assert wire.create_context(device).status == 0
    host.wait_idle()


# ---- Ends ----------------------------------------------------------------------------------------


def test_a_slot_goes_to_nobody_else_while_its_client_lives(host: Host, compiler: Compiler) -> None:
    """It may be in the middle of writing, whatever has become of its session."""
    machine = host.machine("vm", REGION_MIB)
    with connected(machine) as (_, device):
        before = device.offset
        [shown] = host.sessions()
        kill(host, shown, "a test")
        assert device.region is not None
        # At once: a region whose lease has ended may be unplugged.
        wait_for("its end in the slot", lambda: device.region[EPOCH : EPOCH + 4] == bytes(4), 20)
        wait_for("the end", device.gone, 20)
        host.wait_idle()
        with contextlib.ExitStack() as stack:
            offsets = []
            for _ in range(SLOTS - 1):
                _, other = stack.enter_context(connected(machine))
                offsets.append(other.offset)
            assert before not in offsets
            assert len(set(offsets)) == SLOTS - 1
            # Late, as by a thread that was stopped in between.
            device.region[CONTROL_BYTES : CONTROL_BYTES + 1000] = b"\xff" * 1000
            device.region[TO_WORKER : TO_WORKER + 8] = b"\xff" * 8
            stack.enter_context(looping(machine, compiler))
            assert carriers(host) == ["ivshmem"] * (SLOTS - 1) + ["virtio-serial"]
    with connected(machine) as (_, other):
        wait_for("idle", lambda: len(host.sessions()) == 1, 20)
    host.wait_idle()
    with contextlib.ExitStack() as stack:
        for _ in range(SLOTS):
            stack.enter_context(connected(machine))
        assert carriers(host) == ["ivshmem"] * SLOTS


def test_a_worker_is_killed(host: Host, compiler: Compiler) -> None:
    machine = host.machine("vm", REGION_MIB)
    with looping(machine, compiler) as one, looping(machine, compiler) as other:
        assert carriers(host) == ["ivshmem"] * 2
        [victim] = [s for s in host.sessions() if s.pid == one.pid]
        os.kill(victim.workers[0].pid, signal.SIGKILL)
        fails(one)
        check(machine, "vector_add", compiler)
        assert other.poll() is None
    host.wait_idle()


def test_a_client_is_killed(host: Host, compiler: Compiler) -> None:
    machine = host.machine("vm", REGION_MIB)
    with looping(machine, compiler) as other:
        for _ in range(SLOTS + 1):
            with looping(machine, compiler) as process:
                assert carriers(host) == ["ivshmem"] * 2
                process.kill()
            wait_for("the session's end", lambda: len(host.sessions()) == 1, 20)
        assert other.poll() is None
    host.wait_idle()


def test_the_helper_is_killed(host: Host, compiler: Compiler) -> None:
    machine = host.machine("vm", REGION_MIB)
    for number in (signal.SIGKILL, signal.SIGTERM):
        with looping(machine, compiler) as process:
            machine.end_helper(number)
            fails(process)
            machine.start_helper()
            machine.wait_ready()
            host.wait_idle()
            with looping(machine, compiler):
                assert carriers(host) == ["ivshmem"]
            check(machine, "reduction", compiler)


def test_the_broker_is_killed(host: Host, compiler: Compiler) -> None:
    machine = host.machine("vm", REGION_MIB)
    with looping(machine, compiler) as process:
        host.broker.stop(signal.SIGKILL)
        fails(process)
    wait_for("the helper to notice", lambda: machine.status()["exit_status"] == 4)
    host.start()
    host.push()
    machine.wait_ready()
    with looping(machine, compiler):
        assert carriers(host) == ["ivshmem"]
    check(machine, "reduction", compiler)


def test_a_gpupoold_that_comes_back_disturbs_nobody(host: Host, compiler: Compiler) -> None:
    machine = host.machine("vm", REGION_MIB)
    with looping(machine, compiler) as process:
        assert host.broker.channel is not None
        host.broker.channel.close()
        host.broker.connect()
        host.push()
        with looping(machine, compiler):
            assert carriers(host) == ["ivshmem"] * 2
        # The region goes; who has a slot of it keeps that.
        host.leases["vm"].ClearField("region")
        host.push()
        with looping(machine, compiler):
            assert carriers(host) == ["ivshmem", "virtio-serial"]
        assert process.poll() is None


# ---- A machine that writes what it likes ---------------------------------------------------------


@pytest.mark.parametrize("value", [1 << 40, 1, (1 << 64) - 1])
def test_impossible_positions_are_told(host: Host, value: int) -> None:
    machine = host.machine("vm", REGION_MIB)
    with connected(machine) as (_, device):
        device.set_word(TO_WORKER, COMMAND_TAIL, value)
        with pytest.raises(Refused) as refused:
            device.receive_frame()
        assert refused.value.code == wire.BAD_FRAME
        assert "written" in refused.value.sentence
        with pytest.raises(Closed):
            device.receive(1)
    assert host.broker.channel is not None
    assert "written" in host.broker.channel.event("worker_ended").why
    # The client left when it had been told; what counts is why.
    assert "written" in host.broker.channel.event("session_ended").why


def test_frames_are_checked_as_on_a_socket(host: Host) -> None:
    machine = host.machine("vm", REGION_MIB)
    for wrong in ({"magic": 1}, {"epoch": 1}, {"sequence": 99}):
        with connected(machine) as (_, device):
            device.send_raw(device.frame(wire.COMMANDS, b"", **wrong))
            with pytest.raises(Refused):
                device.receive_frame()


def test_a_file_that_is_cut_off_ends_its_own_sessions(host: Host, compiler: Compiler) -> None:
    """The guest cannot do that; QEMU, if somebody has taken it over, can."""
    bad, good = host.machine("bad", REGION_MIB), host.machine("good", REGION_MIB)
    with looping(good, compiler) as process, connected(bad) as (_, device):
        assert bad.region is not None
        os.truncate(bad.region, 4096)
        device.ring_bell()
        wait_for("the end", device.gone, 20)
        assert host.broker.channel is not None
        ended = host.broker.channel.event(
            "worker_ended", matches=lambda e: e.lease == host.leases["bad"].id
        )
        assert not ended.expected
        assert ended.signal == signal.SIGBUS or ended.exit_status == SANITIZER
        with looping(bad, compiler):
            # The session without a worker is still there.
            assert carriers(host) == ["ivshmem", "virtio-serial", "virtio-serial"]
        check(good, "reduction", compiler)
        assert process.poll() is None
        assert bad.region.stat().st_size == 4096
        # Its memory is unmapped by the file's size: this process must not touch it any more.
        device.region = None
    assert host.broker.process is not None
    assert host.broker.process.poll() is None


def scribble(region: Path, seed: int, stop: threading.Event) -> None:
    """Writes rubbish everywhere but where gpupoold's header is, control words above all."""
    chance = random.Random(seed)
    size = region.stat().st_size
    slot = (size - FIRST_SLOT) // SLOTS & ~4095
    with region.open("r+b", buffering=0) as file:
        while not stop.is_set():
            if chance.randrange(2):
                at = FIRST_SLOT + chance.randrange(SLOTS) * slot + chance.randrange(4096)
                data = chance.randbytes(chance.choice((1, 8, 64)))
            else:
                at = chance.randrange(HEADER_BYTES, size)
                data = chance.randbytes(chance.randrange(1, 4096))[: size - at]
            os.pwrite(file.fileno(), data, at)


def test_rubbish_in_a_region_ends_its_own_sessions(host: Host, compiler: Compiler) -> None:
    bad, good = host.machine("bad", REGION_MIB), host.machine("good", REGION_MIB)
    assert bad.region is not None
    stop = threading.Event()
    with looping(good, compiler) as process:
        writer = threading.Thread(target=scribble, args=(bad.region, 3, stop))
        with contextlib.ExitStack() as stack:
            for _ in range(SLOTS):
                stack.enter_context(bad.started([str(compiler.driver("loop"))]))
            writer.start()
            try:
                for name in ("reduction", "transpose"):
                    check(good, name, compiler)
                # Programs of the bad one fail, wait or are lucky; none harms anybody else.
                for _ in range(4):
                    with (
                        bad.started(program("vector_add").command(compiler)) as another,
                        contextlib.suppress(subprocess.TimeoutExpired),
                    ):
                        another.communicate(timeout=3)
            finally:
                stop.set()
                writer.join()
            assert process.poll() is None
        wait_for(
            "the bad sessions' end",
            lambda: {s.lease for s in host.sessions()} == {host.leases["good"].id},
            30,
        )
        assert host.broker.process is not None
        assert host.broker.process.poll() is None
        # None of its workers crashed: each had something to say.
        host.state()
        assert host.broker.channel is not None
        ends = [e.worker_ended for e in host.broker.channel.events if e.HasField("worker_ended")]
        unexpected = [end for end in ends if not end.expected]
        assert unexpected
        assert {(e.signal, e.exit_status) for e in unexpected} == {(0, REFUSED)}, unexpected
        assert all(end.why for end in unexpected)
        # And the bad one may come to its senses.
        for name in ("reduction", "vector_add"):
            check(bad, name, compiler)
        with looping(bad, compiler):
            assert carriers(host) == ["ivshmem"] * 2
        assert process.poll() is None
    host.wait_idle()


def test_room_that_cannot_be_ends_the_session(host: Host) -> None:
    machine = host.machine("vm", REGION_MIB)
    with connected(machine) as (_, device):
        device.set_word(TO_CLIENT, COMMAND_HEAD, 1 << 40)
        count = device.command_bytes // 72 + 500
        for start in range(0, count, 500):
            if device.gone():
                break
            body = b"".join(
                wire.command(wire.MEM_GET_INFO, call=start + i + 1000, context=1)
                for i in range(500)
            )
            device.send_raw(device.frame(wire.COMMANDS, body))
        wait_for("the end", device.gone, 20)
