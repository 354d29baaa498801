"""Virtual machines without any: a port that behaves as QEMU's, the helper, programs, the host."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpupoold import paths
from gpupoold.guests.region import Regions
from gpupoold.leases import broker_pb2 as pb
from tests.functional.broker_host import MIB, BrokerHost, make_lease
from tests.functional.pool import wait_for

KEPT = 256 * 1024  # bytes that wait in one direction


def helper_program() -> Path:
    return paths.native_directory() / "guest" / "gpupool-guest"


class Port:
    """A virtio-serial port on a unix socket, with a unix socket for the guest's device too.

    As with QEMU, the host does not learn that the guest closed the port, and what was sent stays in
    it; the guest learns that the host went, and what it sends then is lost.
    """

    def __init__(self, root: Path) -> None:
        self.host_path, self.guest_path = root / "port-host", root / "port-guest"
        self._host_listener: socket.socket | None = None
        self._guest_listener: socket.socket | None = None
        self._host: socket.socket | None = None
        self._guest: socket.socket | None = None
        self._up, self._down = bytearray(), bytearray()
        self._stop = False
        self._wake_in, self._wake_out = os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def plug(self) -> None:
        self._host_listener = self._listen(self.host_path)
        self._thread.start()

    @staticmethod
    def _listen(path: Path) -> socket.socket:
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen(1)
        return listener

    def close(self) -> None:
        self._stop = True
        os.write(self._wake_out, b".")
        if self._thread.is_alive():
            self._thread.join()
        for one in (self._host_listener, self._guest_listener, self._host, self._guest):
            if one is not None:
                one.close()
        os.close(self._wake_in)
        os.close(self._wake_out)

    def _run(self) -> None:
        while not self._stop:
            readers: list[Any] = [self._wake_in]
            writers: list[Any] = []
            if self._host is None:
                readers.append(self._host_listener)
            elif len(self._down) < KEPT:
                readers.append(self._host)
            if self._guest is None and self._guest_listener is not None:
                readers.append(self._guest_listener)
            if self._guest is not None and len(self._up) < KEPT:
                readers.append(self._guest)
            if self._host is not None and self._up:
                writers.append(self._host)
            if self._guest is not None and self._down:
                writers.append(self._guest)
            readable, writable, _ = select.select(readers, writers, [])
            for one in readable:
                self._read(one)
            if self._host in writable:
                self._write(self._host, self._up)
            if self._guest in writable:
                self._write(self._guest, self._down)

    def _read(self, one: Any) -> None:
        if one is self._host_listener:
            self._host = self._host_listener.accept()[0]
            self._host.setblocking(False)
            self._guest_listener = self._listen(self.guest_path)
        elif one is self._guest_listener and one is not None:
            self._guest = one.accept()[0]
            self._guest.setblocking(False)
        elif one in (self._host, self._guest) and one is not None:
            try:
                data = one.recv(65536)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if data:
                (self._down if one is self._host else self._up).extend(data)
            elif one is self._host:
                self._host_went()
            else:
                one.close()
                self._guest = None

    def _host_went(self) -> None:
        for one in (self._host, self._guest, self._guest_listener):
            if one is not None:
                one.close()
        self._host = self._guest = self._guest_listener = None
        self._up.clear()
        self._down.clear()

    @staticmethod
    def _write(to: socket.socket | None, data: bytearray) -> None:
        assert to is not None
        with contextlib.suppress(OSError):
            del data[: to.send(data)]


class Machine:
    """A guest with its helper and programs, all processes of this host."""

    def __init__(self, root: Path) -> None:
        root.mkdir()
        root.chmod(0o755)
        self.root = root
        self.port = Port(root)
        self.run_dir = root / "guest"
        self.helper: subprocess.Popen[bytes] | None = None
        self.region: Path | None = None  # that it shares with the host
        self.helper_options: list[str] = []
        self.lease_file = root / "lease.json"
        # What a program finds by itself where the socket is at its fixed place.
        self.lease_file.write_text(
            json.dumps(
                {
                    "version": 1,
                    "lease": "00000000-0000-0000-0000-000000000000",
                    "key": "00" * 32,
                    "carriers": [{"kind": "unix", "path": str(self.run_dir / "guest.sock")}],
                }
            )
        )

    def start_helper(self) -> None:
        command = [str(helper_program()), "run", "--port", str(self.port.guest_path)]
        command += self.helper_options
        if self.region is not None:
            command += ["--region", str(self.region)]
        with self.log_file.open("ab") as log:
            self.helper = subprocess.Popen(
                [*command, "--run-dir", str(self.run_dir)], stdin=subprocess.DEVNULL, stderr=log
            )
        wait_for("the helper", lambda: self.status()["state"] != "no-helper")

    def end_helper(self, number: int = signal.SIGKILL) -> None:
        assert self.helper is not None
        self.helper.send_signal(number)
        self.helper.wait(20)
        self.helper = None

    def close(self) -> None:
        if self.helper is not None:
            self.end_helper()
        self.port.close()

    @property
    def log_file(self) -> Path:
        return self.root / "helper.log"

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def status(self) -> dict[str, Any]:
        """What `gpupool-guest status --json` says; its exit status is in it, and has to be so."""
        done = subprocess.run(
            [helper_program(), "status", "--json", "--run-dir", self.run_dir],
            capture_output=True,
            text=True,
            check=False,
        )
        answer: dict[str, Any] = json.loads(done.stdout)
        assert answer["exit_status"] == done.returncode
        return answer

    def wait_ready(self) -> None:
        wait_for("the host at the port", lambda: self.status()["state"] == "ok")

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "LD_LIBRARY_PATH": str(paths.client_directory()),
            "GPUPOOL_LEASE_FILE": str(self.lease_file),
        }

    def run(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            list(command),
            capture_output=True,
            text=True,
            env={**self.environment, **(environment or {})},
            stdin=subprocess.DEVNULL,
            timeout=300,
            check=False,
        )

    @contextlib.contextmanager
    def started(self, command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
        """A program with pipes; killed at the end if it still runs."""
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()


class Host:
    """A broker with real workers, and machines with a lease each."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.broker = BrokerHost(root, fake_worker=False)
        self.broker.gpus = [""]
        self.broker.settings.driver_directory = str(paths.native_directory() / "simgpu")
        self.machines: dict[str, Machine] = {}
        self.leases: dict[str, pb.Lease] = {}
        (root / "simgpu").mkdir()

    def start(self) -> None:
        self.broker.start({"GPUPOOL_SIMGPU_STATE_DIR": str(self.root / "simgpu")})

    def machine(
        self, name: str, region_mib: int = 0, helper_options: Sequence[str] = (), **fields: object
    ) -> Machine:
        """A machine whose port is plugged in, and whose helper runs; with a region, if wanted."""
        machine = Machine(self.root / name)
        machine.helper_options = list(helper_options)
        self.machines[name] = machine
        machine.port.plug()
        lease = self.leases[name] = make_lease(
            memory=512 * MIB, gpu="", port=str(machine.port.host_path), **fields
        )
        if region_mib:
            regions = Regions(str(self.root), region_mib, "", str(machine.root))
            path, inode = regions.make("region", str(uuid.UUID(bytes=lease.id)))
            machine.region = Path(path)
            lease.region.path, lease.region.inode = path, inode
            lease.region.bytes = region_mib * MIB
        self.push()
        machine.start_helper()
        machine.wait_ready()
        return machine

    def push(self) -> None:
        self.broker.push(*self.leases.values())

    def state(self) -> pb.State:
        assert self.broker.channel is not None
        return self.broker.channel.state()

    def sessions(self) -> list[pb.SessionState]:
        return list(self.state().sessions)

    def wait_idle(self) -> None:
        """No session is left, and all memory was given back."""
        wait_for(
            "the sessions' end",
            lambda: not self.sessions() and not any(p.used_bytes for p in self.state().slices),
            20,
        )

    def close(self) -> None:
        for machine in self.machines.values():
            machine.close()
        self.broker.__exit__()

    @classmethod
    @contextlib.contextmanager
    def running(cls) -> Iterator[Host]:
        # Short: the path of a socket has at most 107 bytes.
        root = Path(tempfile.mkdtemp(prefix="gp-", dir="/tmp"))
        root.chmod(0o755)
        own = cls(root)
        try:
            own.start()
            yield own
        finally:
            own.close()
            shutil.rmtree(root, ignore_errors=True)
