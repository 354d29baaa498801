#!/usr/bin/env python3
"""Compares programs with and without gpupool on a real card, in less than ten minutes.

    tools/dev gpu-check [--native DIR] [--report FILE] [--minutes N]

Uses only what is there: no network. Native parts come from --native, $GPUPOOL_NATIVE_DIR, an
installed gpupool, or are built here with CMake. CUDA programs need nvcc or an earlier build of them
in build/programs; Python programs run where PyTorch, CuPy, Numba or cuda-bindings is installed.
Each program runs on the driver itself and through a slice; both must be right and say the same. The
report (Markdown, and JSON beside it) has the figures. Exit status: 0 all equal, 1 otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.append(str(REPOSITORY))

from tests.programs.bare_pool import BarePool, BarePoolError  # noqa: E402
from tests.programs.catalog import (  # noqa: E402
    DRIVER_PROGRAMS,
    PYCUDA,
    PYTHON_PROGRAMS,
    RUNTIME_PROGRAMS,
    TORCH,
    Program,
)
from tests.programs.toolchain import Compiler, ToolchainError  # noqa: E402

WORK = REPOSITORY / "build" / "gpu-check"


class CheckError(Exception):
    """Why there is nothing to compare, in a sentence."""


@dataclass
class Card:
    """The first device of the system's driver."""

    name: str
    uuid: str
    memory_mib: int
    compute_capability: str
    driver: str


@dataclass
class Outcome:
    """One program: what was wrong (empty: nothing), and seconds of the two runs."""

    program: str
    problem: str = ""
    direct_seconds: float = 0.0
    remote_seconds: float = 0.0
    skipped: str = ""


@dataclass
class Report:
    """Everything that was found."""

    card: Card
    pool: str
    outcomes: list[Outcome] = field(default_factory=list)
    overhead: list[dict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find_card(driver: str) -> Card:
    """Asks the driver in a directory (empty: the system's); CheckError when there is no card."""
    try:
        cuda = ctypes.CDLL(os.path.join(driver, "libcuda.so.1"))
    except OSError:
        raise CheckError(
            f"{driver or 'this machine'} has no NVIDIA driver (no libcuda.so.1)"
        ) from None
    status = cuda.cuInit(0)
    count = ctypes.c_int()
    if status != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        raise CheckError(f"this machine has a driver but no GPU that works (cuInit gave {status})")
    name = ctypes.create_string_buffer(128)
    uuid = (ctypes.c_ubyte * 16)()
    memory, version = ctypes.c_size_t(), ctypes.c_int()
    major, minor = ctypes.c_int(), ctypes.c_int()
    cuda.cuDeviceGetName(name, 128, 0)
    cuda.cuDeviceGetUuid_v2(uuid, 0)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), 0)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, 0)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, 0)
    cuda.cuDriverGetVersion(ctypes.byref(version))
    text = bytes(uuid).hex()
    return Card(
        name.value.decode(),
        f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}",
        memory.value >> 20,
        f"{major.value}.{minor.value}",
        f"{version.value // 1000}.{version.value % 1000 // 10}",
    )


def is_native(folder: Path) -> bool:
    """Whether a folder has the native parts."""
    return all(
        (folder / file).exists()
        for file in ("bin/gpupool-broker", "bin/gpupool-worker", "client/libcuda.so.1")
    )


def find_native(given: str | None, seconds: float) -> Path:
    """The native parts: given, installed, or built here. Raises CheckError."""
    candidates = [Path(given)] if given else []
    if not given:
        if os.environ.get("GPUPOOL_NATIVE_DIR"):
            candidates.append(Path(os.environ["GPUPOOL_NATIVE_DIR"]))
        if importlib.util.find_spec("gpupoold"):
            from gpupoold import paths

            candidates.append(paths.native_directory())
        candidates += sorted(
            (REPOSITORY / ".venv").glob("lib/python3*/site-packages/gpupoold/_native")
        )
        candidates.append(WORK / "native")
    for folder in candidates:
        if is_native(folder):
            return folder.resolve()
    if given:
        raise CheckError(f"{given} has no native parts (bin/gpupool-broker and so on)")
    say("building the native parts")
    build, native = WORK / "build", WORK / "native"
    ziglang = importlib.util.find_spec("ziglang") is not None
    commands = [
        [
            "cmake",
            "-S",
            str(REPOSITORY),
            "-B",
            str(build),
            f"-DPython3_EXECUTABLE={sys.executable}",
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DGPUPOOL_CLIENT_OLD_GLIBC={'ON' if ziglang else 'OFF'}",
        ],
        ["cmake", "--build", str(build), "-j", str(os.cpu_count() or 2)],
        ["cmake", "--install", str(build), "--prefix", str(native), "--component", "native"],
    ]
    for command in commands:
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=seconds, check=False
            )
        except FileNotFoundError:
            raise CheckError(
                "there are no native parts and no cmake to build them: give --native DIR"
            ) from None
        except subprocess.TimeoutExpired:
            raise CheckError(
                f"the build took more than {seconds:.0f} s: build beforehand and give --native DIR"
            ) from None
        if done.returncode != 0:
            raise CheckError(
                f"the native parts cannot be built here ({' '.join(command[:2])}): "
                f"{(done.stderr or done.stdout).strip()[-1500:]}"
            )
    return native


@contextlib.contextmanager
def open_pool(
    native: Path, card: Card, driver: str, memory_mib: int
) -> Iterator[tuple[str, dict[str, str], object]]:
    """A pool with one slice of the card: its kind, a program's environment, and the pool."""
    try:
        import google.protobuf  # noqa: F401
        import grpc  # noqa: F401
        import oslo_config  # noqa: F401
        import pynvml  # noqa: F401

        from gpupoold.api import gpupool_pb2  # noqa: F401
        from gpupoold.testing.sandbox import Sandbox, SandboxError
    except ImportError as missing:
        with BarePool(native, card.uuid, driver_directory=driver, memory_mib=memory_mib) as pool:
            yield f"broker without gpupoold ({missing})", pool.environment, pool
        return
    try:
        with Sandbox(native=native, driver_directory=driver) as sandbox:
            sandbox.ctl(
                "slice",
                "create",
                "--name",
                "check",
                "--compute",
                "50",
                "--memory",
                str(memory_mib),
                "--gpu",
                card.uuid,
                check=True,
            )
            # One lease for all programs: that of a shell that lives as long as the check.
            holder = sandbox.popen(
                "run",
                "--slice",
                "check",
                "--",
                "sh",
                "-c",
                "echo $GPUPOOL_LEASE_FILE; exec cat",
                stdin=subprocess.PIPE,
            )
            assert holder.stdout is not None
            lease = holder.stdout.readline().strip()
            try:
                if not lease:
                    raise CheckError(f"gpupoolctl run failed: {holder.communicate()[1]}")
                yield (
                    "gpupoold and broker",
                    {
                        **sandbox.environment,
                        "GPUPOOL_LEASE_FILE": lease,
                        "LD_LIBRARY_PATH": ":".join(
                            filter(
                                None, [str(native / "client"), os.environ.get("LD_LIBRARY_PATH")]
                            )
                        ),
                    },
                    sandbox,
                )
            finally:
                holder.kill()
                holder.communicate()
    except SandboxError as error:
        raise CheckError(f"the pool does not start: {error}") from None


def say(text: str) -> None:
    """Progress, for people."""
    print(f"gpu-check: {text}", file=sys.stderr, flush=True)


def interpreters() -> list[str]:
    """Pythons in which a program's modules may be installed."""
    found = [sys.executable]
    for candidate in (
        REPOSITORY / "build" / "programs-venv" / "bin" / "python",
        REPOSITORY / ".venv" / "bin" / "python",
        shutil.which("python3"),
        "/usr/bin/python3",
        "/opt/conda/bin/python",
    ):
        if candidate and Path(candidate).exists() and str(candidate) not in found:
            found.append(str(candidate))
    return found


def has_modules(python: str, modules: tuple[str, ...]) -> bool:
    """Whether a Python can import all of `modules`."""
    code = (
        "import importlib.util as u, sys\n"
        "sys.exit(any(u.find_spec(m) is None for m in sys.argv[1:]))"
    )
    try:
        return (
            subprocess.run(
                [python, "-c", code, *modules], capture_output=True, timeout=60, check=False
            ).returncode
            == 0
        )
    except (OSError, subprocess.TimeoutExpired):
        return False


def command_of(program: Program, compiler: Compiler, native: Path) -> list[str]:
    """The command line of a program. Raises CheckError: why it cannot run here."""
    if program.kind == "python":
        for python in interpreters():
            if has_modules(python, program.needs):
                return [python, str(program.source), *program.arguments]
        raise CheckError(f"not installed: {', '.join(program.needs)}")
    try:
        return program.command(compiler)
    except ToolchainError as error:
        if program.kind == "driver":
            return [build_without_toolkit(program, native), *program.arguments]
        prebuilt = sorted(compiler.cache.glob(f"{program.name}-static13-*"))
        if prebuilt:
            return [str(prebuilt[-1]), *program.arguments]
        raise CheckError(str(error).splitlines()[0]) from None


def build_without_toolkit(program: Program, native: Path) -> str:
    """A driver-API program built with our own declarations in place of cuda.h."""
    headers = [*REPOSITORY.glob("build/**/generated/api/cuda_abi.h"), *WORK.glob("**/cuda_abi.h")]
    if not headers:
        raise CheckError("no cuda.h and no build of gpupool with its declarations")
    include = WORK / "include"
    include.mkdir(parents=True, exist_ok=True)
    (include / "cuda.h").write_text(f'#include "{headers[0]}"\n')
    out = WORK / f"driver-{program.name}"
    done = subprocess.run(
        [
            "gcc",
            "-std=gnu11",
            "-O1",
            "-pthread",
            f"-I{include}",
            str(program.source),
            "-o",
            str(out),
            f"-L{native / 'client'}",
            "-l:libcuda.so.1",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise CheckError(f"does not compile: {done.stderr.strip()[-300:]}")
    return str(out)


def run_once(
    command: list[str], environment: Mapping[str, str], seconds: float
) -> tuple[int, str, str, float]:
    """Status, both outputs, and how long it took."""
    start = time.monotonic()
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=max(seconds, 5),
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, "", f"did not end within {seconds:.0f} s", time.monotonic() - start
    return done.returncode, done.stdout, done.stderr, time.monotonic() - start


def compare(
    program: Program,
    command: list[str],
    local: Mapping[str, str],
    remote: Mapping[str, str],
    seconds: float,
) -> Outcome:
    """Runs a program both ways."""
    outcome = Outcome(f"{program.kind}/{program.name}")
    local = {**local, **program.environment}
    # Twice on the driver itself: the first run may have to compile kernels or read files.
    run_once(command, local, seconds)
    status, output, errors, outcome.direct_seconds = run_once(command, local, seconds)
    problem = program.problem(status, output)
    if problem:
        outcome.problem = f"already on the driver itself: {problem} {errors.strip()[-500:]}"
        return outcome
    remote = {**remote, **program.environment}
    remote_status, remote_output, errors, outcome.remote_seconds = run_once(
        command, remote, seconds
    )
    problem = program.problem(remote_status, remote_output)
    if problem:
        outcome.problem = f"through the slice: {problem} {errors.strip()[-500:]}"
    elif plain(output) != plain(remote_output):
        outcome.problem = f"the slice said {remote_output!r}, the driver {output!r}"
    return outcome


def plain(text: str) -> str:
    """An output without addresses."""
    return re.sub(r"0x[0-9a-f]+", "ADDRESS", text)


def measure_overhead(
    native: Path, local: Mapping[str, str], remote: Mapping[str, str], seconds: float
) -> list[dict]:
    """The benchmark's figures on the driver itself and through the slice."""
    client = native / "bin" / "gpupool-bench-client"
    if not client.exists():
        return []
    figures = []
    for environment in (local, remote):
        status, output, errors, _ = run_once(
            [str(client), "all", "--repetitions", "5", "--launches", "50000"], environment, seconds
        )
        if status != 0:
            raise CheckError(f"the benchmark failed with status {status}: {errors.strip()[-500:]}")
        figures.append({entry["name"]: entry for entry in map(json.loads, output.splitlines())})
    direct, through = figures
    return [
        {
            "what": name,
            "unit": entry["unit"],
            "direct": direct[name]["median"],
            "slice": entry["median"],
            "raw": baseline(through, name),
        }
        for name, entry in through.items()
        if not name.startswith(("raw", "memcpy"))
    ]


def baseline(figures: dict[str, dict], name: str) -> float | None:
    """The raw carrier's figure beside a measurement."""
    raw = {
        "synchronising call": "raw ping-pong",
        "launch + synchronise": "raw ping-pong",
        "alloc + free": "raw ping-pong",
        "launch rate": "raw stream of launches",
    }
    entry = figures.get(raw.get(name, f"raw {name}"))
    return entry["median"] if entry else None


def write_report(report: Report, file: Path) -> None:
    """Markdown for people, JSON beside it."""
    lines = [
        "# Programs with and without gpupool on a real card",
        "",
        f"{time.strftime('%Y-%m-%d')}, {report.card.name} (compute capability "
        f"{report.card.compute_capability}, {report.card.memory_mib} MiB), driver for CUDA "
        f"{report.card.driver}, Linux {platform.release()}, {os.cpu_count()} CPUs; "
        f"{report.pool}",
        "",
        "| program | result | direct | slice |",
        "|---|---|---:|---:|",
    ]
    for outcome in report.outcomes:
        result = outcome.skipped or outcome.problem or "equal"
        result = " ".join(result.split())[:300].replace("|", "\\|")
        seconds = (
            [f"{outcome.direct_seconds:.2f} s", f"{outcome.remote_seconds:.2f} s"]
            if not outcome.skipped
            else ["", ""]
        )
        lines.append(f"| {outcome.program} | {result} | {seconds[0]} | {seconds[1]} |")
    if report.overhead:
        lines += ["", "| measured | direct | slice | raw carrier |", "|---|---:|---:|---:|"]
        for row in report.overhead:
            raw = f"{row['raw']:.4g}" if row["raw"] is not None else ""
            lines.append(
                f"| {row['what']} ({row['unit']}) | {row['direct']:.4g} | "
                f"{row['slice']:.4g} | {raw} |"
            )
    lines += ["", *report.notes]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines).rstrip() + "\n")
    file.with_suffix(".json").write_text(json.dumps(asdict(report), indent=2) + "\n")


def check(arguments: argparse.Namespace) -> int:
    """All of it; returns the exit status."""
    deadline = time.monotonic() + arguments.minutes * 60
    card = find_card(arguments.driver)
    say(f"{card.name}, {card.memory_mib} MiB, driver for CUDA {card.driver}")
    native = find_native(arguments.native, arguments.minutes * 60 / 2)
    # A binary for this very card: what PTX a driver takes depends on its age.
    compiler = Compiler(default_flags=() if arguments.driver else ("-arch=native",))
    local = dict(os.environ)
    if arguments.driver:
        local["LD_LIBRARY_PATH"] = arguments.driver
    programs = [*DRIVER_PROGRAMS, *RUNTIME_PROGRAMS, *PYTHON_PROGRAMS, PYCUDA, TORCH]
    if arguments.only:
        programs = [p for p in programs if p.name in arguments.only]
    report = Report(card, "")
    with open_pool(native, card, arguments.driver, min(8192, card.memory_mib // 2)) as (
        kind,
        remote,
        pool,
    ):
        report.pool = kind
        say(f"pool: {kind}")
        for program in programs:
            left = deadline - time.monotonic()
            try:
                if left < 20:
                    raise CheckError("no time left")
                outcome = compare(
                    program,
                    command_of(program, compiler, native),
                    local,
                    remote,
                    min(left / 3, 90),
                )
            except CheckError as reason:
                outcome = Outcome(f"{program.kind}/{program.name}", skipped=f"not run: {reason}")
            report.outcomes.append(outcome)
            say(
                f"{outcome.program}: {outcome.skipped or outcome.problem or 'equal'} "
                f"({outcome.direct_seconds:.2f} s, {outcome.remote_seconds:.2f} s)"
            )
        try:
            left = deadline - time.monotonic()
            if arguments.no_overhead:
                pass
            elif left > 30:
                report.overhead = measure_overhead(native, local, remote, left / 2)
            else:
                report.notes.append("No time was left for measuring the overhead.")
        except CheckError as reason:
            report.notes.append(f"The overhead was not measured: {reason}")
        wrong = [o for o in report.outcomes if o.problem]
        if wrong:
            logs = pool.log() if isinstance(pool, BarePool) else pool.log_tails()
            report.notes += ["Logs:", "```", logs[-8000:], "```"]
    write_report(report, Path(arguments.report))
    for row in report.overhead:
        print(
            f"{row['what']:<28} direct {row['direct']:>10.4g}  slice {row['slice']:>10.4g} "
            f"{row['unit']}"
        )
    ran = [o for o in report.outcomes if not o.skipped]
    print(
        f"gpu-check: {len(ran) - len(wrong)} of {len(ran)} programs are equal, "
        f"{len(report.outcomes) - len(ran)} were not run; report in {arguments.report}"
    )
    return 1 if wrong or not ran else 0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--native", metavar="DIR", help="prefix with bin/, client/ of a build")
    parser.add_argument("--report", metavar="FILE", default=str(WORK / "report.md"))
    parser.add_argument(
        "--driver", metavar="DIR", default="", help="a driver elsewhere than the system's"
    )
    parser.add_argument("--only", metavar="NAME", nargs="+", help="only these programs")
    parser.add_argument("--no-overhead", action="store_true", help="only compare")
    parser.add_argument("--minutes", type=float, default=9.0, help="time for all of it")
    arguments = parser.parse_args()
    # Child processes use what is installed, not sources in the current directory.
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        return check(arguments)
    except (CheckError, BarePoolError) as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
