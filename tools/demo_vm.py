"""The same in a virtual machine: it asks libvirt for a slice, and runs an unmodified program.

Needs root, libvirt and QEMU, of which the demo starts its own; the machine boots a stock Debian
kernel, which is downloaded, and has the guest's package inside. (tools/dev demo --vm installs it
all.)
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from demo import ROOT, ctl, demo_as_root, expect, listed, show

# Behind the installed packages.
sys.path.append(str(ROOT))

if TYPE_CHECKING:
    from tests.e2e.host import Host, Machine
    from tests.e2e.image import Image

NAME = "demo-vm"
REQUEST = (
    "<gp:slice xmlns:gp='https://gpupool.example/xmlns/request/1' compute='25' memory='2048'/>"
)


def inside(machine: Machine, title: str, command: str, last_line: str = "") -> str:
    """Runs a command in the machine, and prints what it printed."""
    from tests.e2e.guest import run

    print(f"\n-- {title}\n{NAME}# {command}", flush=True)
    status, output = run(machine, command)
    print(output, flush=True)
    expect(status == 0, f"'{command}' in the machine ended with exit status {status}")
    expect(not last_line or output.splitlines()[-1:] == [last_line], f"no '{last_line}' at the end")
    return output


def steps(host: Host, image: Image) -> None:
    from tests.e2e.guest import Loop, wait_status
    from tests.e2e.host import until
    from tests.e2e.looks import guests, whole

    print(f"\n-- a virtual machine asks for a quarter of a card in its metadata\n{REQUEST}")
    machine = host.start(NAME, REQUEST, image=image)
    whole(host, machine)
    show("it runs, and has a lease", ctl("guest", "list"))
    wait_status(machine, 0)  # it has booted
    inside(machine, "inside: is there a GPU?", "gpupool-guest status")
    inside(machine, "a program made by nvcc, static cudart", "matmul", last_line="ok")
    words = "memory alloc 2049 alloc 2000 info"
    output = inside(machine, "2049 MiB are refused (2: CUDA_ERROR_OUT_OF_MEMORY)", words)
    expect("alloc 2049: 2\nalloc 2000: 0\n" in output, "the quota did not hold")
    loop = Loop(machine)
    show("on the host: the session of a program inside, while it runs", ctl("session", "list"))
    sessions = [(entry["carrier"], entry["pid"]) for entry in listed("session")]
    expect(sessions == [("ivshmem", loop.pid)], f"the sessions are {sessions}")
    machine.domain.destroy()
    print("\n(the machine was switched off while the program ran)")
    until(lambda: not guests(host) and not listed("session"), "the end of lease and session", 30)
    show("nothing is left", ctl("slice", "list"))
    expect(not listed("slice"), "the machine's slice is still there")


def job(programs: dict[str, Path]) -> None:
    from tests.e2e.guest import make_guest_image
    from tests.e2e.host import Host
    from tests.e2e.image import cache_directory, make_image

    with tempfile.TemporaryDirectory(prefix="guest-", dir=cache_directory()) as work:
        Path(work).chmod(0o755)  # QEMU is another user
        image = make_guest_image(make_image(), programs, Path(work))
        with Host(image) as host:
            os.environ.update(host.pool.environment)
            steps(host, image)


if __name__ == "__main__":
    sys.exit(demo_as_root("in a virtual machine", job))
