"""A throw-away pool for tests and benchmarks: gpupoold and broker in directories of their own, each
of which can be stopped, killed and started again."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpupoold import paths

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


def executable(name: str) -> str:
    """A console script of this environment, or a native program of gpupool."""
    beside = Path(sys.executable).parent / name
    native = paths.native_directory() / "bin" / name
    for candidate in (native, beside):
        if candidate.exists():
            return str(candidate)
    raise FileNotFoundError(f"{name} is neither in {native.parent} nor beside {sys.executable}")


class Pool:
    """One pool. `driver` is the directory of a driver (None: the system's is looked for)."""

    def __init__(self, driver: Path | None, *, machine: str | None = None,
                 options: Mapping[str, Mapping[str, str]] | None = None) -> None:
        # Short, since a socket's path has at most 107 bytes.
        self.directory = Path(tempfile.mkdtemp(prefix="gpt-"))
        os.chmod(self.directory, 0o755)
        self.run_dir = self.directory / "run"
        self.state_dir = self.directory / "state"
        self.config = self.directory / "gpupoold.conf"
        self.driver = driver
        memory = Path("/dev/shm")
        self._shared = Path(tempfile.mkdtemp(
            prefix="gpt-", dir=memory if os.access(memory, os.W_OK) else self.directory))
        os.chmod(self._shared, 0o777)
        self.environment = {key: value for key, value in os.environ.items()
                            if not key.startswith("GPUPOOL_") or key == paths.ENVIRONMENT}
        self.environment["GPUPOOL_SIMGPU_STATE_DIR"] = str(self._shared)
        self.environment["GPUPOOL_CONNECT"] = f"unix:{self.run_dir}/gpupoold.sock"
        self.environment["CUPY_CACHE_DIR"] = str(self.directory / "cupy")
        if machine is not None:
            file = self.directory / "machine.toml"
            file.write_text(machine)
            self.environment["GPUPOOL_SIMGPU_MACHINE"] = str(file)
        self.write_config(options or {})
        self.daemon: subprocess.Popen[bytes] | None = None
        self.broker: subprocess.Popen[bytes] | None = None

    def write_config(self, options: Mapping[str, Mapping[str, str]]) -> None:
        """Writes gpupoold.conf: what this pool needs, and `options` by group."""
        groups: dict[str, dict[str, str]] = {
            "DEFAULT": {"host": "test-host", "run_dir": str(self.run_dir),
                        "state_dir": str(self.state_dir)},
            "gpus": {},
            "broker": {},
        }
        if self.driver is not None:
            groups["gpus"]["driver_directory"] = str(self.driver)
        for group, values in options.items():
            groups.setdefault(group, {}).update(values)
        self.config.write_text("".join(
            f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in values.items()) + "\n"
            for group, values in groups.items()))

    # -- processes ---------------------------------------------------------------------------------

    def start(self) -> Pool:
        """Starts broker and gpupoold and waits until both answer."""
        self.start_broker()
        self.start_daemon()
        return self

    def start_broker(self) -> None:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        with open(self.directory / "broker.log", "ab") as log:
            self.broker = subprocess.Popen([executable("gpupool-broker"), "--run-dir",
                                            str(self.run_dir)], stdout=log, stderr=log,
                                           stdin=subprocess.DEVNULL, env=self.environment)
        wait_for("the broker's sockets", lambda: self._alive(self.broker, "broker")
                 and (self.run_dir / "broker.sock").exists())

    def start_daemon(self) -> None:
        with open(self.directory / "gpupoold.log", "ab") as log:
            self.daemon = subprocess.Popen([executable("gpupoold"), "--config-file",
                                            str(self.config)], stdout=log, stderr=log,
                                           stdin=subprocess.DEVNULL, env=self.environment)
        wait_for("gpupoold's answer", lambda: self._alive(self.daemon, "gpupoold")
                 and (self.run_dir / "gpupoold.sock").exists()
                 and self.ctl("gpu", "list", check=False).returncode == 0)

    def daemon_once(self, timeout: float = START_SECONDS) -> tuple[int, str]:
        """Runs gpupoold in the foreground where it is expected to end by itself: status, output."""
        done = subprocess.run([executable("gpupoold"), "--config-file", str(self.config)],
                              capture_output=True, text=True, env=self.environment,
                              timeout=timeout, check=False)
        return done.returncode, done.stdout + done.stderr

    def kill(self, process: subprocess.Popen[bytes] | None, number: int = signal.SIGKILL) -> None:
        """Sends a signal to one of this pool's processes and waits for its end."""
        assert process is not None
        process.send_signal(number)
        process.wait(timeout=START_SECONDS)

    def stop(self) -> None:
        """Ends everything and removes the files; AssertionError when something would not end."""
        stubborn = []
        for name, process in (("gpupoold", self.daemon), ("broker", self.broker)):
            if process is None or process.poll() is not None:
                continue
            process.terminate()
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                stubborn.append(name)
        logs = self.logs() if stubborn else ""
        shutil.rmtree(self.directory, ignore_errors=True)
        shutil.rmtree(self._shared, ignore_errors=True)
        assert not stubborn, f"did not end within 15 s of SIGTERM: {stubborn}\n{logs}"

    def __enter__(self) -> Pool:
        try:
            return self.start()
        except BaseException:
            with contextlib.suppress(AssertionError):
                self.stop()
            raise

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _alive(self, process: subprocess.Popen[bytes] | None, name: str) -> bool:
        assert process is not None
        if process.poll() is not None:
            raise AssertionError(f"{name} ended with status {process.returncode}\n{self.logs()}")
        return True

    # -- what is asked of it -----------------------------------------------------------------------

    def ctl(self, *arguments: str, check: bool = True,
            timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """gpupoolctl; AssertionError with its output when it fails and `check` is set."""
        done = subprocess.run([executable("gpupoolctl"), *arguments], capture_output=True,
                              text=True, env=self.environment, timeout=timeout, check=False)
        if check and done.returncode != 0:
            raise AssertionError(f"gpupoolctl {' '.join(arguments)}: status {done.returncode}\n"
                                 f"{done.stdout}{done.stderr}\n{self.logs()}")
        return done

    def json(self, *arguments: str) -> Any:
        """What gpupoolctl --json says."""
        return json.loads(self.ctl("--json", *arguments).stdout)

    def slice(self, name: str, compute: int = 25, memory: int = 4096) -> str:
        """Makes a slice (percent, MiB) and returns its name."""
        self.ctl("slice", "create", "--name", name, "--compute", str(compute), "--memory",
                 str(memory))
        return name

    def run_command(self, slice_name: str, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` on a slice."""
        return [executable("gpupoolctl"), "run", "--slice", slice_name, "--", *command]

    def run(self, slice_name: str, command: Sequence[str], *, timeout: float = 300,
            environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Runs a program on a slice to its end; both outputs are captured."""
        return subprocess.run(self.run_command(slice_name, command), capture_output=True, text=True,
                              env={**self.environment, **(environment or {})}, timeout=timeout,
                              stdin=subprocess.DEVNULL, check=False)

    @contextlib.contextmanager
    def started(self, slice_name: str, command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
        """A program on a slice that is spoken with by pipes; killed at the end if it still runs."""
        process = subprocess.Popen(self.run_command(slice_name, command), stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                   env=self.environment, start_new_session=True)
        try:
            yield process
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                with contextlib.suppress(OSError):
                    stream.close()
            process.wait()

    def direct(self, command: Sequence[str], *, timeout: float = 300,
               environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Runs a program on the driver itself, without gpupool in between."""
        assert self.driver is not None
        return subprocess.run(list(command), capture_output=True, text=True, timeout=timeout,
                              env={**self.environment, "LD_LIBRARY_PATH": str(self.driver),
                                   **(environment or {})},
                              stdin=subprocess.DEVNULL, check=False)

    def used_mib(self, slice_name: str) -> int:
        """Memory charged to a slice now, MiB."""
        return int(self.json("slice", "show", slice_name)["memory_used_mib"])

    def sessions(self) -> list[dict[str, Any]]:
        """The sessions that gpupoold shows."""
        return list(self.json("session", "list"))

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
        """All that workers wrote."""
        return "".join(file.read_text(errors="replace")
                       for file in sorted((self.run_dir / "log").glob("*.log")))

    def logs(self) -> str:
        """The ends of all logs, for messages."""
        parts = []
        for file in (self.directory / "broker.log", self.directory / "gpupoold.log",
                     *sorted((self.run_dir / "log").glob("*.log"))):
            if file.exists():
                parts.append(f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}")
        return "\n".join(parts)
