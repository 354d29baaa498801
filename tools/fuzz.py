"""Builds the fuzz targets for libFuzzer and runs each for its part of a time budget.

What crashes, hangs or takes too much memory is left in build/fuzz/TARGET, and the exit status is
then 1. Inputs that reach something new are kept there as well, not in the sources: --minimise
merges them into tests/fuzz/corpus.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
CORPUS = ROOT / "tests" / "fuzz" / "corpus"
ONE_INPUT_SECONDS = 20  # a hang; the sanitizers' cost included
MEMORY_MIB = 2048
#: the longest input that is made, bytes
LONGEST = {"ptx": 16384, "images": 16384, "wire": 4096}


def build(directory: pathlib.Path) -> int:
    """The status of cmake."""
    configure = [
        "cmake", "-S", ROOT, "-B", directory, "-G", "Ninja",
        "-DCMAKE_C_COMPILER=clang", "-DCMAKE_CXX_COMPILER=clang++",
        f"-DPython3_EXECUTABLE={sys.executable}",
        "-DGPUPOOL_FUZZ=ON", "-DGPUPOOL_CLIENT_OLD_GLIBC=OFF",
        "-DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON",
    ]  # fmt: skip
    for command in (configure, ["cmake", "--build", directory, "--target", "fuzz_targets"]):
        status = subprocess.run([str(word) for word in command]).returncode
        if status:
            return status
    return 0


def command_of(program: pathlib.Path, target: str, *words: object) -> list[str]:
    limits = [
        f"-timeout={ONE_INPUT_SECONDS}",
        f"-rss_limit_mb={MEMORY_MIB}",
        f"-max_len={LONGEST[target]}",
        "-print_final_stats=1",
    ]
    return [str(word) for word in (program, *limits, *words)]


def run(program: pathlib.Path, target: str, seconds: int, found: pathlib.Path) -> int:
    """The status of libFuzzer, whose inputs lie in found/new."""
    new = found / "new"
    new.mkdir(parents=True, exist_ok=True)
    words = [f"-max_total_time={seconds}", f"-artifact_prefix={found}/", new, CORPUS / target]
    return subprocess.run(command_of(program, target, *words)).returncode


def minimise(program: pathlib.Path, target: str, found: pathlib.Path) -> int:
    """Replaces the corpus by the fewest of its and the new inputs that reach as much."""
    with tempfile.TemporaryDirectory(dir=CORPUS) as kept:
        words = ["-merge=1", "-use_counters=0", kept, CORPUS / target, found / "new"]
        status = subprocess.run(command_of(program, target, *words)).returncode
        if status == 0:
            # Inputs that have names of their own broke something once.
            for path in (CORPUS / target).iterdir():
                if len(path.name) == 40:
                    path.unlink()
            for path in pathlib.Path(kept).iterdir():
                shutil.move(path, CORPUS / target / path.name)
    return status


def report(path: pathlib.Path, results: dict[str, tuple[int, float]]) -> None:
    """A JUnit file with a test for each target."""
    suite = ElementTree.Element("testsuite", name="fuzz", tests=str(len(results)))
    suite.set("failures", str(sum(status != 0 for status, _ in results.values())))
    for target, (status, seconds) in results.items():
        case = ElementTree.SubElement(
            suite, "testcase", classname="fuzz", name=target, time=f"{seconds:.1f}"
        )
        if status:
            message = f"exit status {status}; the input is in build/fuzz/{target}"
            ElementTree.SubElement(case, "failure", message=message)
    path.parent.mkdir(parents=True, exist_ok=True)
    ElementTree.ElementTree(suite).write(path, encoding="unicode", xml_declaration=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz the parsers with libFuzzer.")
    parser.add_argument("--seconds", type=int, default=240, help="of all targets together")
    parser.add_argument("--results", type=pathlib.Path, help="JUnit file to write")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / "native-fuzz")
    parser.add_argument("--minimise", action="store_true", help="merge what is new into the corpus")
    parser.add_argument("target", nargs="*", help=f"of {', '.join(LONGEST)}; all unless given")
    arguments = parser.parse_args()
    targets = arguments.target or list(LONGEST)
    if status := build(arguments.build):
        return status
    os.environ["UBSAN_OPTIONS"] = "print_stacktrace=1:halt_on_error=1"
    results = {}
    for target in targets:
        program = arguments.build / "tests" / "fuzz" / f"fuzz_{target}"
        found = ROOT / "build" / "fuzz" / target
        begin = time.monotonic()
        if arguments.minimise:
            status = minimise(program, target, found)
        else:
            status = run(program, target, arguments.seconds // len(targets), found)
        results[target] = (status, time.monotonic() - begin)
    if arguments.results:
        report(arguments.results, results)
    for target, (status, _) in results.items():
        print(f"fuzz {target}: {'ok' if status == 0 else f'FAILED, exit status {status}'}")
    return int(any(status for status, _ in results.values()))


if __name__ == "__main__":
    sys.exit(main())
