"""The byte plane of virtual machines: programs reach their slice through a port, whatever dies on
the way, and whatever another machine sends."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.functional import namespaces
from tests.functional.broker_host import MIB, make_lease
from tests.functional.guest_machine import Host, Machine, helper_program
from tests.functional.pool import wait_for
from tests.programs.catalog import DRIVER_PROGRAMS, RUNTIME_PROGRAMS, Program
from tests.programs.toolchain import Compiler

UNAVAILABLE = 46  # CUDA_ERROR_DEVICE_UNAVAILABLE
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")


@pytest.fixture
def host() -> Iterator[Host]:
    with Host.running() as own:
        yield own


def program(name: str) -> Program:
    return next(p for p in [*RUNTIME_PROGRAMS, *DRIVER_PROGRAMS] if p.name == name)


def check(machine: Machine, name: str, compiler: Compiler) -> None:
    """The program checks its own results."""
    chosen = program(name)
    done = machine.run(chosen.command(compiler), chosen.environment)
    problem = chosen.problem(done.returncode, done.stdout)
    assert problem is None, f"{problem}\n{done.stderr}\n{machine.log()}"


@contextlib.contextmanager
def looping(machine: Machine, compiler: Compiler) -> Iterator[subprocess.Popen[str]]:
    """A program that computes until something fails, and says what."""
    with machine.started([str(compiler.driver("loop"))]) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == "ready\n", line + machine.log()
        yield process


def fails(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 9, output
    assert f"error {UNAVAILABLE}, again {UNAVAILABLE}" in output


def test_programs_run_through_the_port(host: Host, compiler: Compiler) -> None:
    machine = host.machine("vm")
    for name in ("reduction", "streams_events", "callbacks", "graphs", "printf", "pools"):
        check(machine, name, compiler)
    host.wait_idle()


def test_several_programs_at_once(host: Host, compiler: Compiler) -> None:
    machine = host.machine("vm")
    with contextlib.ExitStack() as stack:
        loops = [stack.enter_context(looping(machine, compiler)) for _ in range(3)]
        assert {(s.carrier, s.lease) for s in host.sessions()} == {
            ("virtio-serial", host.leases["vm"].id)
        }
        assert sorted(s.pid for s in host.sessions()) == sorted(p.pid for p in loops)
        others = [
            stack.enter_context(machine.started(program(name).command(compiler)))
            for name in ("matmul", "transpose", "threads_streams")
        ]
        for other in others:
            output, _ = other.communicate(timeout=300)
            assert (other.returncode, output.splitlines()[-1]) == (0, "ok"), output
        assert all(loop.poll() is None for loop in loops)
        assert machine.status()["connections"] >= 6  # a session and a device each
        # One is killed: its session ends, the others go on.
        loops[0].send_signal(signal.SIGKILL)
        wait_for("its session's end", lambda: len(host.sessions()) == 2, 20)
        assert all(loop.poll() is None for loop in loops[1:])
    host.wait_idle()


def test_the_helper_is_killed(host: Host, compiler: Compiler) -> None:
    machine = host.machine("vm")
    for number in (signal.SIGKILL, signal.SIGTERM):
        with looping(machine, compiler) as process:
            machine.end_helper(number)
            fails(process)
            machine.start_helper()
            machine.wait_ready()
            host.wait_idle()
            check(machine, "vector_add", compiler)


def test_no_ring_is_offered_through_a_port(host: Host, compiler: Compiler) -> None:
    """Nothing of the host's memory can be handed to a guest that way."""
    host.broker.settings.rings = True
    machine = host.machine("vm")
    with looping(machine, compiler):
        assert [s.carrier for s in host.sessions()] == ["virtio-serial"]
    check(machine, "vector_add", compiler)


def test_a_worker_is_killed(host: Host, compiler: Compiler) -> None:
    machine = host.machine("vm")
    with looping(machine, compiler) as one, looping(machine, compiler) as other:
        [victim] = [s for s in host.sessions() if s.pid == one.pid]
        os.kill(victim.workers[0].pid, signal.SIGKILL)
        fails(one)
        assert other.poll() is None
    host.wait_idle()


def test_the_broker_is_killed(host: Host, compiler: Compiler) -> None:
    machine = host.machine("vm")
    with looping(machine, compiler) as process:
        host.broker.stop(signal.SIGKILL)
        fails(process)
    wait_for("the helper to notice", lambda: machine.status()["exit_status"] == 4)
    host.start()
    host.push()
    machine.wait_ready()
    check(machine, "vector_add", compiler)


def test_a_gpupoold_that_comes_back_disturbs_nobody(host: Host, compiler: Compiler) -> None:
    machine = host.machine("vm")
    with looping(machine, compiler) as process:
        before = [s.id for s in host.sessions()]
        assert host.broker.channel is not None
        host.broker.channel.close()
        host.broker.connect()
        host.push()
        assert [s.id for s in host.sessions()] == before
        assert process.poll() is None
        # Another port for the same lease: that is another device, and the old one is gone.
        host.leases["vm"].port = ""
        host.push()
        fails(process)
    host.wait_idle()


def test_the_lease_ends(host: Host, compiler: Compiler) -> None:
    machine = host.machine("vm")
    with looping(machine, compiler) as process:
        lease = host.leases.pop("vm")
        host.push()
        fails(process)
    wait_for("the helper to notice", lambda: machine.status()["exit_status"] == 4)
    done = machine.run(program("vector_add").command(compiler))
    assert done.returncode != 0
    assert "no session: no GPU: the port" in done.stderr
    host.leases["vm"] = lease
    host.push()
    machine.wait_ready()
    check(machine, "vector_add", compiler)


def test_what_the_host_refuses_is_told(host: Host, compiler: Compiler) -> None:
    machine = host.machine("vm", max_sessions=1)
    with looping(machine, compiler):
        done = machine.run(program("vector_add").command(compiler))
        assert done.returncode != 0
        assert "already has 1 sessions, the most that are allowed" in done.stderr


def test_a_lease_by_another_name_is_refused(host: Host, compiler: Compiler) -> None:
    """A port serves its own lease, also for somebody who knows the key of another."""
    machine = host.machine("vm")
    other = host.machine("other")
    text = machine.lease_file.read_text()
    key = host.leases["other"].key.hex()
    machine.lease_file.write_text(text.replace("00" * 32, key))
    assert machine.run(program("vector_add").command(compiler)).returncode != 0
    machine.lease_file.write_text(text)
    check(machine, "vector_add", compiler)
    check(other, "vector_add", compiler)


def test_status_says_why(host: Host) -> None:
    machine = Machine(host.root / "vm")
    host.machines["vm"] = machine
    assert machine.status()["exit_status"] == 6
    machine.start_helper()
    assert machine.status()["exit_status"] == 3
    assert "no port" in machine.status()["sentence"]
    machine.port.plug()
    machine.port.guest_path.touch()  # a device that is no port
    machine.port.guest_path.unlink()
    lease = make_lease(memory=512 * MIB, gpu="", port=str(machine.port.host_path))
    host.leases["vm"] = lease
    host.push()
    machine.wait_ready()
    assert machine.status()["sentence"] == "GPU: slice s0, 512 MiB, 25 % of a GPU"
    # A new size is told without being asked.
    lease.slices[0].memory_bytes = 256 * MIB
    host.push()
    wait_for("the new size", lambda: "256 MiB" in machine.status()["sentence"])
    if os.geteuid() == 0:
        refused = namespaces.in_child(
            lambda: subprocess.run(
                [helper_program(), "status", "--run-dir", machine.run_dir],
                capture_output=True,
                text=True,
                check=False,
            ).stdout,
            enter=lambda: namespaces.become(30003),
        )
        assert "not in the group gpupool" in refused
    host.leases.clear()
    host.push()
    wait_for("the port without a host", lambda: machine.status()["exit_status"] == 4)
    machine.end_helper(signal.SIGTERM)
    assert machine.status()["exit_status"] == 6
    assert not (machine.run_dir / "guest.sock").exists()


def test_status_names_a_gpu_that_fails(host: Host) -> None:
    host.broker.settings.driver_directory = str(host.root)
    machine = Machine(host.root / "vm")
    host.machines["vm"] = machine
    machine.port.plug()
    machine.start_helper()
    host.leases["vm"] = make_lease(gpu="", port=str(machine.port.host_path))
    host.push()
    wait_for("the problem", lambda: machine.status()["exit_status"] == 5)
    assert "no GPU: slice s0: " in machine.status()["sentence"]


@needs_root
def test_a_program_finds_the_helper_by_itself(host: Host, compiler: Compiler) -> None:
    machine = host.machine("vm")
    environment = machine.environment
    del environment["GPUPOOL_LEASE_FILE"]
    Path("/run/gpupool").mkdir(exist_ok=True)

    def enter() -> None:
        namespaces.unshare(namespaces.NEWNS)
        namespaces.bind(machine.run_dir, Path("/run/gpupool"))

    command = program("vector_add").command(compiler)

    def run() -> str:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    assert namespaces.in_child(run, enter=enter) == "ok\n"


# ---- A machine that sends what it likes ----------------------------------------------------------


def noise(machine: Machine, seed: int) -> None:
    """Takes the helper's place and sends rubbish, frames of a real conversation among it."""
    chance = random.Random(seed)
    record = recorded_conversation(machine)
    for _ in range(40):
        with socket.socket(socket.AF_UNIX) as port:
            port.connect(str(machine.port.guest_path))  # waits until the one before has gone
            data = bytearray(record)
            for _ in range(chance.randrange(0, 6)):
                at = chance.randrange(len(data))
                match chance.randrange(4):
                    case 0:
                        data[at] = chance.randrange(256)
                    case 1:
                        del data[at : at + chance.randrange(1, 200)]
                    case 2:
                        data[at:at] = chance.randbytes(chance.randrange(1, 200))
                    case _:
                        data[at:at] = data[chance.randrange(len(data)) :][:20000]
            port.setblocking(False)
            sent = 0
            for _ in range(3000):
                with contextlib.suppress(BlockingIOError):
                    port.recv(1 << 16)
                with contextlib.suppress(BlockingIOError):
                    sent += port.send(data[sent : sent + 65536])
                if sent >= len(data):
                    break


def recorded_conversation(machine: Machine) -> bytes:
    """What a helper sends for some clients. The machine's own helper does not run meanwhile."""
    assert machine.helper is None
    recorded = bytearray()
    listener = socket.socket(socket.AF_UNIX)
    path = machine.root / "tap"
    listener.bind(str(path))
    listener.listen(1)
    run_dir = machine.root / "tapped"
    helper = subprocess.Popen(
        [helper_program(), "run", "--port", path, "--run-dir", run_dir], stderr=subprocess.DEVNULL
    )
    try:
        listener.settimeout(20)
        guest = listener.accept()[0]
        port = socket.socket(socket.AF_UNIX)
        port.connect(str(machine.port.guest_path))
        clients: list[socket.socket] = []
        for round_number in range(400):
            for source, target in ((guest, port), (port, guest)):
                source.settimeout(0.005)
                with contextlib.suppress(TimeoutError):
                    data = source.recv(1 << 16)
                    target.settimeout(20)
                    target.sendall(data)
                    if source is guest:
                        recorded += data
            if round_number % 50 == 20:
                client = socket.socket(socket.AF_UNIX)
                client.connect(str(run_dir / "guest.sock"))
                client.sendall(b"GPUF" + bytes(3000))
                clients.append(client)
        for one in (*clients, guest, port, listener):
            one.close()
    finally:
        helper.kill()
        helper.wait()
    shutil.rmtree(run_dir, ignore_errors=True)
    path.unlink()
    assert len(recorded) > 33000 + 7 * 3000, "it never got as far as its clients' data"
    return bytes(recorded)


def test_rubbish_at_one_port_harms_no_other(host: Host, compiler: Compiler) -> None:
    bad, good = host.machine("bad"), host.machine("good")
    with looping(good, compiler) as process:
        bad.end_helper()
        noise(bad, 1)
        assert host.broker.process is not None and host.broker.process.poll() is None
        check(good, "reduction", compiler)
        assert process.poll() is None
        # And the bad one may come to its senses.
        bad.start_helper()
        bad.wait_ready()
        check(bad, "vector_add", compiler)
        assert process.poll() is None
    host.wait_idle()


def test_a_machine_that_never_reads_is_alone_with_that(host: Host, compiler: Compiler) -> None:
    bad, good = host.machine("bad"), host.machine("good")
    with looping(good, compiler) as process:
        bad.end_helper()
        record = recorded_conversation(bad)
        with socket.socket(socket.AF_UNIX) as port:
            port.connect(str(bad.port.guest_path))
            port.settimeout(1)
            with contextlib.suppress(TimeoutError):
                for _ in range(400):
                    port.sendall(record)
            check(good, "vector_add", compiler)
        assert process.poll() is None
        assert host.broker.process is not None
        memory = Path(f"/proc/{host.broker.process.pid}/status").read_text()
        resident = int(memory.partition("VmRSS:")[2].split()[0]) >> 10
        assert resident < 256
