"""Stand-ins at gpupoold's two borders: the driver, and the broker's socket."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path

from gpupoold.conf import Settings
from gpupoold.conf import load as load_settings
from gpupoold.gpus import HealthReport
from gpupoold.leases import broker_pb2 as pb
from gpupoold.model import Gpu, Health


def gpu(index: int = 0, memory_mib: int = 81920, reserved_mib: int = 0) -> Gpu:
    """A card; the uuid of index 0 ends in 0, and so on."""
    return Gpu(
        uuid=f"GPU-{index:08x}-0000-4000-8000-00000000000{index}",
        index=index,
        name="Test GPU",
        memory_mib=memory_mib,
        driver_reserved_mib=reserved_mib,
        compute_capability="9.0",
        pci_address=f"00000000:{index + 1:02x}:00.0",
        numa_node=index % 2,
        cpu_affinity="0-1",
    )


class FakeDriver:
    """The interface of gpupoold.gpus.Driver with cards of the test's choice."""

    def __init__(self, gpus: list[Gpu]) -> None:
        self.gpus = gpus
        self.reports: dict[str, HealthReport] = {}
        self.version = "600.00"
        self.absence = "" if gpus else "the test has none"
        self.present = bool(gpus)

    def inventory(self) -> list[Gpu]:
        return list(self.gpus)

    def health(self, uuid: str) -> HealthReport:
        return self.reports.get(uuid, HealthReport(Health.OK))


class FakeBroker:
    """Speaks broker.proto's packets; keeps what was pushed and answers with what the test set."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.instance = os.urandom(16)
        self.state = pb.State()
        self.pushed: list[pb.Push] = []  # merged, one per generation
        self.requests: list[pb.ToBroker] = []
        self.tcp_address = ""
        self.relay_address = ""
        self.refuses = ""  # not empty: every lease that another host has, and why
        self.resize_answer = pb.Answer()
        self.silent = False  # takes everything and answers nothing
        self.kept_events: list[pb.Event] = []
        self.arrived = threading.Condition()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._listener.bind(path)
        self._listener.listen(4)
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """As a broker that is killed: the socket's file stays."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def send(self, **what: object) -> None:
        assert self._connection is not None
        self._connection.sendall(pb.FromBroker(**what).SerializeToString())  # type: ignore[arg-type]

    def wait_push(self, condition, seconds: float = 10) -> pb.Push:
        """The first push, of now or later, for which the condition holds."""
        with self.arrived:
            ok = self.arrived.wait_for(lambda: any(map(condition, self.pushed)), seconds)
            assert ok, [push.generation for push in self.pushed]
            return next(push for push in reversed(self.pushed) if condition(push))

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connection = connection
            try:
                self._serve(connection)
            except OSError:
                pass
            finally:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        hello = pb.Hello(version="fake", pid=os.getpid(), instance=self.instance)
        self.send(hello=hello)
        for event in self.kept_events:
            self.send(event=event)
        self.kept_events = []
        current: pb.Push | None = None
        while data := connection.recv(1 << 17):
            assert len(data) <= 65536
            message = pb.ToBroker.FromString(data)
            answer = pb.Answer(request=message.request)
            what = message.WhichOneof("what")
            if what == "push":
                if current is None:
                    assert message.push.HasField("settings")
                    current = pb.Push()
                current.MergeFrom(message.push)
                if message.push.more:
                    continue
                with self.arrived:
                    self.pushed.append(current)
                    self.arrived.notify_all()
                answer.applied.generation = current.generation
                answer.applied.tcp_address = self.tcp_address
                answer.applied.relay_address = self.relay_address
                for lease in current.leases if self.refuses else ():
                    if lease.peer:
                        answer.applied.refused.add(id=lease.id, sentence=self.refuses)
                current = None
            elif what == "query":
                answer.state.CopyFrom(self.state)
            elif what == "resize_slice":
                answer.MergeFrom(self.resize_answer)
            with self.arrived:
                self.requests.append(message)
                self.arrived.notify_all()
            if not self.silent:
                self.send(answer=answer)


def settings(root: Path, **options: str) -> Settings:
    """Settings with directories below `root`; options: group_name="value" as in the file."""
    lines = ["[DEFAULT]", "host = test", f"state_dir = {root}/state", f"run_dir = {root}/run"]
    for name, value in options.items():
        group, _, option = name.partition("_")
        lines += [f"[{group}]", f"{option} = {value}"]
    path = root / "gpupoold.conf"
    path.write_text("\n".join(lines) + "\n")
    (root / "run").mkdir(exist_ok=True)
    return load_settings(["--config-file", str(path)], defaults=False)[1]
