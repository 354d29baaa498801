"""Runs numba-cuda's own test suite, from its wheel, on the simulated GPU: directly and on a slice.

    python tests/numba/run.py [--all] [--through direct,pool] [MODULE...]

Both ways must give the same results, and only the tests that expected.toml lists may fail: a
failure outside of the list, or a pass inside it, is an error, as is a skip for a reason that it
doesn't name. Without --all only the modules that quick.txt names run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

# Behind the installed packages: the suite runs on the gpupool that was built and installed.
sys.path.append(str(Path(__file__).resolve().parent.parent.parent))

from gpupoold.testing.sandbox import Sandbox
from tests.numba.expectations import WAYS, Expectations, Result, differences, problems_of

HERE = Path(__file__).resolve().parent
MOST_EXPECTED = 0.15  # of the tests of the whole suite


def links(directory: Path, driver: Path) -> Path:
    """A directory with the driver under both of its names."""
    directory.mkdir()
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        (directory / name).symlink_to(driver / name)
    (directory / "libcuda.so").symlink_to(driver / "libcuda.so.1")
    return directory


def run_way(way: str, pool: Sandbox, command: list[str], output: Path, scratch: Path) -> None:
    """Runs the suite one way; the results are in `output`."""
    environment = pool.environment
    environment.pop("GPUPOOL_LEASE_FILE", None)
    environment.pop("PYTHONPATH", None)
    environment["PYTHONSAFEPATH"] = "1"
    environment["CUPY_COMPILE_WITH_PTX"] = "1"
    environment["CUPY_CACHE_DIR"] = str(scratch / "cupy")
    environment["CUDA_VISIBLE_DEVICES"] = "0"  # a slice is one card
    environment["TMPDIR"] = str(scratch)
    command = [*command, "--output", str(output)]
    if way == "direct":
        driver = links(scratch / "driver", Path(pool.driver_directory))
        environment["LD_LIBRARY_PATH"] = str(driver)
    else:
        pool.ctl(
            "slice",
            "create",
            "--name",
            "numba",
            "--compute",
            "100",
            "--memory",
            "40960",
            check=True,
        )
        # gpupoolctl itself may need the path that the sandbox gives it; the suite does not.
        environment["PYTHONPATH"] = pool.environment.get("PYTHONPATH", "")
        command = pool.ctl_command("run", "--slice", "numba", "--", *command)
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
    try:
        status = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if status != 0:
        print(f"{way}: the suite's runner ended with status {status}")


def read_results(output: Path) -> dict[str, Result]:
    """The results by test; those that there are if the suite was stopped."""
    results = {}
    with contextlib.suppress(FileNotFoundError), (output / "results.jsonl").open() as lines:
        for line in lines:
            with contextlib.suppress(ValueError):  # the last line, cut short
                result = Result(**json.loads(line))
                results[result.test] = result
    return results


def add_to(
    suite: ET.Element,
    way: str,
    results: dict[str, Result],
    expected: Expectations,
    problems: dict[str, str],
) -> None:
    """Adds the results of one way to a JUnit suite."""
    for test in sorted(results.keys() | problems.keys()):
        result = results.get(test, Result(test, "failed"))
        module, _, name = test.partition("::")
        case = ET.SubElement(
            suite,
            "testcase",
            classname=f"numba.{way}.{module}",
            name=name or module,
            time=f"{result.seconds:.2f}",
        )
        if test in problems:
            ET.SubElement(case, "failure", message=problems[test][:200]).text = problems[test]
        elif result.outcome == "failed":
            ET.SubElement(case, "skipped", message=f"expected: {expected.failures[way][test]}")
        elif result.outcome == "skipped":
            ET.SubElement(case, "skipped", message=result.text[:200])


class Stopped(Exception):
    """By a signal."""


def _stopped(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what is left takes no time
    raise Stopped


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="the whole suite")
    parser.add_argument("--through", default=",".join(WAYS), help="direct, pool or both")
    parser.add_argument("--python", default=sys.executable, help="with numba-cuda; default: this")
    parser.add_argument("--jobs", default="2", help="tests at a time")
    parser.add_argument("--limit", default="120", help="seconds for one test")
    parser.add_argument("--junitxml", type=Path, help="file for the results")
    parser.add_argument("--output", type=Path, help="directory for logs; must not exist")
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="like cudapy/test_math.py")
    chosen = parser.parse_args()
    ways = chosen.through.split(",")
    if not set(ways) <= set(WAYS):
        parser.error("--through: direct, pool or direct,pool")
    signal.signal(signal.SIGTERM, _stopped)
    expected = Expectations.read(HERE / "expected.toml")
    modules: list[str] = chosen.modules
    command = [chosen.python, "-P", str(HERE / "suite.py")]
    if not modules and not chosen.all:
        modules = (HERE / "quick.txt").read_text().split()
    everything = subprocess.run(
        [*command, "--list"], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.split()
    unknown = set(modules) - set(everything)
    if unknown:
        sys.exit(f"numba-cuda has no test module {', '.join(sorted(unknown))}")
    command += ["--jobs", chosen.jobs, "--limit", chosen.limit, *modules]

    scratch = Path(tempfile.mkdtemp(prefix="gpupool-numba-", dir="/tmp"))
    output: Path = chosen.output or scratch / "output"
    output.mkdir(parents=True)
    suite = ET.Element("testsuite", name="numba")
    failed = 0
    try:
        with Sandbox() as pool:
            for way in ways:
                (scratch / way).mkdir()
                (output / way).mkdir()
                run_way(way, pool, command, output / way, scratch / way)
    except Stopped:
        print("numba: stopped before its end; is its time budget too small for this machine?")
        failed += 1
    try:
        results = {way: read_results(output / way) for way in ways}
        for way in ways:
            problems = problems_of(way, results[way], expected, set(modules or everything))
            if way == "pool" and "direct" in results:
                for test, what in differences(results, expected).items():
                    problems.setdefault(test, what)
            counts = Counter(result.outcome for result in results[way].values())
            cpu = sum(result.cpu for result in results[way].values())
            print(
                f"{way}: {sum(counts.values())} tests: {counts['passed']} passed, "
                f"{counts['failed']} failed, {counts['skipped']} skipped by the suite; "
                f"{cpu:.0f} s of processor time in the tests' processes"
            )
            for test, what in problems.items():
                print(f"\n{way}: {test}\n{what}")
            failed += len(problems)
            add_to(suite, way, results[way], expected, problems)
            if not modules:
                share = len(expected.failures[way]) / max(1, len(results[way]))
                print(f"{way}: {share:.1%} of all tests are expected to fail")
                if share > MOST_EXPECTED:
                    print(f"{way}: more than {MOST_EXPECTED:.0%} are expected to fail")
                    failed += 1
    finally:
        if chosen.junitxml:
            chosen.junitxml.parent.mkdir(parents=True, exist_ok=True)
            ET.ElementTree(suite).write(chosen.junitxml, encoding="unicode")
        shutil.rmtree(scratch, ignore_errors=True)
    print("numba: ok" if not failed else f"numba: {failed} problems")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
