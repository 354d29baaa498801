"""A throw-away pool on this machine: broker and gpupoold on the simulated GPU, gone afterwards.

`python -m gpupoold.testing.sandbox [--machine FILE] -- CMD` runs CMD with GPUPOOL_CONNECT set and
`gpupoolctl` in its PATH, and ends with CMD's exit status.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import gpupoold
from gpupoold import paths

# Users of this module start processes while gRPC's threads run.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

START_SECONDS = 60.0
STOP_SECONDS = 10.0
#: becomes the command, which then ends with us: a sandbox that is killed leaves nothing behind.
#: (Not a preexec_fn: gRPC does not survive a fork that runs Python.)
DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL", "--")


class SandboxError(Exception):
    """The pool does not start; the message holds the last lines of the logs."""


def _open_to_all(path: Path) -> bool:
    """Whether every user may pass through the directory and all above it."""
    for part in [path, *path.parents]:
        try:
            if not part.stat().st_mode & stat.S_IXOTH:
                return False
        except OSError:
            return False
    return True


class Sandbox:
    """One host of a pool, with its own directories; a context manager.

    Several can live on one machine at once.
    """

    def __init__(
        self,
        *,
        native: Path | None = None,
        driver_directory: Path | str | None = None,
        machine: Path | str | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        environment: Mapping[str, str] | None = None,
        worker_user: str | None = None,
        start_broker: bool = True,
        keep: bool = False,
    ) -> None:
        """native: prefix of the native parts (default: the installed ones).

        driver_directory: default the simulated GPU's; "" the system's driver. machine: another
        machine description for the simulated GPU. options: further configuration, by group.
        worker_user: default nobody where this runs as root and nobody can reach the programs.
        keep: leave the directory for a look at the logs.
        """
        self.native = (native or paths.native_directory()).resolve()
        if driver_directory is None:
            driver_directory = self.native / "simgpu"
        self.driver_directory = str(driver_directory)
        self.machine = str(Path(machine).resolve()) if machine else ""
        self.options = {group: dict(values) for group, values in (options or {}).items()}
        self.extra_environment = dict(environment or {})
        self.worker_user = worker_user
        self.start_broker_too = start_broker
        self.keep = keep
        self.root = Path()
        self.daemon: subprocess.Popen[bytes] | None = None
        self.broker: subprocess.Popen[bytes] | None = None

    # ---- places ---------------------------------------------------------------------------------

    @property
    def run_dir(self) -> Path:
        """Sockets and lease files."""
        return self.root / "run"

    @property
    def state_dir(self) -> Path:
        """The state that outlives gpupoold."""
        return self.root / "state"

    @property
    def config_file(self) -> Path:
        """gpupoold's configuration."""
        return self.root / "gpupoold.conf"

    @property
    def connect(self) -> str:
        """For gpupoolctl --connect."""
        return f"unix:{self.run_dir}/gpupoold.sock"

    @property
    def daemon_log(self) -> Path:
        """What gpupoold wrote."""
        return self.root / "gpupoold.log"

    @property
    def broker_log(self) -> Path:
        """What the broker wrote."""
        return self.root / "broker.log"

    @property
    def environment(self) -> dict[str, str]:
        """For programs that use this pool."""
        result = dict(os.environ)
        result.update(self.extra_environment)
        result["GPUPOOL_NATIVE_DIR"] = str(self.native)
        result["GPUPOOL_CONNECT"] = self.connect
        result["GPUPOOL_SIMGPU_STATE_DIR"] = str(self.root / "simgpu")
        if self.machine:
            result["GPUPOOL_SIMGPU_MACHINE"] = self.machine
        # The processes run this very gpupoold, also where it is not installed.
        packages = Path(gpupoold.__file__).resolve().parents[1]
        if packages.name not in ("site-packages", "dist-packages"):
            others = [path for path in result.get("PYTHONPATH", "").split(os.pathsep) if path]
            result["PYTHONPATH"] = os.pathsep.join([str(packages), *others])
        here = str(Path(sys.executable).parent)
        if here not in result.get("PATH", "").split(os.pathsep):
            result["PATH"] = os.pathsep.join([here, result.get("PATH", os.defpath)])
        return result

    def join_command(self) -> str:
        """What a shell outside runs to use this pool, too."""
        there = self.environment
        names = [name for name in there if there[name] != os.environ.get(name) and name != "PATH"]
        settings = [f"{name}={shlex.quote(there[name])}" for name in sorted(names)]
        settings.append(f"PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH")
        return "  export " + " ".join(settings)

    # ---- life -----------------------------------------------------------------------------------

    def __enter__(self) -> Sandbox:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def prepare(self) -> None:
        """Makes the directories and the configuration file, and starts nothing."""
        # Short: the path of a unix socket has at most 107 bytes.
        self.root = Path(tempfile.mkdtemp(prefix="gpupool-", dir="/tmp"))
        self.root.chmod(0o755)
        self.run_dir.mkdir()
        simgpu = self.root / "simgpu"
        simgpu.mkdir()
        simgpu.chmod(0o1777)  # workers are another user
        self.write_config()

    def write_config(self) -> None:
        """Writes the configuration file from `options`."""
        groups: dict[str, dict[str, Any]] = {
            "DEFAULT": {
                "host": "sandbox",
                "state_dir": self.state_dir,
                "run_dir": self.run_dir,
            },
            "gpus": {"memory_reserve_mib": 1024},
            "broker": {"worker_user": self._user()},
            "containers": {"cdi_dir": ""},  # the directories where runtimes look are the machine's
        }
        if self.driver_directory:
            groups["gpus"]["driver_directory"] = self.driver_directory
        for group, values in self.options.items():
            groups.setdefault(group, {}).update(values)
        lines: list[str] = []
        for group, values in groups.items():
            lines.append(f"[{group}]")
            lines += [f"{name} = {value}" for name, value in values.items()]
        self.config_file.write_text("\n".join(lines) + "\n")

    def _user(self) -> str:
        if self.worker_user is not None:
            return self.worker_user
        reachable = [self.native / "bin"]
        if self.driver_directory:
            reachable.append(Path(self.driver_directory))
        if self.machine:
            reachable.append(Path(self.machine).parent)
        return "nobody" if os.geteuid() == 0 and all(map(_open_to_all, reachable)) else ""

    def start(self) -> None:
        """Starts both processes and waits until programs can run; raises SandboxError."""
        self.prepare()
        try:
            if self.start_broker_too:
                self.start_broker()
            self.start_daemon()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends both processes and removes the directory."""
        for process in (self.daemon, self.broker):
            if process is not None and process.poll() is None:
                process.terminate()
        for process in (self.daemon, self.broker):
            if process is None:
                continue
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.daemon = self.broker = None
        if self.root != Path() and not self.keep:
            shutil.rmtree(self.root, ignore_errors=True)

    def _spawn(self, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        prefix = DIE_WITH_PARENT if shutil.which(DIE_WITH_PARENT[0]) else ()
        with log.open("ab") as stream:
            return subprocess.Popen(
                [*prefix, *command],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env=self.environment,
                cwd=self.root,
            )

    def broker_command(self) -> list[str]:
        """The command line of the broker."""
        return [str(self.native / "bin" / "gpupool-broker"), "--run-dir", str(self.run_dir)]

    def start_broker(self) -> None:
        """Starts the broker."""
        program = self.native / "bin" / "gpupool-broker"
        if not program.exists():
            raise SandboxError(
                f"{program} is missing: build the native parts, or name them in {paths.ENVIRONMENT}"
            )
        self.broker = self._spawn(self.broker_command(), self.broker_log)

    def start_daemon(self, wait: bool = True) -> None:
        """Starts gpupoold, and waits until it answers (and has its broker, if one runs)."""
        self.daemon = self._spawn(
            [sys.executable, "-m", "gpupoold.cmd.daemon", "--config-file", str(self.config_file)],
            self.daemon_log,
        )
        if wait:
            self.wait_healthy()

    def wait_healthy(self, seconds: float = START_SECONDS) -> None:
        """Waits until gpupoold answers and is connected to the broker; raises SandboxError."""
        deadline = time.monotonic() + seconds
        problem = "it did not answer"
        while time.monotonic() < deadline:
            for name, process in (("gpupoold", self.daemon), ("gpupool-broker", self.broker)):
                if process is not None and process.poll() is not None:
                    raise SandboxError(
                        f"{name} ended with status {process.returncode}\n{self.log_tails()}"
                    )
            problem = self._problem()
            if not problem:
                return
            time.sleep(0.05)
        raise SandboxError(f"the pool is not ready: {problem}\n{self.log_tails()}")

    def _problem(self) -> str:
        import grpc

        from gpupoold.api import gpupool_pb2, gpupool_pb2_grpc

        if not (self.run_dir / "gpupoold.sock").exists():
            return "gpupoold has no socket"
        # A channel of its own each time: gRPC waits longer and longer between its own attempts.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        with grpc.insecure_channel(self.connect, options=options) as channel:
            try:
                host = gpupool_pb2_grpc.PoolStub(channel).GetHost(
                    gpupool_pb2.GetHostRequest(), timeout=2
                )
            except grpc.RpcError as error:
                return f"gpupoold: {error.details()}"  # type: ignore[attr-defined]
        if self.broker is not None and not host.broker_connected:
            return f"broker: {host.broker_problem}"
        return ""

    def log_tails(self, lines: int = 30) -> str:
        """The last lines of both logs."""
        parts = []
        for path in (self.daemon_log, self.broker_log):
            with contextlib.suppress(OSError):
                tail = path.read_text(errors="replace").splitlines()[-lines:]
                parts.append(f"--- {path.name}\n" + "\n".join(tail))
        return "\n".join(parts)

    def end_daemon(self, number: int = signal.SIGTERM) -> int:
        """Ends gpupoold with a signal and returns its exit status."""
        return self._end(self.daemon, number)

    def end_broker(self, number: int = signal.SIGTERM) -> int:
        """Ends the broker with a signal and returns its exit status."""
        return self._end(self.broker, number)

    @staticmethod
    def _end(process: subprocess.Popen[bytes] | None, number: int) -> int:
        if process is None:
            raise SandboxError("it was not started")
        process.send_signal(number)
        return process.wait(STOP_SECONDS)

    # ---- use ------------------------------------------------------------------------------------

    def ctl_command(self, *arguments: str) -> list[str]:
        """The command line of gpupoolctl."""
        return [sys.executable, "-m", "gpupoold.cmd.ctl", *arguments]

    def ctl(
        self, *arguments: str, check: bool = False, timeout: float = 120, **keywords: Any
    ) -> subprocess.CompletedProcess[str]:
        """Runs gpupoolctl and captures its output; with check, raises SandboxError on failure."""
        keywords.setdefault("env", self.environment)
        done = subprocess.run(
            self.ctl_command(*arguments),
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            **keywords,
        )
        if check and done.returncode != 0:
            raise SandboxError(
                f"gpupoolctl {' '.join(arguments)}: status {done.returncode}\n{done.stdout}"
                f"{done.stderr}{self.log_tails()}"
            )
        return done

    def ctl_json(self, *arguments: str) -> Any:
        """Runs gpupoolctl --json and returns what it printed; raises SandboxError on failure."""
        return json.loads(self.ctl("--json", *arguments, check=True).stdout)

    def popen(self, *arguments: str, **keywords: Any) -> subprocess.Popen[str]:
        """Starts gpupoolctl and returns at once, with pipes for its output."""
        keywords.setdefault("env", self.environment)
        keywords.setdefault("stdout", subprocess.PIPE)
        keywords.setdefault("stderr", subprocess.PIPE)
        return subprocess.Popen(self.ctl_command(*arguments), text=True, **keywords)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="sandbox", description="Run a command beside a throw-away pool."
    )
    parser.add_argument("--machine", metavar="FILE", help="machine of the simulated GPU")
    parser.add_argument(
        "--driver",
        metavar="DIRECTORY",
        help="a driver directory, 'quiet' for the driver that does nothing, 'system' for the "
        "system's; default: the simulated GPU",
    )
    parser.add_argument("--tcp", action="store_true", help="let clients connect by TCP too")
    parser.add_argument("--keep", action="store_true", help="keep the directory and tell its name")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD")
    chosen = parser.parse_args(arguments)
    command = chosen.command[1:] if chosen.command[:1] == ["--"] else chosen.command
    if not command:
        command = [os.environ.get("SHELL", "/bin/sh")]
    driver: str | None = chosen.driver
    if driver == "quiet":
        driver = str(paths.native_directory() / "quiet")
    elif driver == "system":
        driver = ""
    options = {"broker": {"tcp_listen": "127.0.0.1:0"}} if chosen.tcp else None
    pool = Sandbox(
        driver_directory=driver, machine=chosen.machine, options=options, keep=chosen.keep
    )
    try:
        with pool:
            if chosen.keep:
                print(f"sandbox: {pool.root}", file=sys.stderr)
            if sys.stdin.isatty():
                print(f"sandbox: another shell joins with:\n{pool.join_command()}", file=sys.stderr)
            # ^C is for the command, which gets the default back when it is executed.
            signal.signal(signal.SIGINT, lambda number, frame: None)
            try:
                status = subprocess.run(command, env=pool.environment).returncode
            except OSError as error:
                print(f"sandbox: {command[0]}: {error.strerror}", file=sys.stderr)
                return 127
            return status if status >= 0 else 128 - status
    except SandboxError as error:
        print(f"sandbox: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
