"""Fixtures of the end-to-end tests: real libvirt and QEMU (TCG), a stock Debian kernel.

What needs libvirt is imported where it is used: tests of containers run without.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# Behind the installed packages: the tests use the gpupool that was built and installed.
sys.path.append(str(Path(__file__).resolve().parent.parent.parent))

if TYPE_CHECKING:
    from tests.e2e.host import Host
    from tests.e2e.image import Image


@pytest.fixture(scope="session")
def image() -> Image:
    """What the virtual machines boot."""
    from tests.e2e.image import make_image

    return make_image()


@pytest.fixture(scope="session")
def host(image: Image) -> Iterator[Host]:
    """A host for all tests that leave it as they found it."""
    from tests.e2e.host import Host

    with Host(image) as own:
        yield own
