"""gpu-check and bench as programs: what they say, on the simulated and the quiet driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpupoold import paths

TOOLS = Path(__file__).resolve().parent.parent.parent / "tools"


def run_tool(*arguments: str, timeout: float = 400) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "GPUPOOL_NATIVE_DIR": str(paths.native_directory())},
    )


def test_gpu_check_without_a_card(tmp_path: Path) -> None:
    done = run_tool(str(TOOLS / "gpu_check.py"), "--driver", str(tmp_path))
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "no NVIDIA driver" in done.stderr


def test_gpu_check_on_the_simulated_card(simulated_driver: Path, tmp_path: Path) -> None:
    """All of its way, with three programs."""
    report = tmp_path / "report.md"
    done = run_tool(
        str(TOOLS / "gpu_check.py"),
        "--driver",
        str(simulated_driver),
        "--report",
        str(report),
        "--only",
        "matmul",
        "threads_streams",
        "bindings_nvrtc",
        "--no-overhead",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 3 programs are equal" in done.stdout
    assert report.read_text().count("| equal |") == 3
    found = json.loads(report.with_suffix(".json").read_text())
    assert [o["problem"] for o in found["outcomes"]] == ["", "", ""]


def test_the_demo() -> None:
    done = run_tool(
        "-m",
        "gpupoold.testing.sandbox",
        "--",
        sys.executable,
        str(TOOLS / "demo.py"),
        "--programs-python",
        sys.executable,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "demo of programs: ok"


@pytest.mark.slow
@pytest.mark.parametrize("carrier", ["ring", "unix", "tcp"])
def test_bench(carrier: str) -> None:
    done = run_tool(
        str(TOOLS / "bench"),
        "--carrier",
        carrier,
        "--repetitions",
        "5",
        "--launches",
        "5000",
        "--json",
        "-",
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert {"synchronising call", "launches", "copy to host, 64 MiB", "start to first kernel"} <= {
        row["what"] for row in rows
    }
    assert all(row["value"] > 0 for row in rows)
