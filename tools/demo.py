"""The main job, shown: a slice of a simulated GPU runs unmodified CUDA programs.

Runs inside a throw-away pool (tools/dev demo makes it). Exit status 0 and the last line `demo of
programs: ok` only when every step came out as it should.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parent.parent
BIN = pathlib.Path(sys.executable).parent
SLICE = "demo"


class DemoError(Exception):
    """A step did not come out as it should; the sentence says which and how."""


def ctl(*arguments: str) -> list[str]:
    return [str(BIN / "gpupoolctl"), *arguments]


def show(title: str, command: list[str], *, shown: str | None = None, status: int = 0) -> str:
    """Runs a command, prints it and what it printed; its standard output is returned."""
    print(f"\n-- {title}\n$ {shown or ' '.join(command).replace(str(BIN) + '/', '')}", flush=True)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    text = (done.stdout + done.stderr).rstrip()
    if text:
        print(text, flush=True)
    if done.returncode != status:
        raise DemoError(f"'{title}' ended with exit status {done.returncode} instead of {status}")
    return done.stdout


def expect(condition: bool, sentence: str) -> None:
    if not condition:
        raise DemoError(sentence)


def listed(what: str) -> list[dict]:
    output = subprocess.run(ctl("--json", what, "list"), capture_output=True, text=True, check=True)
    return json.loads(output.stdout)


def compiled(python: str, name: str) -> str:
    """The executable of a program in tests/programs."""
    command = [python, "-m", "tests.programs.toolchain", name]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise DemoError(f"compiling {name} failed:\n{done.stdout}{done.stderr}")
    return done.stdout.split()[-1]


def run_in_slice(title: str, command: list[str], shown: str, last_line: str = "ok") -> None:
    output = show(
        title,
        ctl("run", "--slice", SLICE, "--", *command),
        shown=f"gpupoolctl run --slice {SLICE} -- {shown}",
    )
    expect(output.splitlines()[-1:] == [last_line], f"{shown} did not end with '{last_line}'")


def show_session(loop: str) -> None:
    command = ctl("run", "--slice", SLICE, "--", loop, "0")
    program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert program.stdout is not None
        expect(program.stdout.readline() == "ready\n", "the looping program did not start")
        show("the session of a program while it runs", ctl("session", "list"))
        sessions = listed("session")
        expect(len(sessions) == 1, f"{len(sessions)} sessions are listed instead of one")
    finally:
        program.kill()
        program.wait()
    deadline = time.monotonic() + 5
    while listed("session") and time.monotonic() < deadline:
        time.sleep(0.05)
    expect(not listed("session"), "the session of a killed program is still there after 5 s")
    print("(the program was killed; its session and its memory are gone)")


def demo_as_root(what: str, job: Callable[[dict[str, pathlib.Path]], None]) -> int:
    """The command line of a part that needs root: compiles its programs and runs the job with
    them; an exit status."""
    parser = argparse.ArgumentParser(description=f"The main job {what}.")
    parser.add_argument("--programs-python", required=True, help="has nvcc")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        print(f"demo {what}: needs root", file=sys.stderr)
        return 2
    try:
        names = ("matmul", "memory", "loop")
        job({name: pathlib.Path(compiled(arguments.programs_python, name)) for name in names})
    except (AssertionError, DemoError, ImportError, OSError, subprocess.SubprocessError) as error:
        print(f"\ndemo {what}: FAILED: {error}")
        return 1
    print(f"\ndemo {what}: ok")
    return 0


def steps(python: str) -> None:
    show("the cards of this machine (simulated)", ctl("gpu", "list"))
    expect(len(listed("gpu")) == 2, "two simulated cards were expected")

    create = ("slice", "create", "--name", SLICE, "--compute", "25", "--memory", "4096")
    show("a quarter of a card, 4096 MiB of memory", ctl(*create))
    show("what the pool has now", ctl("slice", "list"))

    driver = compiled(python, "loop")
    memory = compiled(python, "memory")
    matmul = compiled(python, "matmul")
    run_in_slice("a program that uses the driver API", [driver, "5"], "./loop 5")
    run_in_slice("a program made by nvcc, static cudart", [matmul], "./matmul")
    programs = ROOT / "tests" / "programs" / "python"
    for title, name in (
        ("Numba kernels", "numba_kernels.py"),
        ("CuPy expressions", "cupy_arrays.py"),
    ):
        # Without Numba's advice on performance.
        run_in_slice(title, [python, "-W", "ignore", str(programs / name)], f"python {name}")

    show_session(driver)

    words = ["alloc", "4097", "alloc", "4000", "info"]
    output = show(
        "4097 MiB are refused (2: CUDA_ERROR_OUT_OF_MEMORY), 4000 MiB are not",
        ctl("run", "--slice", SLICE, "--", memory, *words),
        shown=f"gpupoolctl run --slice {SLICE} -- ./memory {' '.join(words)}",
    )
    expect("alloc 4097: 2\nalloc 4000: 0\n" in output, "the quota did not hold")

    show("the slice is removed", ctl("slice", "delete", SLICE))
    expect(not listed("slice"), "the slice is still there")
    show("nothing is left", ctl("slice", "list"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs-python", required=True, help="has Numba, CuPy and nvcc")
    arguments = parser.parse_args()
    if not os.environ.get("GPUPOOL_CONNECT"):
        print("demo: start it with tools/dev demo", file=sys.stderr)
        return 2
    if shutil.which("g++") is None:
        print("demo: g++ is not installed", file=sys.stderr)
        return 1
    try:
        steps(arguments.programs_python)
    except (DemoError, subprocess.SubprocessError) as error:
        print(f"\ndemo of programs: FAILED: {error}")
        return 1
    print("\ndemo of programs: ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
