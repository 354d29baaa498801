"""A broker of a test's own, with this process in gpupoold's place."""

from __future__ import annotations

import itertools
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpupoold import paths
from gpupoold.leases import broker_pb2 as pb
from tests.functional import wire
from tests.functional.pool import wait_for

GPU = "GPU-00000000-0000-0000-0000-00000000aaaa"
MIB = 1 << 20


def broker_program() -> Path:
    return paths.native_directory() / "bin" / "gpupool-broker"


def make_lease(
    *, memory: int = 64 * MIB, slices: int = 1, gpu: str = GPU, **fields: Any
) -> pb.Lease:
    """A lease with new ids; `fields` are its further members."""
    lease = pb.Lease(
        id=uuid.uuid4().bytes, key=secrets.token_bytes(32), consumer="a test", **fields
    )
    for index in range(slices):
        lease.slices.add(
            id=uuid.uuid4().bytes,
            name=f"s{index}",
            gpu_uuid=gpu,
            pci_domain=1,
            pci_bus=2 + index,
            pci_device=3,
            memory_bytes=memory,
            compute_percent=25,
            worker=pb.LocalWorker(),
        )
    return lease


def start_time(pid: int) -> int:
    """Field 22 of /proc/PID/stat."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def alive(connection: wire.Connection) -> bool:
    """The broker has not closed the connection."""
    connection.socket.settimeout(0.02)
    try:
        return connection.socket.recv(1, socket.MSG_PEEK) != b""
    except TimeoutError:
        return True
    except ConnectionResetError:
        return False
    finally:
        connection.socket.settimeout(20)


class Channel:
    """A connection to broker.sock, as gpupoold has it."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(20)
        self.socket.connect(str(path))
        self.events: list[pb.Event] = []
        self._requests = itertools.count(1)
        hello = self.receive()
        assert hello.WhichOneof("what") == "hello"
        self.hello = hello.hello

    def receive(self) -> pb.FromBroker:
        """The next message. EOFError when the broker closed the connection."""
        packet = self.socket.recv(1 << 17)
        if not packet:
            raise EOFError("broker.sock")
        return pb.FromBroker.FromString(packet)

    def ask(self, message: pb.ToBroker) -> list[pb.Answer]:
        """Sends a request and returns its answers; events that come before are kept."""
        message.request = next(self._requests)
        self.socket.send(message.SerializeToString())
        answers: list[pb.Answer] = []
        while not answers or answers[-1].more:
            received = self.receive()
            if received.WhichOneof("what") == "event":
                self.events.append(received.event)
                continue
            assert received.answer.request == message.request
            answers.append(received.answer)
        return answers

    def event(
        self, kind: str, seconds: float = 20, matches: Callable[[Any], bool] = lambda _: True
    ) -> Any:
        """The first event of a kind that was not asked for yet."""
        end = time.monotonic() + seconds
        while True:
            for index, event in enumerate(self.events):
                if event.WhichOneof("what") == kind and matches(getattr(event, kind)):
                    del self.events[index]
                    return getattr(event, kind)
            self.socket.settimeout(max(end - time.monotonic(), 0.01))
            received = self.receive()
            assert received.WhichOneof("what") == "event"
            self.events.append(received.event)

    def state(self) -> pb.State:
        """What the broker says is going on."""
        whole = pb.State()
        for answer in self.ask(pb.ToBroker(query=pb.Query())):
            whole.MergeFrom(answer.state)
        return whole

    def close(self) -> None:
        self.socket.close()


class BrokerHost:
    """The broker on a directory; by default with workers that need no driver."""

    def __init__(self, root: Path, *, fake_worker: bool = True) -> None:
        self.root = root
        self.run_dir = root / "run"
        self.worker: Path | None = None
        if fake_worker:
            self.worker = root / "fake-worker"
            program = Path(__file__).with_name("fake_worker.py")
            self.worker.write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
            self.worker.chmod(0o755)
        self.process: subprocess.Popen[str] | None = None
        self.channel: Channel | None = None
        self.generation = 0
        self.leases: list[pb.Lease] = []
        self.settings = pb.Settings()
        self.gpus = [GPU]
        self.tcp: tuple[str, int] | None = None

    def command(self) -> list[str]:
        command = [str(broker_program()), "--run-dir", str(self.run_dir)]
        if self.worker is not None:
            command += ["--worker", str(self.worker)]
        return command

    def start(self, environment: Mapping[str, str] | None = None) -> Channel:
        """Starts the broker and connects to it."""
        with (self.root / "broker.log").open("a") as log:
            self.process = subprocess.Popen(
                self.command(), stderr=log, text=True, env={**os.environ, **(environment or {})}
            )
        wait_for("broker.sock", lambda: self.connectable() or self.died())
        return self.connect()

    def connectable(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            return probe.connect_ex(str(self.run_dir / "session.sock")) == 0

    def died(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log()
        return False

    def connect(self) -> Channel:
        self.channel = Channel(self.run_dir / "broker.sock")
        return self.channel

    def log(self) -> str:
        return (self.root / "broker.log").read_text(errors="replace")

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Ends the broker; its exit status."""
        if self.channel is not None:
            self.channel.close()
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(20)

    def __enter__(self) -> BrokerHost:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.stop(signal.SIGKILL)

    def push(self, *leases: pb.Lease) -> pb.Applied:
        """Pushes these leases as the whole state; the broker has to take it."""
        answer = self.try_push(*leases)
        assert answer.code == pb.OK, answer.sentence
        self.leases = list(leases)
        if answer.applied.tcp_address:
            host, _, port = answer.applied.tcp_address.rpartition(":")
            self.tcp = (host, int(port))
        return answer.applied

    def try_push(self, *leases: pb.Lease) -> pb.Answer:
        assert self.channel is not None
        self.generation += 1
        push = pb.Push(
            generation=self.generation,
            settings=self.settings,
            gpus=[pb.Gpu(uuid=gpu) for gpu in self.gpus],
            leases=leases,
        )
        [answer] = self.channel.ask(pb.ToBroker(push=push))
        return answer

    def client_lease(self, lease: pb.Lease) -> wire.Lease:
        """What a client knows of a lease."""
        return wire.Lease(lease.id, lease.key, str(self.run_dir / "session.sock"), self.tcp)


class Session:
    """A client with a control connection, and a line-wise talk to its fake worker."""

    def __init__(self, lease: wire.Lease, *, tcp: bool = False, **hello: object) -> None:
        self.lease = lease
        self.tcp = tcp
        self.control = wire.Connection(lease, tcp=tcp).open(**hello)
        self.workers: dict[int, wire.Connection] = {}

    def worker(self, device: int = 0) -> wire.Connection:
        if device not in self.workers:
            self.workers[device] = wire.Connection(self.lease, tcp=self.tcp).open(
                purpose=wire.DEVICE, session=self.control.session, device=device, arena=wire.ARENA
            )
        return self.workers[device]

    def tell(self, line: str, device: int = 0) -> None:
        self.worker(device).socket.sendall(line.encode() + b"\n")

    def ask(self, line: str, device: int = 0) -> list[int]:
        """Sends a line and returns the numbers of the answer."""
        self.tell(line, device)
        answer = b""
        while not answer.endswith(b"\n"):
            answer += self.worker(device).receive(1)
        return [int(word) for word in answer.split() if word.isdigit()]

    def close(self) -> None:
        self.control.close()
        for worker in self.workers.values():
            worker.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
