"""Fixtures of the end-to-end tests: real libvirt and QEMU (TCG), a stock Debian kernel."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# Behind the installed packages: the tests use the gpupool that was built and installed.
sys.path.append(str(Path(__file__).resolve().parent.parent.parent))

from tests.e2e.host import Host
from tests.e2e.image import Image, make_image


def pytest_sessionstart() -> None:
    # `timeout`, as tox has it, ends this process so: the machines end, too.
    signal.signal(signal.SIGTERM, lambda number, frame: pytest.exit("terminated", 143))


@pytest.fixture(scope="session")
def image() -> Image:
    """What the virtual machines boot."""
    return make_image()


@pytest.fixture(scope="session")
def host(image: Image) -> Iterator[Host]:
    """A host for all tests that leave it as they found it."""
    with Host(image) as own:
        yield own
