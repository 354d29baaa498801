"""Two virtual machines on one card: each has its own lease, region and quota."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.guest import computes, guest_programs, run, wait_status
from tests.e2e.host import Host, named, until
from tests.e2e.looks import gone, grant, leases, region_in_guest, whole
from tests.e2e.podman import CDI, Podman, forget_devices
from tests.e2e.tenant import OUT_OF_MEMORY, Program


def test_two_machines_share_one_card(host, name):
    card = host.pool.ctl_json("gpu", "list")[0]["uuid"]
    machines = []
    for slice_name, memory in (("one", 1024), ("two", 3072)):
        size = ("--gpu", card, "--compute", "25", "--memory", str(memory))
        host.pool.ctl("slice", "create", "--name", slice_name, *size, check=True)
        machines.append(host.start(f"{name}-{slice_name}", named(slice_name)))
    first, second = machines
    one, two = whole(host, first), whole(host, second)
    assert one["lease"] != two["lease"] and one["region"] != two["region"]
    assert {lease["id"]: lease["slices"] for lease in leases(host)} == {
        one["lease"]: ["one"],
        two["lease"]: ["two"],
    }
    pieces = host.pool.ctl_json("slice", "list")
    assert {piece["gpu_uuid"] for piece in pieces} == {card}
    assert len({piece["uuid"] for piece in pieces}) == 2
    assert grant(first) == one["lease"] and grant(second) == two["lease"]
    # Each guest maps its own region.
    assert region_in_guest(first) == (1, one["lease"])
    assert region_in_guest(second) == (1, two["lease"])
    with Path(one["region"]).open("r+b") as region:
        region.seek(8192)
        region.write(b"of one's own")
    with Path(two["region"]).open("rb") as region:
        region.seek(8192)
        assert region.read(12) == bytes(12)
    with Program(host, one["lease"]) as mine, Program(host, two["lease"]) as yours:
        assert (mine.memory_mib, yours.memory_mib) == (1024, 3072)
        assert mine.allocate(2048) == OUT_OF_MEMORY
        assert yours.allocate(2048) == 0
        assert yours.allocate(2048) == OUT_OF_MEMORY
        assert mine.allocate(512) == 0
        # The end of one is nothing to the other.
        first.domain.destroy()
        gone(host, first.name, one["region"], mine)
        assert yours.allocate(512) == 0
        assert whole(host, second)["lease"] == two["lease"]
        assert region_in_guest(second) == (1, two["lease"])
        second.domain.destroy()
        gone(host, second.name, two["region"], yours)


MIB = 1 << 20


@dataclass(frozen=True)
class Seen:
    """What a program hears of NVML about the one device there is."""

    uuid: str
    total: int
    used: int
    processes: dict[int, int]  # process number: bytes

    @classmethod
    def parse(cls, output: str) -> Seen:
        """From the output of nvml.c."""
        [device] = re.findall(r"^device (\S+) total (\d+) used (\d+)$", output, re.M)
        processes = re.findall(r"^process (\d+) used (\d+)$", output, re.M)
        return cls(
            device[0],
            int(device[1]),
            int(device[2]),
            {int(pid): int(used) for pid, used in processes},
        )


@contextlib.contextmanager
def container(podman: Podman, device: str, image: str, *words: str) -> Iterator[subprocess.Popen]:
    """A container's program that waits for its input to end."""
    options = ("run", "--rm", "--network=none", "--interactive", "--device", device)
    process = podman.popen(*options, image, *words)
    try:
        yield process
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=60)
        process.kill()
        process.wait()


def until_waiting(process: subprocess.Popen) -> str:
    """What it printed before it waits."""
    output = ""
    while "waiting\n" not in output:
        line = process.stdout.readline()
        assert line, output + process.stderr.read()
        output += line
    return output


@pytest.mark.skipif(shutil.which("podman") is None, reason="podman is not installed")
def test_two_machines_and_a_container_share_one_card(guest_image):
    programs = guest_programs()
    own = f"e2e-{uuid.uuid4().hex[:8]}"
    quotas = {"one": 1024, "two": 3072, own: 2048}
    host = Host(guest_image, options={"containers": {"cdi_dir": str(CDI)}})
    try:
        with host, Podman() as podman:
            card = host.pool.ctl_json("gpu", "list")[0]["uuid"]
            for name, memory in quotas.items():
                size = ("--gpu", card, "--compute", "25", "--memory", str(memory))
                host.pool.ctl("slice", "create", "--name", name, *size, check=True)
            uuids = {piece["name"]: piece["uuid"] for piece in host.pool.ctl_json("slice", "list")}
            box = podman.make_image("plain", programs)
            machines = {name: host.start(name, named(name)) for name in ("one", "two")}
            for name, machine in machines.items():
                assert f"slice {name}, {quotas[name]} MiB" in wait_status(machine, 0)
                # One program of each holds memory.
                machine.sh(f"sleep 1000 | nvml {quotas[name] // 4} >/tmp/held 2>&1 &")
            device = f"gpupool/slice={own}"
            with container(podman, device, box, "nvml", str(quotas[own] // 4)) as holding:
                held = Seen.parse(until_waiting(holding))
                assert list(held.processes.values()) == [held.used]
                check_view(held, uuids[own], quotas[own])
                for name, machine in machines.items():
                    until(lambda m=machine: "waiting" in m.sh("cat /tmp/held"), "it holds memory")
                    code, output = run(machine, "nvml 0")
                    assert code == 0, output
                    seen = Seen.parse(output)
                    check_view(seen, uuids[name], quotas[name])
                    assert list(seen.processes) == [int(machine.sh("pidof nvml"))]
                # A quota's end is the same whatever the others hold or leave free.
                for name, machine in machines.items():
                    most = quotas[name] - quotas[name] // 4
                    _, output = run(machine, f"memory alloc {most} alloc {most // 2} touch")
                    assert output.splitlines()[:3] == [
                        f"alloc {most}: {OUT_OF_MEMORY}",
                        f"alloc {most // 2}: 0",
                        "touched",
                    ]
                    computes(machine)
                listed = {s["slice"]: s["carrier"] for s in host.pool.ctl_json("session", "list")}
                assert listed == {"one": "ivshmem", "two": "ivshmem", own: "ring"}
                # One machine ends; the others' programs do not notice.
                machines["one"].domain.destroy()
                until(lambda: len(host.pool.ctl_json("session", "list")) == 2, "its sessions' end")
                computes(machines["two"])
                assert run(machines["two"], "kill -0 $(pidof nvml)")[0] == 0
                assert holding.poll() is None
    finally:
        forget_devices(host.pool.run_dir)


def check_view(seen: Seen, slice_uuid: str, quota: int) -> None:
    """Its own slice, as large as its quota, of which a quarter is held; nothing of others."""
    assert seen.uuid.removeprefix("GPU-") == slice_uuid.removeprefix("GPU-")
    assert seen.total == quota * MIB
    assert quota * MIB // 4 <= seen.used < quota * MIB // 2
