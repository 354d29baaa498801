"""What needs a real KVM and vhost-vsock: in a machine that QEMU emulates with both."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.e2e.nested import Nested

INSIDE = Path(__file__).resolve().parent / "nested_vsock.py"


def test_programs_under_kvm_come_by_vsock(guest_image):
    files = f"{guest_image.kernel} {guest_image.initrd}"
    with Nested() as nested:
        code, output = nested.run(f"{sys.executable} -P {INSIDE} {files}", 900)
        assert (code, output.splitlines()[-1:]) == (0, ["nested vsock: ok"]), (
            output + nested.console()
        )
