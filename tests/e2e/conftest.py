"""Fixtures of the end-to-end tests: real libvirt and QEMU (TCG), a stock Debian kernel.

What needs libvirt is imported where it is used: tests of containers run without.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import tempfile
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

NUMBERS = itertools.count(1)


def pytest_sessionstart() -> None:
    # `timeout`, as tox has it, ends this process so: the machines end, too.
    signal.signal(signal.SIGTERM, lambda number, frame: pytest.exit("terminated", 143))


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


@pytest.fixture(scope="session")
def guest_image(image: Image) -> Iterator[Image]:
    """The same with the guest's package and some unmodified programs."""
    from tests.e2e.guest import guest_programs, make_guest_image
    from tests.e2e.image import cache_directory

    # Not where pytest's files lie: QEMU is another user.
    with tempfile.TemporaryDirectory(prefix="guest-", dir=cache_directory()) as work:
        Path(work).chmod(0o755)
        yield make_guest_image(image, guest_programs(), Path(work))


@pytest.fixture
def name(request: pytest.FixtureRequest, host: Host) -> Iterator[str]:
    """A domain's name; whatever the test leaves of it is removed, and nothing may remain."""
    import libvirt

    from tests.e2e.host import until
    from tests.e2e.looks import guests

    failed = request.session.testsfailed
    yield f"vm{next(NUMBERS)}"
    if request.session.testsfailed != failed:
        print(host.logs())
    if host.pool.broker is None or host.pool.broker.poll() is not None:
        return  # the signal that ends the tests has ended it
    if host.pool.daemon is None or host.pool.daemon.poll() is not None:
        host.pool.start_daemon()
    for domain in host.connection.listAllDomains():
        if domain.isActive():
            domain.destroy()
        domain.undefineFlags(libvirt.VIR_DOMAIN_UNDEFINE_MANAGED_SAVE)
    until(lambda: not guests(host), "the end of all leases")
    for piece in host.pool.ctl_json("slice", "list"):
        host.pool.ctl("slice", "delete", piece["name"], check=True)
