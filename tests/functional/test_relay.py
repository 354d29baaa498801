"""Programs on one host, their GPU on another: over TLS between two brokers' relays."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.functional.broker_host import MIB
from tests.functional.pool import wait_for
from tests.functional.relay_hosts import NEAR, RelayHosts
from tests.programs.catalog import RUNTIME_PROGRAMS
from tests.programs.toolchain import Compiler

UNAVAILABLE = "error 46, again 46"  # CUDA_ERROR_DEVICE_UNAVAILABLE
#: longer than an interruption may be, and what a busy machine adds
PATIENCE = 20.0


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[RelayHosts]:
    with RelayHosts(tmp_path) as own:
        yield own


def ends_with_error(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate(timeout=PATIENCE)
    assert (process.returncode, UNAVAILABLE in output) == (9, True), output


def goes_on(process: subprocess.Popen[str], hosts: RelayHosts, seconds: float = 1.0) -> None:
    """It works for a while longer, and then ends as it is told."""
    time.sleep(seconds)
    assert process.poll() is None, (process.communicate()[0], hosts.logs())


# ---- Programs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["matmul", "fft_shared", "callbacks", "conjugate_gradient"])
def test_results_are_right(hosts: RelayHosts, compiler: Compiler, name: str) -> None:
    program = next(entry for entry in RUNTIME_PROGRAMS if entry.name == name)
    done = hosts.run(program.command(compiler, "static13"))
    assert program.problem(done.returncode, done.stdout) is None, done.stderr + hosts.logs()
    wait_for("the end of all", hosts.clean)


def test_large_copies_both_ways(hosts: RelayHosts, compiler: Compiler) -> None:
    done = hosts.run([compiler.driver("copies"), 5])
    assert done.returncode == 0 and done.stdout.endswith("ok\n"), done.stdout + hosts.logs()


def test_the_far_host_shows_who_comes(hosts: RelayHosts, compiler: Compiler) -> None:
    process = hosts.start([compiler.driver("loop")])
    assert hosts.far.channel is not None and hosts.near.channel is not None
    [far] = hosts.far.channel.state().sessions
    [near] = hosts.near.channel.state().sessions
    assert (far.carrier, far.pid) == ("relay", process.pid)
    assert far.program == near.program
    assert near.carrier == "ring"
    process.send_signal(signal.SIGKILL)
    wait_for("the end of all", hosts.clean)


def test_many_programs_start_at_once(hosts: RelayHosts, compiler: Compiler) -> None:
    """More than one host's relays may prove themselves at a time."""
    words = [str(compiler.driver("loop")), "3"]
    environment = hosts.environment()
    programs = [
        subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(24)
    ]
    for program in programs:
        output, _ = program.communicate(timeout=100)
        assert (program.returncode, output[-3:]) == (0, "ok\n"), output + hosts.logs()


def test_errors_of_programs_come_across(hosts: RelayHosts, compiler: Compiler) -> None:
    done = hosts.run([compiler.driver("errors")])
    assert done.returncode == 0, done.stdout + done.stderr


# ---- Interruptions ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["loop", "copies"])
def test_resets_are_survived(hosts: RelayHosts, compiler: Compiler, name: str) -> None:
    """Nothing is lost, nothing is done twice: the program checks each of its results."""
    process = hosts.start([compiler.driver(name)])
    before = hosts.wire.accepted
    for _ in range(10):
        time.sleep(0.1)
        hosts.wire.reset()
    wait_for("new connections", lambda: hosts.wire.accepted > before)
    goes_on(process, hosts)


@pytest.mark.parametrize("name", ["loop", "copies"])
def test_a_short_silence_is_survived(hosts: RelayHosts, compiler: Compiler, name: str) -> None:
    process = hosts.start([compiler.driver(name)])
    hosts.wire.freeze()
    time.sleep(1.5)
    hosts.wire.thaw()
    goes_on(process, hosts)


@pytest.mark.parametrize("name", ["loop", "copies"])
@pytest.mark.parametrize("how", ["cut", "silence"])
def test_a_long_interruption_ends_in_an_error(
    hosts: RelayHosts, compiler: Compiler, name: str, how: str
) -> None:
    process = hosts.start([compiler.driver(name)])
    if how == "cut":
        hosts.wire.refuse()
        hosts.wire.reset()
    else:
        hosts.wire.freeze()
    ends_with_error(process)
    wait_for("the end of all there", hosts.clean, PATIENCE)
    # And when it is over, the next program works.
    hosts.wire.refuse(False)
    hosts.wire.reset()
    hosts.wire.thaw()
    done = hosts.run([compiler.driver("loop"), 3])
    assert done.returncode == 0, done.stdout + hosts.logs()


# ---- Ends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["near", "far"])
def test_a_relay_is_killed(hosts: RelayHosts, compiler: Compiler, side: str) -> None:
    process = hosts.start([compiler.driver("loop")])
    [relay] = hosts.relays(hosts.near if side == "near" else hosts.far)
    os.kill(relay, signal.SIGKILL)
    ends_with_error(process)
    wait_for("the end of all there", hosts.clean, PATIENCE)


@pytest.mark.parametrize("side", ["near", "far"])
def test_a_broker_is_killed(hosts: RelayHosts, compiler: Compiler, side: str) -> None:
    process = hosts.start([compiler.driver("loop")])
    host = hosts.near if side == "near" else hosts.far
    relays = hosts.relays(host)
    host.stop(signal.SIGKILL)
    ends_with_error(process)
    wait_for(
        "the end of its relays", lambda: not any(Path(f"/proc/{pid}").exists() for pid in relays)
    )
    if side == "near":
        wait_for("the end of all there", hosts.clean, PATIENCE)


def test_a_client_is_killed(hosts: RelayHosts, compiler: Compiler) -> None:
    process = hosts.start([compiler.driver("copies")])
    process.send_signal(signal.SIGKILL)
    wait_for("the end of all there", hosts.clean)


def test_the_far_host_ends_the_session(hosts: RelayHosts, compiler: Compiler) -> None:
    process = hosts.start([compiler.driver("loop")])
    hosts.far.push()
    ends_with_error(process)
    wait_for("the end of all there", hosts.clean)
    assert process.stderr is not None


# ---- Who may not --------------------------------------------------------------------------------


def refused(hosts: RelayHosts, compiler: Compiler, why: str) -> None:
    """A program gets no GPU, is told why, and nothing was started for it."""
    done = hosts.run([compiler.driver("loop"), 1])
    assert done.returncode != 0
    assert why in done.stderr + hosts.logs(), done.stderr + hosts.logs()
    assert hosts.far.channel is not None
    hosts.far.channel.state()
    assert not [e for e in hosts.far.channel.events if e.WhichOneof("what") == "worker_started"]


def test_a_certificate_of_another_authority(hosts: RelayHosts, compiler: Compiler) -> None:
    other = Authority(hosts.root / "other", "other")
    hosts.configure(hosts.near, other.host(NEAR))
    hosts.lend()
    refused(hosts, compiler, "TLS handshake")


def test_an_expired_certificate(hosts: RelayHosts, compiler: Compiler) -> None:
    hosts.configure(hosts.near, hosts.authority.host(NEAR, expired=True))
    hosts.lend()
    refused(hosts, compiler, "expired")


def test_another_hosts_certificate(hosts: RelayHosts, compiler: Compiler) -> None:
    """Known to the authority, but the lease is not for it."""
    hosts.configure(hosts.near, hosts.authority.host("host-c"))
    hosts.lend()
    refused(hosts, compiler, "is not for host host-c")


def test_the_far_host_is_another(hosts: RelayHosts, compiler: Compiler) -> None:
    hosts.lend(peer="host-c")
    refused(hosts, compiler, "hostname mismatch")


def test_a_wrong_secret(hosts: RelayHosts, compiler: Compiler) -> None:
    hosts.lend(key=bytes(32))
    refused(hosts, compiler, "key")


def test_a_certificate_without_alternative_name(hosts: RelayHosts, compiler: Compiler) -> None:
    hosts.configure(hosts.near, hosts.authority.host(NEAR, alternative=False))
    hosts.lend()
    done = hosts.run([compiler.driver("loop"), 1])
    assert done.returncode == 0, done.stderr + hosts.logs()


def test_programs_of_the_far_host_may_not_use_the_lease(
    hosts: RelayHosts, compiler: Compiler
) -> None:
    near, hosts.here, hosts.near = hosts.near, hosts.there, hosts.far
    try:
        refused(hosts, compiler, "is not for programs of this host")
    finally:
        hosts.near = near


# ---- Strangers at the door ----------------------------------------------------------------------

PREAMBLE = struct.Struct("<QII16sQ32s")
MAGIC = 0x31594C4552504731


def knock(hosts: RelayHosts) -> socket.socket:
    host, _, port = hosts.far.push(hosts.there).relay_address.rpartition(":")
    return socket.create_connection((host, int(port)), 10)


def hear(stranger: socket.socket) -> bytes:
    """All until the end."""
    heard = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := stranger.recv(100):
            heard += chunk
    return heard


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n".ljust(PREAMBLE.size), b""),
        (PREAMBLE.pack(MAGIC, 3, 0, bytes(16), 0, bytes(32)), b""),
        (PREAMBLE.pack(MAGIC, 2, 0, bytes(16), 0, bytes(32)), b"n"),
        (PREAMBLE.pack(MAGIC, 1, 0, bytes(16), 0, bytes(32)) + b"no TLS at all" * 10, b"y"),
    ],
)
def test_strangers_are_turned_away(hosts: RelayHosts, said: bytes, answer: bytes) -> None:
    with knock(hosts) as stranger:
        stranger.sendall(said)
        assert hear(stranger)[:1] == answer
    wait_for("the end of all there", hosts.clean)


def test_the_silent_and_the_slow_are_not_waited_for(hosts: RelayHosts) -> None:
    whole = PREAMBLE.pack(MAGIC, 1, 0, os.urandom(16), 0, bytes(32))
    for said in (b"", whole[:-1], whole):
        with knock(hosts) as stranger:
            stranger.sendall(said)
            start = time.monotonic()
            hear(stranger)
            assert time.monotonic() - start < 10
    wait_for("the end of all there", hosts.clean)


def test_who_has_seen_a_preamble_does_not_disturb(hosts: RelayHosts, compiler: Compiler) -> None:
    process = hosts.start([compiler.driver("loop")])
    hosts.wire.reset()
    wait_for("it goes on", lambda: len(hosts.wire.preambles) == 2)
    goes_on(process, hosts)
    first, resumed = hosts.wire.preambles
    accepted = hosts.wire.accepted
    link = PREAMBLE.unpack(first)[3]
    for said in (
        resumed,  # once more
        PREAMBLE.pack(MAGIC, 2, 0, link, 2, bytes(32)),
        PREAMBLE.pack(MAGIC, 2, 0, link, (1 << 64) - 1, os.urandom(32)),
    ):
        with knock(hosts) as stranger:
            stranger.sendall(said)
            assert hear(stranger) == b"y"
    # One that begins a link of that id is told nothing.
    with knock(hosts) as stranger:
        stranger.sendall(first)
        assert hear(stranger) == b"n"
    goes_on(process, hosts)
    assert hosts.wire.accepted == accepted
    hosts.wire.reset()
    wait_for("it goes on", lambda: hosts.wire.accepted > accepted)
    goes_on(process, hosts)


def test_many_strangers_keep_nobody_out(hosts: RelayHosts, compiler: Compiler) -> None:
    strangers = [knock(hosts) for _ in range(100)]
    try:
        done = hosts.run([compiler.driver("loop"), 1])
        assert done.returncode == 0, done.stderr + hosts.logs()
    finally:
        for stranger in strangers:
            stranger.close()


# ---- What is told of a session ------------------------------------------------------------------


def test_memory_and_utilisation_are_told_on_the_near_host(
    hosts: RelayHosts, compiler: Compiler
) -> None:
    process = hosts.start([compiler.driver("copies")])  # 48 MiB
    assert hosts.near.channel is not None
    channel = hosts.near.channel
    wait_for("the memory", lambda: channel.state().slices[0].used_bytes >= 48 * MIB)
    done = hosts.run([compiler.driver("nvml")])
    assert done.returncode == 0, done.stderr
    [used] = re.findall(r"^device \S+ total \d+ used (\d+)$", done.stdout, re.M)
    assert 48 * MIB <= int(used) <= 64 * MIB
    assert re.findall(r"^process (\d+) used (\d+)$", done.stdout, re.M) == [
        (str(process.pid), used)
    ]
    process.send_signal(signal.SIGKILL)
    wait_for("nothing is used", lambda: channel.state().slices[0].used_bytes == 0)
