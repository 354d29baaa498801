"""Runs modules of numba-cuda's test suite, each in a process of its own, and tells each result.

Started by run.py, directly on a driver or through gpupool. Results are lines of JSON:
{"test", "outcome", "seconds", "text"}, written as soon as a test has ended, so that a process that
dies or hangs takes only the test with it that it was running; its module goes on in another one.
The processes are forked from this one, which has imported numba but not touched the driver.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pytest

MARK = "numba/cuda/tests/"


def suite_directory() -> Path:
    """Where the installed numba-cuda keeps its tests."""
    specification = importlib.util.find_spec("numba_cuda")
    if specification is None or not specification.submodule_search_locations:
        sys.exit("numba-cuda is not installed beside this Python")
    return Path(next(iter(specification.submodule_search_locations))) / MARK


def modules_of(directory: Path) -> list[str]:
    """All test modules, relative to the suite's directory."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("test_*.py"))


class Recorder:
    """A pytest plugin: writes what happens to a pipe, and leaves out what was run already."""

    def __init__(self, stream: IO[str], done: Iterable[str]) -> None:
        self.stream = stream
        self.done = frozenset(done)
        self.failed: dict[str, str] = {}
        self.skipped: dict[str, str] = {}
        self.expected: dict[str, str] = {}
        self.started: dict[str, tuple[float, float]] = {}
        self.session: pytest.Session | None = None

    def say(self, **line: Any) -> None:
        """Writes one line."""
        self.stream.write(json.dumps(line) + "\n")
        self.stream.flush()

    @pytest.fixture
    def initialize_from_pytest_config(self, request: pytest.FixtureRequest) -> None:
        """What the suite's own configuration, which is not in its wheel, gives to its classes."""
        request.cls._dump_failed_filechecks = False

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Keeps the session, to be able to end it."""
        self.session = session

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leaves out the tests whose results are known."""
        items[:] = [item for item in items if item.nodeid not in self.done]
        self.say(collected=[item.nodeid for item in items])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A module that can't be imported, or that skips itself."""
        name = report.nodeid
        if report.outcome == "passed" or name in self.done:
            return
        self.say(
            test=name,
            outcome="skipped" if report.outcome == "skipped" else "failed",
            seconds=0.0,
            text=_text(report),
        )

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Tells the parent whose time runs."""
        self.started[nodeid] = (time.monotonic(), _cpu_seconds())
        self.say(start=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Set-up, call, tear-down and sub-tests of a test."""
        if report.outcome == "failed":
            self.failed.setdefault(report.nodeid, _text(report))
        elif report.outcome == "skipped":
            reasons = self.expected if hasattr(report, "wasxfail") else self.skipped
            if not _is_subtest(report):
                reasons.setdefault(report.nodeid, _text(report))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Tells the result."""
        outcome, text = "passed", self.expected.get(nodeid, "")
        if nodeid in self.failed:
            outcome, text = "failed", self.failed[nodeid]
        elif nodeid in self.skipped:
            outcome, text = "skipped", self.skipped[nodeid]
        seconds, cpu = self.started[nodeid]
        self.say(
            test=nodeid,
            outcome=outcome,
            seconds=round(time.monotonic() - seconds, 2),
            cpu=round(_cpu_seconds() - cpu, 2),
            text=text,
        )
        if outcome == "failed" and self.session:
            # An error may have stayed with the context: the other tests get a process of their own.
            self.session.shouldstop = "after a failure"


def _cpu_seconds() -> float:
    """Processor time of this process and of those that it waited for."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def _is_subtest(report: pytest.TestReport) -> bool:
    return type(report) is not pytest.TestReport


def _text(report: pytest.TestReport | pytest.CollectReport) -> str:
    if isinstance(report.longrepr, tuple):  # a skip: file, line, reason
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    text = str(report.longrepr or getattr(report, "wasxfail", ""))
    for title, content in report.sections:
        text += f"\n--- {title}\n{content[-3000:]}"
    return text[-9000:]


@dataclass
class Module:
    """A module in work."""

    path: str
    pid: int = 0
    pipe: int = -1
    buffer: bytes = b""
    current: str = ""
    since: float = 0.0
    tests: dict[str, str] = field(default_factory=dict)
    collected: list[str] = field(default_factory=list)
    late: bool = False
    before: int = 0  # tests whose results earlier processes told


class Runner:
    """Keeps up to `jobs` processes at work."""

    def __init__(self, directory: Path, output: Path, jobs: int, limit: float) -> None:
        """limit: seconds for one test, and for the start of a module."""
        self.directory = directory
        self.output = output
        self.jobs = jobs
        self.limit = limit
        self.selector = selectors.DefaultSelector()
        self.results = (output / "results.jsonl").open("w")

    def record(self, module: Module, **line: Any) -> None:
        """Takes a result from a module's process, or states one in its place."""
        module.tests[line["test"]] = line["outcome"]
        self.results.write(json.dumps(line) + "\n")
        self.results.flush()

    def start(self, module: Module) -> None:
        """Forks the process of a module."""
        reader, writer = os.pipe()
        log = os.open(
            self.output / (module.path.replace("/", ".") + ".log"),
            os.O_WRONLY | os.O_CREAT | os.O_APPEND,
            0o644,
        )
        module.pid = os.fork()
        if module.pid == 0:
            status = 70
            try:
                os.setsid()
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.close(reader)
                os.dup2(log, 1)
                os.dup2(log, 2)
                stream = os.fdopen(writer, "w")  # never closed: its end tells the process's
                status = _run_module(self.directory, module.path, stream, module.tests)
            finally:
                os._exit(status)
        os.close(writer)
        os.close(log)
        module.pipe = reader
        module.buffer = b""
        module.current = ""
        module.since = time.monotonic()
        module.late = False
        module.before = len(module.tests)
        self.selector.register(reader, selectors.EVENT_READ, module)

    def line(self, module: Module, line: dict[str, Any]) -> None:
        """One line of a module's process."""
        module.since = time.monotonic()
        if "start" in line:
            module.current = line["start"]
        elif "collected" in line:
            module.collected = line["collected"]
        else:
            module.current = ""
            self.record(module, **line)

    def read(self, module: Module) -> bool:
        """Reads what a module's process wrote; False when it has ended."""
        data = os.read(module.pipe, 1 << 16)
        *lines, module.buffer = (module.buffer + data).split(b"\n")
        for line in lines:
            self.line(module, json.loads(line))
        return bool(data)

    def end(self, module: Module) -> bool:
        """Takes leave of a module's process; False if the module needs another one."""
        self.selector.unregister(module.pipe)
        os.close(module.pipe)
        # What its tests left behind, too.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(module.pid, signal.SIGKILL)
        _, status = os.waitpid(module.pid, 0)
        left = [test for test in module.collected if test not in module.tests]
        if not left and (module.collected or module.tests):
            return True
        if left and len(module.tests) > module.before and not module.current:
            return False  # it stopped after a failure
        how = (
            f"ended by signal {os.WTERMSIG(status)}"
            if os.WIFSIGNALED(status)
            else f"ended with status {os.waitstatus_to_exitcode(status)}"
        )
        if module.late:
            how = f"did not end within {self.limit:g} s"
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 5 and not left:
            return True  # pytest: no tests
        test = module.current or (left[0] if left else module.path)
        self.record(module, test=test, outcome="failed", seconds=0.0, text=f"the process {how}")
        return len(left) <= 1

    def run(self, modules: list[str]) -> None:
        """Runs all modules; leaves no process behind, also when it is stopped."""
        try:
            self._run(modules)
        finally:
            for key in self.selector.get_map().values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(key.data.pid, signal.SIGKILL)

    def _run(self, modules: list[str]) -> None:
        waiting = [Module(path) for path in reversed(modules)]
        working: set[int] = set()
        while waiting or working:
            while waiting and len(working) < self.jobs:
                module = waiting.pop()
                self.start(module)
                working.add(module.pipe)
            for key, _ in self.selector.select(timeout=1.0):
                module = key.data
                if not self.read(module):
                    working.discard(module.pipe)
                    if not self.end(module):
                        waiting.append(module)
            for key in list(self.selector.get_map().values()):
                module = key.data
                if not module.late and time.monotonic() - module.since > self.limit:
                    module.late = True
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(module.pid, signal.SIGKILL)


def _run_module(directory: Path, path: str, stream: IO[str], done: Iterable[str]) -> int:
    arguments = ["-q", "--tb=native", "-p", "no:cacheprovider", "--benchmark-disable"]
    arguments += ["-o", "consider_namespace_packages=true"]
    arguments += ["--rootdir", str(directory), "-c", os.devnull, str(directory / path)]
    return int(pytest.main(arguments, plugins=[Recorder(stream, done)]))


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="list the modules and do nothing else")
    parser.add_argument("--output", type=Path, default=Path(), help="directory for the results")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one test")
    parser.add_argument(
        "modules", nargs="*", help="of the suite, as in its directory; default: all"
    )
    chosen = parser.parse_args()
    directory = suite_directory()
    if chosen.list:
        print("\n".join(modules_of(directory)))
        return 0
    chosen.output.mkdir(parents=True, exist_ok=True)

    # Imported once for all, before the forks. None of these touches the driver.
    import numba.cuda.testing  # noqa: F401

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    os.chdir(chosen.output)
    Runner(directory, chosen.output, chosen.jobs, chosen.limit).run(
        chosen.modules or modules_of(directory)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
