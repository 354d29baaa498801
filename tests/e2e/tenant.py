"""A CUDA program under a virtual machine's lease, started on the host.

With the key that the store holds, so that the tests of the lease's life need nothing in the guest.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from gpupoold import paths
from tests.e2e.host import Host

PROGRAM = """
import ctypes, sys

cuda = ctypes.CDLL("libcuda.so.1")
device, context = ctypes.c_int(), ctypes.c_void_p()
free, total = ctypes.c_size_t(), ctypes.c_size_t()
for status in (
    cuda.cuInit(0),
    cuda.cuDeviceGet(ctypes.byref(device), 0),
    cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device),
    cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)),
):
    if status:
        print(f"status {status}", flush=True)
        sys.exit(1)
print(total.value >> 20, flush=True)
for line in sys.stdin:  # bytes to allocate
    pointer = ctypes.c_uint64()
    status = cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(int(line)))
    print(status or cuda.cuCtxSynchronize(), flush=True)
"""
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class Program:
    """It has a context, and so a worker; a context manager."""

    def __init__(self, host: Host, lease: str) -> None:
        self._host = host
        self._lease = lease
        pool = host.pool
        with sqlite3.connect(f"file:{pool.state_dir}/gpupoold.sqlite3?mode=ro", uri=True) as store:
            ((key,),) = store.execute("SELECT key FROM leases WHERE id = ?", (lease,)).fetchall()
        sessions = {"kind": "unix", "path": str(pool.run_dir / "session.sock")}
        self._file = Path(host.root / f"lease-{lease}.json")
        self._file.touch(0o600)
        self._file.write_text(
            json.dumps({"version": 1, "lease": lease, "key": key.hex(), "carriers": [sessions]})
        )
        environment = pool.environment
        environment["GPUPOOL_LEASE_FILE"] = str(self._file)
        environment["LD_LIBRARY_PATH"] = str(paths.native_directory() / "client")
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what the client library tells of a lost worker
            text=True,
        )
        first = self._answer()
        assert first.isdigit(), f"the program has no device: {first}"
        #: what the program sees of its device's memory
        self.memory_mib = int(first)
        (session,) = [s for s in pool.ctl_json("session", "list") if s["lease"] == lease]
        (self.worker,) = session["worker_pids"]

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def allocate(self, mebibytes: int = 1) -> int:
        """Allocates and synchronises; the CUDA status."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{mebibytes << 20}\n")
        self._process.stdin.flush()
        return int(self._answer())

    @property
    def ended(self) -> bool:
        """Whether its session is over and its worker gone."""
        return not Path(f"/proc/{self.worker}").exists() and not [
            s for s in self._host.pool.ctl_json("session", "list") if s["lease"] == self._lease
        ]

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()
        self._file.unlink()
