"""The mode in which kernels that come as machine code only do nothing, directly and on a slice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.functional.pool import Pool
from tests.programs.toolchain import Compiler

MODE = "GPUPOOL_SIMGPU_EMPTY_KERNELS"
NO_BINARY_FOR_GPU, INVALID_CONFIGURATION = 209, 9  # CUDA's numbers
MACHINE_CODE_ONLY = ("-gencode", "arch=compute_80,code=sm_80")
WITH_PTX = ("-gencode", "arch=compute_80,code=[sm_80,compute_80]")


def told(output: str) -> dict[str, int]:
    """What the program printed."""
    return {
        name: int(value)
        for name, _, value in (line.partition("=") for line in output.split("\n"))
        if name
    }


@pytest.fixture(scope="module")
def lenient_pool(simulated_driver: Path) -> Iterator[Pool]:
    """A pool whose driver is in that mode."""
    with Pool(driver_directory=simulated_driver, environment={MODE: "1"}) as own:
        own.slice("main")
        yield own


def both_ways(pool: Pool, program: Path, environment: dict[str, str]) -> tuple[dict[str, int], str]:
    """Runs it directly and on a slice, with the same results; these, and what the driver said."""
    direct = pool.direct([str(program)], environment=environment)
    remote = pool.run("main", [str(program)])
    assert (direct.returncode, remote.returncode) == (0, 0), direct.stderr + remote.stderr
    assert told(direct.stdout) == told(remote.stdout)
    return told(direct.stdout), direct.stderr


def test_machine_code_is_refused(shared_pool: Pool, compiler: Compiler) -> None:
    program = compiler.cuda("machine_code", flags=MACHINE_CODE_ONLY)
    for setting in ("", "0"):
        result, said = both_ways(shared_pool, program, {MODE: setting})
        assert result == {"marked": 0, "launch": NO_BINARY_FOR_GPU}
        assert "EMPTY" not in said


def test_machine_code_does_nothing(lenient_pool: Pool, compiler: Compiler) -> None:
    program = compiler.cuda("machine_code", flags=MACHINE_CODE_ONLY)
    result, said = both_ways(lenient_pool, program, {})
    assert result == {
        "marked": 1,
        "launch": 0,
        "worked": 0,
        "shared": 64 * 4,
        "variable": 1,
        "too many threads": INVALID_CONFIGURATION,
    }
    assert "DO NOTHING" in said and "without PTX: its 1 kernels do nothing" in said
    assert "DO NOTHING" in lenient_pool.worker_logs()
    gpus = lenient_pool.ctl("gpu", "list").stdout
    assert "EMPTY" in gpus, gpus


def test_ptx_is_executed_all_the_same(lenient_pool: Pool, compiler: Compiler) -> None:
    program = compiler.cuda("machine_code", flags=WITH_PTX)
    result, said = both_ways(lenient_pool, program, {})
    assert (result["marked"], result["launch"], result["worked"]) == (1, 0, 1)
    assert "an image without PTX" not in said
