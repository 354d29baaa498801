"""A throw-away pool for tests and benchmarks: the sandbox, and what tests ask of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpupoold.testing.sandbox import Sandbox

START_SECONDS = 60  # much more than a start takes on a busy machine


def wait_for(what: str, condition: Callable[[], Any], seconds: float = START_SECONDS) -> Any:
    """The first true value of `condition`; AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.02)


class Pool(Sandbox):
    """One host of a pool. Programs run on a slice or, with `direct`, on the driver itself."""

    @property
    def environment(self) -> dict[str, str]:
        """For programs that use this pool."""
        result = {
            name: value
            for name, value in super().environment.items()
            if name not in ("GPUPOOL_LEASE_FILE", "GPUPOOL_CARRIER", "LD_LIBRARY_PATH")
        }
        # The current directory may hold sources; what is tested is what is installed.
        result["PYTHONSAFEPATH"] = "1"
        result["CUPY_CACHE_DIR"] = str(self.root / "cupy")
        return result

    # -- processes ---------------------------------------------------------------------------------

    def daemon_once(self, timeout: float = START_SECONDS) -> tuple[int, str]:
        """Runs gpupoold in the foreground where it is expected to end by itself: status, output."""
        before, self.daemon = self.daemon, None
        log = self.daemon_log
        log.unlink(missing_ok=True)
        try:
            self.start_daemon(wait=False)
            assert self.daemon is not None
            try:
                status = self.daemon.wait(timeout)
            except subprocess.TimeoutExpired:
                self.daemon.kill()
                self.daemon.wait()
                raise AssertionError(f"gpupoold runs:\n{self.logs()}") from None
        finally:
            self.daemon = before
        return status, log.read_text(errors="replace")

    def daemon_ends(self, number: int = signal.SIGKILL) -> None:
        """Ends gpupoold with a signal."""
        self.end_daemon(number)

    # -- what is asked of it -----------------------------------------------------------------------

    def slice(self, name: str, compute: int = 25, memory: int = 4096) -> str:
        """Makes a slice (percent, MiB) and returns its name."""
        self.ctl(
            "slice",
            "create",
            "--name",
            name,
            "--compute",
            str(compute),
            "--memory",
            str(memory),
            check=True,
        )
        return name

    def run_command(self, slice_name: str, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` on a slice."""
        return self.ctl_command("run", "--slice", slice_name, "--", *command)

    def run(
        self,
        slice_name: str,
        command: Sequence[str],
        *,
        timeout: float = 300,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program on a slice to its end; both outputs are captured."""
        return subprocess.run(
            self.run_command(slice_name, command),
            capture_output=True,
            text=True,
            env={**self.environment, **(environment or {})},
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    @contextlib.contextmanager
    def started(
        self,
        slice_name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
    ) -> Iterator[subprocess.Popen[str]]:
        """A program on a slice that is spoken with by pipes; killed at the end if it still runs."""
        process = subprocess.Popen(
            self.run_command(slice_name, command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**self.environment, **(environment or {})},
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                with contextlib.suppress(OSError):
                    stream.close()
            process.wait()

    def direct(
        self,
        command: Sequence[str],
        *,
        timeout: float = 300,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program on the driver itself, without gpupool in between."""
        return subprocess.run(
            list(command),
            capture_output=True,
            text=True,
            timeout=timeout,
            env={
                **self.environment,
                "LD_LIBRARY_PATH": self.driver_directory,
                **(environment or {}),
            },
            stdin=subprocess.DEVNULL,
            check=False,
        )

    def used_mib(self, slice_name: str) -> int:
        """Memory charged to a slice now, MiB."""
        return int(self.ctl_json("slice", "show", slice_name)["memory_used_mib"])

    def sessions(self) -> list[dict[str, Any]]:
        """The sessions that gpupoold shows."""
        return list(self.ctl_json("session", "list"))

    def worker_pids(self) -> list[int]:
        """Pids of the workers of this pool's broker, warm ones included."""
        assert self.broker is not None
        children = Path(f"/proc/{self.broker.pid}/task/{self.broker.pid}/children")
        found = []
        for pid in children.read_text().split():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().startswith("gpupool-worker"):
                    found.append(int(pid))
        return found

    def worker_logs(self) -> str:
        """All that workers wrote, and the broker still keeps."""
        return "".join(text for _, text in self._worker_logs())

    def logs(self) -> str:
        """The ends of all logs, for messages."""
        ends = (f"--- {name}\n{text[-2000:]}" for name, text in self._worker_logs())
        return "\n".join([self.log_tails(), *ends])

    def _worker_logs(self) -> Iterator[tuple[str, str]]:
        """Name and text of each that is there; the broker removes old ones at any time."""
        for file in sorted((self.run_dir / "log").glob("*.log")):
            with contextlib.suppress(FileNotFoundError):
                yield file.name, file.read_text(errors="replace")
