"""What the broker says of a lease to whom opens no session: NVML's source."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import struct
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpupoold import paths
from tests.functional import wire
from tests.functional.broker_host import MIB, BrokerHost, Session, make_lease
from tests.functional.wire import Closed, Connection, Refused

LIMIT = 6
NOT_MEASURED = 0xFFFFFFFF
SNAPSHOT_BYTES = 936


@pytest.fixture
def host(tmp_path: Path) -> Iterator[BrokerHost]:
    with BrokerHost(tmp_path) as own:
        own.settings.tcp_listen = "127.0.0.1:0"
        own.settings.driver_version = "601.02.03"
        yield own


@dataclass
class Status:
    driver_version: str
    slices: list[tuple[int, int, int]]  # memory, used, busy
    processes: list[tuple[int, int, int, str]]  # pid, device, used, program


class Question(Connection):
    """A connection that asks, as doc/protocol.md says, in steps."""

    def __init__(self, lease: wire.Lease, *, tcp: bool = False, **hello: object) -> None:
        super().__init__(lease, tcp=tcp)
        body = self.hello(purpose=wire.ASK_STATUS, **hello)  # type: ignore[arg-type]
        self.send_raw(wire.encode_frame(wire.HELLO, body))
        nonce = self.receive_frame().body[8:40]
        self.proof = wire.hmac.digest(lease.key, b"gpupool client 1" + nonce + body, "sha256")

    def prove(self) -> None:
        self.send_raw(wire.encode_frame(wire.PROOF, self.proof))

    def answer(self) -> Status:
        """Raises Refused."""
        welcome = self.receive_frame()
        assert welcome.kind == wire.WELCOME
        _, session, epoch, devices, credit = struct.unpack_from("<32s16sIIQ", welcome.body)
        assert (session, epoch, credit) == (bytes(16), 0, 0)
        frame = self.receive_frame()
        with pytest.raises(Closed):
            self.receive_frame()
        assert frame.kind == wire.STATUS
        head, slice_bytes, slices, process_bytes, processes, _, version = struct.unpack_from(
            "<IIIIII32s", frame.body
        )
        assert slices == devices and len(welcome.body) == 64 + devices * SNAPSHOT_BYTES
        at = head
        status = Status(version.rstrip(b"\0").decode(), [], [])
        for _ in range(slices):
            status.slices.append(struct.unpack_from("<QQI", frame.body, at))
            at += slice_bytes
        for _ in range(processes):
            pid, device, used, program = struct.unpack_from("<IIQ32s", frame.body, at)
            status.processes.append((pid, device, used, program.rstrip(b"\0").decode()))
            at += process_bytes
        assert at == len(frame.body)
        return status


def ask(lease: wire.Lease, *, tcp: bool = False, **hello: object) -> Status:
    with Question(lease, tcp=tcp, **hello) as question:
        question.prove()
        return question.answer()


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
def test_a_lease_is_told_its_own(host: BrokerHost, tcp: bool) -> None:
    mine, other = make_lease(memory=96 * MIB, slices=2), make_lease(memory=32 * MIB)
    host.push(mine, other)
    known = host.client_lease(mine)
    empty = Status("601.02.03", [(96 * MIB, 0, 0)] * 2, [])
    assert ask(known, tcp=tcp) == empty
    with Session(known, tcp=tcp) as session, Session(host.client_lease(other)) as stranger:
        stranger.ask(f"charge {8 * MIB}")
        assert ask(known, tcp=tcp) == empty
        session.ask(f"charge {4 * MIB}", device=1)
        told = ask(known, tcp=tcp)
        # Nobody is on the one; on the other is a worker that does not say.
        assert told.slices == [(96 * MIB, 0, 0), (96 * MIB, 4 * MIB, NOT_MEASURED)]
        assert told.processes == [(os.getpid(), 1, 4 * MIB, "a test")]
        assert ask(host.client_lease(other)).processes == [(os.getpid(), 0, 8 * MIB, "a test")]


def test_no_session_and_no_worker_come_of_it(host: BrokerHost) -> None:
    lease = make_lease(max_sessions=1)
    host.push(lease)
    known = host.client_lease(lease)
    assert host.channel is not None
    with Session(known):
        for _ in range(5):  # although no further session is allowed
            ask(known)
        assert [len(state.workers) for state in host.channel.state().sessions] == [0]


def test_whoever_has_not_the_key_is_told_nothing(host: BrokerHost) -> None:
    lease = make_lease()
    host.push(lease)
    known = host.client_lease(lease)
    with pytest.raises(Refused) as wrong_key:
        Connection(known).open(purpose=wire.ASK_STATUS, key=secrets.token_bytes(32))
    assert wrong_key.value.code == wire.PROOF_WRONG
    with pytest.raises(Refused) as unknown:
        Connection(known).open(purpose=wire.ASK_STATUS, lease=uuid.uuid4().bytes)
    assert unknown.value.code == wire.UNKNOWN_LEASE
    host.push()
    with pytest.raises(Refused) as ended:
        Connection(known).open(purpose=wire.ASK_STATUS)
    assert ended.value.code == wire.UNKNOWN_LEASE


def test_pids_are_those_of_the_asker(host: BrokerHost) -> None:
    """A process whose pid differs from what the kernel tells is in another pid namespace."""
    lease = make_lease()
    host.push(lease)
    known = host.client_lease(lease)
    with Session(known) as here, Session(known, pid=7) as inside:
        here.ask(f"charge {2 * MIB}")
        inside.ask(f"charge {3 * MIB}")
        # the host sees both by its own pids, the container only what is not the host's
        assert [(pid, used) for pid, _, used, _ in sorted(ask(known).processes)] == [
            (os.getpid(), 2 * MIB),
            (os.getpid(), 3 * MIB),
        ]
        assert [(pid, used) for pid, _, used, _ in ask(known, pid=8).processes] == [(7, 3 * MIB)]
        assert ask(known, pid=8).slices[0][1] == 5 * MIB


def test_who_asks_too_often_is_refused_and_others_are_not(host: BrokerHost) -> None:
    host.settings.max_half_open = 1000
    eager, other = make_lease(), make_lease()
    host.push(eager, other)
    known = host.client_lease(eager)
    with contextlib.ExitStack() as stack, Session(known) as session:
        # All questions are ready before the first is asked, so that no machine is too slow for it.
        ready = [stack.enter_context(Question(known)) for _ in range(500)]
        for question in ready:
            question.prove()
        refused = []
        for question in ready:
            try:
                question.answer()
            except Refused as error:
                refused.append(error)
        assert 0 < len(refused) < 300  # 300 at once are allowed
        assert {error.code for error in refused} == {LIMIT}
        assert ask(host.client_lease(other)).slices[0][0] == 64 * MIB
        assert session.ask("query")[0] == 1  # and what the lease is for goes on


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
def test_the_largest_lease_is_answered(host: BrokerHost, tcp: bool) -> None:
    lease = make_lease(slices=64)
    host.push(lease)
    assert len(ask(host.client_lease(lease), tcp=tcp).slices) == 64


def test_a_question_waits_for_the_driver(tmp_path: Path) -> None:
    """As a session does: a GPU that is being looked at is no reason to refuse."""
    with BrokerHost(tmp_path) as host:
        host.worker.write_text(  # type: ignore[union-attr]
            host.worker.read_text().replace("exec ", "sleep 1\nexec ")  # type: ignore[union-attr]
        )
        lease = make_lease()
        host.push(lease)
        told = ask(host.client_lease(lease))
        assert told.slices == [(64 * MIB, 0, 0)]
        assert told.driver_version == ""


def test_nvml_has_a_device_for_each_slice(host: BrokerHost, tmp_path: Path) -> None:
    lease = make_lease(memory=96 * MIB, slices=3)
    host.push(lease)
    known = host.client_lease(lease)
    file = tmp_path / "lease.json"
    file.write_text(
        json.dumps(
            {
                "version": 1,
                "lease": str(uuid.UUID(bytes=lease.id)),
                "key": lease.key.hex(),
                "carriers": [{"kind": "unix", "path": known.path}],
            }
        )
    )
    code = (
        "import json, pynvml as nv\n"
        "nv.nvmlInit()\n"
        "devices = [nv.nvmlDeviceGetHandleByIndex(i) for i in range(nv.nvmlDeviceGetCount())]\n"
        "try: nv.nvmlDeviceGetHandleByIndex(len(devices))\n"
        "except nv.NVMLError_InvalidArgument: pass\n"
        "print(json.dumps([[nv.nvmlDeviceGetUUID(d), nv.nvmlDeviceGetPciInfo(d).busId,\n"
        "                   nv.nvmlDeviceGetMemoryInfo(d).used,\n"
        "                   len(nv.nvmlDeviceGetComputeRunningProcesses(d)),\n"
        "                   nv.nvmlDeviceGetP2PStatus(devices[0], d, 0)] for d in devices]))\n"
    )
    with Session(known) as session:
        session.ask(f"charge {4 * MIB}", device=2)
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={
                "PATH": os.environ["PATH"],
                "LD_LIBRARY_PATH": str(paths.client_directory()),
                "GPUPOOL_LEASE_FILE": str(file),
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    ids = ["GPU-" + str(uuid.UUID(bytes=piece.id)) for piece in lease.slices]
    assert json.loads(done.stdout) == [
        [ids[0], "00000001:02:03.0", 0, 0, 0],
        [ids[1], "00000001:03:03.0", 0, 0, 5],
        [ids[2], "00000001:04:03.0", 4 * MIB, 1, 5],
    ]
