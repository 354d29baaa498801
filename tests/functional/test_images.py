"""Device code that no compiler made, through the simulated driver and through a slice: an error
code or success, bounded memory and time, never a crash. The scenarios are in image_scenarios.py."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.functional.pool import Pool
from tests.fuzz.protocol import crashed

SCENARIOS = Path(__file__).resolve().parent / "image_scenarios.py"
SECONDS = 240  # of which the slowest takes a small part
PEAK_MIB = 4096

QUICK = ["unknown_opcode", "truncated", "wrong_fatbins", "wrong_cubins"]
LONG = ["bombs", "huge_texts", "many_functions"]
ALL = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in LONG)]


def check(result: object, output: str, errors: str) -> None:
    assert result == 0, f"{result}\n{output}\n{errors[-4000:]}"
    peak = re.search(r"ok, at most (\d+) MiB", output)
    assert peak is not None, output
    assert int(peak[1]) < PEAK_MIB, output


@pytest.mark.parametrize("scenario", ALL)
def test_in_the_simulated_driver(shared_pool: Pool, scenario: str) -> None:
    command = [sys.executable, str(SCENARIOS), scenario]
    result = shared_pool.direct(command, timeout=SECONDS)
    check(result.returncode, result.stdout, result.stderr)


@pytest.mark.parametrize("scenario", ALL)
def test_on_a_slice(shared_pool: Pool, scenario: str) -> None:
    command = [sys.executable, str(SCENARIOS), scenario]
    result = shared_pool.run("main", command, timeout=SECONDS)
    check(result.returncode, result.stdout, result.stderr)
    assert not crashed(shared_pool)
