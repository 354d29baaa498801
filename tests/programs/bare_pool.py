"""A broker with one slice and without gpupoold, for machines that have nothing but Python: what
gpupoold would push (native/broker/broker.proto) is encoded here by hand."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from pathlib import Path
from types import TracebackType


class BarePoolError(Exception):
    """Why the broker does not serve, in a sentence with the end of its log."""


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _fields(data: bytes) -> dict[int, int | bytes]:
    """Top-level fields of a message (the last of each); only what an Answer needs."""
    found: dict[int, int | bytes] = {}
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            found[key >> 3] = varint()
        elif key & 7 == 2:
            size = varint()
            found[key >> 3] = data[at : at + size]
            at += size
        else:
            raise ValueError("unexpected wire type")
    return found


class BarePool:
    """A context manager; `environment` is what a program needs to run on the slice."""

    def __init__(
        self,
        native: Path,
        gpu_uuid: str,
        *,
        driver_directory: str = "",
        memory_mib: int = 4096,
        tcp: bool = False,
    ) -> None:
        self.native = native
        self.gpu_uuid = gpu_uuid
        self.driver_directory = driver_directory
        self.memory_mib = memory_mib
        self.tcp = tcp
        self.root = Path()
        self.broker: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def __enter__(self) -> BarePool:
        self.root = Path(tempfile.mkdtemp(prefix="gpupool-", dir="/tmp"))
        self.root.chmod(0o755)
        run = self.root / "run"
        run.mkdir()
        try:
            with open(self.root / "broker.log", "wb") as log:
                self.broker = subprocess.Popen(
                    [str(self.native / "bin" / "gpupool-broker"), "--run-dir", str(run)],
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                )
            self._push(run)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def environment(self) -> dict[str, str]:
        """The variables of a program on the slice."""
        return {
            **os.environ,
            "GPUPOOL_LEASE_FILE": str(self.root / "lease.json"),
            "LD_LIBRARY_PATH": ":".join(
                filter(None, [str(self.native / "client"), os.environ.get("LD_LIBRARY_PATH")])
            ),
        }

    def log(self) -> str:
        """The ends of the broker's and the workers' logs."""
        return "".join(
            f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}"
            for file in [
                self.root / "broker.log",
                *sorted((self.root / "run" / "log").glob("*.log")),
            ]
            if file.exists()
        )

    def _push(self, run: Path) -> None:
        path = run / "broker.sock"
        deadline = time.monotonic() + 30
        while not path.exists():
            assert self.broker is not None
            if self.broker.poll() is not None or time.monotonic() > deadline:
                raise BarePoolError(f"the broker does not start\n{self.log()}")
            time.sleep(0.02)
        lease, key, slice_id = uuid.uuid4(), secrets.token_bytes(32), uuid.uuid4()
        settings = (
            _bytes(1, self.driver_directory)
            + _number(4, 1)
            + (_bytes(3, "127.0.0.1:0") if self.tcp else b"")
        )
        one_slice = (
            _bytes(1, slice_id.bytes)
            + _bytes(2, "check")
            + _bytes(3, self.gpu_uuid)
            + _number(5, 0x7F)
            + _number(6, 1)
            + _number(7, self.memory_mib << 20)
            + _number(8, 50)
            + _bytes(11, b"")
        )
        push = (
            _number(1, 1)
            + _bytes(2, settings)
            + _bytes(3, _bytes(1, self.gpu_uuid))
            + _bytes(
                4,
                _bytes(1, lease.bytes)
                + _bytes(2, key)
                + _bytes(3, "gpu-check")
                + _bytes(4, one_slice),
            )
        )
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(60)
        self._socket.connect(str(path))
        self._socket.send(_number(1, 1) + _bytes(2, push))
        while True:
            packet = self._socket.recv(1 << 16)
            if not packet:
                raise BarePoolError(f"the broker closed the connection\n{self.log()}")
            answer = _fields(packet).get(2)
            if isinstance(answer, bytes):
                break
        fields = _fields(answer)
        if fields.get(2, 0) != 0:
            raise BarePoolError(f"the broker refused the slice: {fields.get(3)!r}")
        carriers = [{"kind": "unix", "path": str(run / "session.sock")}]
        file = self.root / "lease.json"
        file.touch(mode=0o600)
        file.write_text(
            json.dumps({"version": 1, "lease": str(lease), "key": key.hex(), "carriers": carriers})
        )

    def stop(self) -> None:
        """Ends the broker and removes the files."""
        if self._socket is not None:
            self._socket.close()
        if self.broker is not None and self.broker.poll() is None:
            self.broker.send_signal(signal.SIGTERM)
            try:
                self.broker.wait(10)
            except subprocess.TimeoutExpired:
                self.broker.kill()
                self.broker.wait()
        if self.root != Path():
            shutil.rmtree(self.root, ignore_errors=True)
