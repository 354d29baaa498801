"""Two brokers whose relays reach each other, and a wire between them that a test can cut."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import subprocess
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path

from gpupoold import paths
from gpupoold.leases import broker_pb2 as pb
from tests.certificates import Authority, Files
from tests.functional.broker_host import MIB, BrokerHost, make_lease
from tests.functional.pool import wait_for

NEAR, FAR = "host-a", "host-b"
PREAMBLE_BYTES = 72


class Wire:
    """Passes TCP connections on to an address, as long as it is not cut."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._frozen = self._refusing = self._over = False
        self.accepted = 0
        #: what each connection said first
        self.preambles: list[bytes] = []
        self._fresh: set[socket.socket] = set()
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over:
            ends = {end for pair in self._pairs for end in pair}
            wanted = [self._listener] if self._frozen else [self._listener, *ends]
            ready, _, _ = select.select(wanted, [], [], 0.01)
            for end in ready:
                if end is self._listener:
                    self._accept()
                else:
                    self._pass_on(end)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        if self._refusing:
            near.close()
            return
        try:
            far = socket.create_connection(self._target)
        except OSError:
            near.close()
            return
        self.accepted += 1
        self._fresh.add(near)
        self._pairs.append((near, far))

    def _pass_on(self, end: socket.socket) -> None:
        pair = next((pair for pair in self._pairs if end in pair), None)
        if pair is None:
            return
        other = pair[1] if end is pair[0] else pair[0]
        try:
            data = end.recv(1 << 20)
            if end in self._fresh:
                self._fresh.remove(end)
                self.preambles.append(data[:PREAMBLE_BYTES])
            if data:
                other.sendall(data)
                return
        except OSError:
            pass
        self._close(pair)

    def _close(self, pair: tuple[socket.socket, socket.socket]) -> None:
        with contextlib.suppress(ValueError):
            self._pairs.remove(pair)
        for end in pair:
            end.close()

    def reset(self) -> None:
        """Both sides see their connections reset."""
        for pair in list(self._pairs):
            for end in pair:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._close(pair)

    def freeze(self) -> None:
        """Nothing gets through any more, and nobody is told."""
        self._frozen = True

    def thaw(self) -> None:
        self._frozen = False

    def refuse(self, refusing: bool = True) -> None:
        """Whether new connections are closed at once."""
        self._refusing = refusing

    def close(self) -> None:
        self._over = True
        self._thread.join()
        self.reset()
        self._listener.close()


class RelayHosts:
    """A context manager: `near` has the client, `far` the simulated GPU."""

    def __init__(self, root: Path, *, interruption_ms: int = 3000) -> None:
        self.root = root
        self.authority = Authority(root / "authority")
        self.near = self._host(root / "near", NEAR, interruption_ms)
        self.far = self._host(root / "far", FAR, interruption_ms)
        self.far.gpus = [""]
        self.far.settings.driver_directory = str(paths.native_directory() / "simgpu")
        self.far.settings.relay.listen = "127.0.0.1:0"
        self._processes: list[subprocess.Popen[str]] = []

    def _host(self, root: Path, name: str, interruption_ms: int) -> BrokerHost:
        root.mkdir()
        host = BrokerHost(root, fake_worker=False)
        host.gpus = []
        host.settings.rings = True
        host.settings.spinners = 1
        host.settings.relay.host = name
        host.settings.relay.interruption_ms = interruption_ms
        self.configure(host, self.authority.host(name))
        return host

    @staticmethod
    def configure(host: BrokerHost, files: Files) -> None:
        host.settings.relay.certificate_file = str(files.certificate)
        host.settings.relay.key_file = str(files.key)
        host.settings.relay.ca_file = str(files.authority)

    def __enter__(self) -> RelayHosts:
        self.near.start()
        self.far.start()
        self.there = make_lease(gpu="", memory=1024 * MIB, peer=NEAR)
        self.wire = Wire(self.far.push(self.there).relay_address)
        self.lend()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()
        self.wire.close()
        self.near.__exit__()
        self.far.__exit__()

    def snapshot(self) -> bytes:
        assert self.far.channel is not None
        channel = self.far.channel
        wait_for("the far device", lambda: channel.state().devices[0].ready)
        return bytes(channel.state().devices[0].snapshot)

    def lend(self, **relay: object) -> pb.Applied:
        """The near host has the far one's lease; `relay`: what is otherwise."""
        fields: dict[str, object] = {
            "peer": FAR,
            "address": self.wire.address,
            "lease": self.there.id,
            "key": self.there.key,
            "snapshot": self.snapshot(),
            **relay,
        }
        self.here = make_lease(gpu="GPU-of-another-host", memory=1024 * MIB)
        self.here.slices[0].ClearField("worker")
        self.here.slices[0].relay.CopyFrom(pb.Relay(**fields))  # type: ignore[arg-type]
        return self.near.push(self.here)

    def environment(self) -> dict[str, str]:
        """A client's, on the near host."""
        lease = {
            "version": 1,
            "lease": str(uuid.UUID(bytes=self.here.id)),
            "key": self.here.key.hex(),
            "carriers": [{"kind": "unix", "path": str(self.near.run_dir / "session.sock")}],
        }
        path = self.root / f"lease-{uuid.UUID(bytes=self.here.id)}.json"
        path.write_text(json.dumps(lease))
        path.chmod(0o600)
        client = paths.native_directory() / "client"
        return {**os.environ, "GPUPOOL_LEASE_FILE": str(path), "LD_LIBRARY_PATH": str(client)}

    def run(self, words: Sequence[object], seconds: float = 60) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(word) for word in words],
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def start(self, words: Sequence[object]) -> subprocess.Popen[str]:
        """A program that has said that it is ready."""
        process = subprocess.Popen(
            [str(word) for word in words],
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == "ready\n", line + self.logs()
        return process

    def relays(self, host: BrokerHost) -> list[int]:
        """Pids of a broker's relays."""
        assert host.process is not None
        pid = host.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        found = []
        for child in children:
            with contextlib.suppress(OSError):
                if Path(f"/proc/{child}/comm").read_text() == "gpupool-relay\n":
                    found.append(int(child))
        return found

    def clean(self) -> bool:
        """Nothing of a session is left on the far host."""
        assert self.far.channel is not None
        return not self.far.channel.state().sessions and not self.relays(self.far)

    def logs(self) -> str:
        parts = []
        for host in (self.near, self.far):
            parts.append(host.log())
            logs = host.run_dir / "log"
            for path in sorted(logs.glob("*")) if logs.exists() else []:
                with contextlib.suppress(OSError):
                    parts.append(path.read_text(errors="replace"))
        return "\n".join(parts)
