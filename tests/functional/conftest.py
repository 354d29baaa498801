"""Fixtures of the functional tests: pools on the simulated GPU and compiled programs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# These processes fork without exec'ing at once (to be another user); gRPC's own handlers would run
# in between.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# Behind the installed packages: the tests use the gpupool that was built and installed.
sys.path.append(str(Path(__file__).resolve().parent.parent.parent))

from gpupoold import paths
from tests.functional.pool import Pool
from tests.programs.toolchain import Compiler


@pytest.fixture(scope="session")
def compiler() -> Compiler:
    """Compiles the programs, each once for all runs of the tests."""
    return Compiler()


@pytest.fixture(scope="session")
def simulated_driver() -> Path:
    """The directory of the simulated driver."""
    return paths.native_directory() / "simgpu"


@pytest.fixture(scope="session")
def shared_pool(simulated_driver: Path) -> Iterator[Pool]:
    """A pool for all tests that leave it as they found it, with the slice "main"."""
    with Pool(
        driver_directory=simulated_driver, options={"broker": {"tcp_listen": "127.0.0.1:0"}}
    ) as pool:
        pool.slice("main", compute=25, memory=4096)
        yield pool


@pytest.fixture
def pool(simulated_driver: Path) -> Iterator[Pool]:
    """A pool of the test's own, with the slice "main" of 25 % and 4096 MiB."""
    with Pool(driver_directory=simulated_driver) as own:
        own.slice("main", compute=25, memory=4096)
        yield own


@pytest.fixture(scope="session")
def pycuda_folder(compiler: Compiler) -> str:
    """A folder with pycuda, built from source once (some minutes)."""
    from tests.programs.pycuda import build_pycuda

    return str(build_pycuda(compiler))
