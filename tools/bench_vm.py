"""The part of tools/bench that boots virtual machines (root; tools/dev bench installs libvirt and
QEMU).

QEMU's TCG emulates the guest's processor: what counts are the ratios to what the same guest can do
with the same kind of memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
# Behind the installed packages.
sys.path.append(str(ROOT))

if TYPE_CHECKING:
    from tests.e2e.host import Host, Machine

#: MiB of memory shared with the guest beside gpupool's region, for the baseline; a size by which
#: the guest knows it
RAW_MIB = 32
REGION_MIB = 16  # [libvirt] region_size, unless set
IVSHMEM = "vendor=$(cat $d/vendor) device=$(cat $d/device); [ $vendor$device = 0x1af40x1110 ]"


class VmError(Exception):
    """Why there are no figures, in a sentence."""


def failures() -> tuple[type[Exception], ...]:
    """What may go wrong here for reasons of the machine."""
    import libvirt

    return VmError, libvirt.libvirtError, subprocess.SubprocessError


@contextlib.contextmanager
def host_with_client(client: Path, driver: Path) -> Iterator[Host]:
    """A host whose machines have the benchmarks' client inside."""
    from tests.e2e.guest import make_guest_image
    from tests.e2e.host import Host, HostPool
    from tests.e2e.image import cache_directory, make_image

    class QuietPool(HostPool):
        def __init__(self, **more: Any) -> None:
            super().__init__(driver_directory=driver, **more)

    options = {"broker": {"regions": "true", "warm_context": "true"}}
    with tempfile.TemporaryDirectory(prefix="guest-", dir=cache_directory()) as work:
        Path(work).chmod(0o755)  # QEMU is another user
        image = make_guest_image(make_image(), {"client": client}, Path(work))
        with Host(image, sandbox=QuietPool, options=options) as host:
            yield host


def device_of(machine: Machine, mib: int) -> str:
    """The memory of the guest's ivshmem device of that size, for mmap()."""
    look = f"for d in /sys/bus/pci/devices/*; do {IVSHMEM} && stat -c '%s %n' $d/resource2; done"
    for line in machine.sh(look).splitlines():
        size, _, path = line.partition(" ")
        if size == str(mib << 20):
            return path
    raise VmError(f"the guest has no ivshmem device of {mib} MiB")


def client_in(machine: Machine, words: str, seconds: float) -> list[dict[str, Any]]:
    """Runs the client in the guest; its measurements."""
    from tests.e2e.guest import run

    code, output = run(machine, f"client {words}", seconds)
    if code != 0:
        raise VmError(f"'client {words}' in the guest ended with exit status {code}:\n{output}")
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def started(host: Host, name: str, devices: str = "") -> Machine:
    """A machine that has a slice and knows it."""
    from tests.e2e.guest import wait_status
    from tests.e2e.host import sized

    machine = host.start(name, sized(compute=25, memory=4096), memory=512, devices=devices)
    wait_status(machine, 0)
    return machine


def measure_region(arguments: argparse.Namespace, client: Path, driver: Path) -> dict[str, dict]:
    """The client in a guest over the region, beside a plain ring between the same two sides."""
    name = f"bench-{os.getpid()}"
    raw = Path("/dev/shm") / name
    devices = (
        f"<shmem name='{name}' role='master'><model type='ivshmem-plain'/>"
        f"<size unit='M'>{RAW_MIB}</size></shmem>"
    )
    try:
        with host_with_client(client, driver) as host:
            print("bench: booting a virtual machine", file=sys.stderr)
            machine = started(host, "bench", devices)
            with subprocess.Popen([client, "serve", "--region", raw]) as peer:
                try:
                    print("bench: measuring (in the machine)", file=sys.stderr)
                    entries = client_in(
                        machine,
                        f"all --carrier ring --region {device_of(machine, RAW_MIB)} "
                        f"--repetitions {arguments.repetitions} --launches {arguments.launches}",
                        arguments.timeout,
                    )
                finally:
                    peer.kill()
    finally:
        raw.unlink(missing_ok=True)
    return {entry.pop("name"): entry for entry in entries}


def measure_hostile(arguments: argparse.Namespace, client: Path, driver: Path) -> dict[str, dict]:
    """How long calls of a program in one machine take while another one is idle, computes for
    itself, or attacks the host through its port and its region."""
    results: dict[str, dict] = {}
    seconds = 10
    with host_with_client(client, driver) as host:
        print("bench: booting two virtual machines", file=sys.stderr)
        control, other = started(host, "control"), started(host, "other")
        port = other.sh("dirname $(grep -l org.gpupool.0 /sys/class/virtio-ports/*/name)")
        port = "/dev/" + port.rpartition("/")[2]
        region = device_of(other, REGION_MIB)
        for turn in range(arguments.repetitions):
            for case in ("idle", "computes", "attacks"):
                print(f"bench: turn {turn + 1}, the other machine {case}", file=sys.stderr)
                more = seconds + 5
                if case == "computes":
                    other.sh(f"timeout {more} sh -c 'while :; do :; done' >/dev/null 2>&1 &")
                elif case == "attacks":
                    # In place of its helper, which is started again afterwards.
                    other.sh(
                        "killall -STOP rc.local; killall gpupool-guest; sleep 1; "
                        f"client attack --port {port} --region {region} --seconds {more} "
                        ">/tmp/attack 2>&1 &"
                    )
                entries = client_in(control, f"latency --seconds {seconds}", arguments.timeout)
                for entry in entries:
                    known = results.setdefault(
                        f"{entry['name']}, {case}", {"unit": entry["unit"], "values": []}
                    )
                    known["values"] += entry["values"]
                if case == "attacks":
                    other.sh("wait")
                    done = other.sh("sleep 6; cat /tmp/attack; killall -CONT rc.local")
                    if '"words"' not in done:
                        raise VmError(f"the attack did not run: {done}")
    for entry in results.values():
        ordered = sorted(entry["values"])
        entry["median"] = ordered[len(ordered) // 2]
    return results
