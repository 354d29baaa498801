"""Virtual machines that cannot be served: what they are told, and that nothing is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import libvirt
import pytest

from tests.e2e.host import Host, HostPool, named, sized, until
from tests.e2e.looks import events, gone, grant, guests, leases, whole
from tests.e2e.tenant import Program


def refused(host: Host, name: str, metadata: str, why: str) -> None:
    """Does not start, for this reason, and leaves nothing."""
    with pytest.raises(libvirt.libvirtError, match=f"gpupool: .*{why}"):
        host.start(name, metadata)
    assert guests(host) == [] and leases(host) == []
    (event,) = events(host, "guest.refused", name)
    assert why in event["text"]


def test_a_request_that_cannot_be_met_is_refused_with_the_reason(host, name):
    refused(host, name, sized(20, 99_000_000), "no GPU has room for 20 % and 99000000 MiB")
    refused(host, name + "b", named("missing"), "there is no slice missing on host sandbox")
    wrong = sized().replace("memory", "memroy")
    refused(host, name + "c", wrong, "has no attribute memroy")
    assert host.pool.ctl_json("slice", "list") == []


def test_a_slice_that_its_owner_uses_is_refused(host, name):
    host.pool.ctl(
        "slice", "create", "--name", "busy", "--compute", "10", "--memory", "512", check=True
    )
    (owner,) = host.pool.ctl_json("lease", "list")
    with Program(host, owner["id"]) as program:
        refused(host, name, named("busy"), "slice busy has 1 running session of its owner")
        assert program.allocate() == 0
    until(lambda: program.ended, "the end of the program's session")
    machine = host.start(name + "b", named("busy"))
    guest = whole(host, machine)
    machine.domain.destroy()
    gone(host, name + "b", guest["region"])


@pytest.mark.parametrize(
    ("number", "why"),
    [(signal.SIGTERM, "gpupoold does not run"), (signal.SIGKILL, "nobody listens on")],
)
def test_without_gpupoold_only_machines_that_ask_are_refused(host, name, number, why):
    host.pool.end_daemon(number)
    machine = host.start(name)
    assert machine.domain.isActive()
    machine.domain.destroy()
    with pytest.raises(libvirt.libvirtError, match=f"gpupool: .*{why}"):
        host.start(name + "b", sized())
    host.pool.start_daemon()
    assert guests(host) == [] and leases(host) == []


def test_a_gpupoold_that_hangs_holds_up_nobody_for_long(host, name):
    assert host.pool.daemon is not None
    os.kill(host.pool.daemon.pid, signal.SIGSTOP)
    try:
        machine = host.start(name)
        assert machine.domain.isActive()
        with pytest.raises(libvirt.libvirtError, match="did not answer within 5 s"):
            host.start(name + "b", sized())
    finally:
        os.kill(host.pool.daemon.pid, signal.SIGCONT)
    # It reads the question now: the machine that was refused keeps no lease.
    until(lambda: events(host, "guest.granted", name + "b"), "the late answer")
    until(lambda: guests(host) == [] and leases(host) == [], "the end of the lease")
    assert host.pool.ctl_json("slice", "list") == []
    machine.domain.destroy()


def test_without_libvirt_the_rest_works_and_it_is_found_when_it_comes(host, name):
    host.stop_libvirtd()
    host.pool.end_daemon()
    host.pool.start_daemon()
    host.pool.ctl(
        "slice", "create", "--name", "hot", "--compute", "10", "--memory", "512", check=True
    )
    attached = host.pool.ctl("guest", "attach", name, "--slice", "hot")
    assert attached.returncode == 6 and "libvirt cannot be reached" in attached.stderr
    (lease,) = host.pool.ctl_json("lease", "list")
    with Program(host, lease["id"]) as program:
        assert program.allocate() == 0
    host.start_libvirtd()
    machine = host.start(name)
    machine.sh("true")

    def attach() -> bool:
        return host.pool.ctl("guest", "attach", name, "--slice", "hot").returncode == 0

    until(attach, "libvirt is found")
    guest = whole(host, machine)
    machine.domain.destroy()
    gone(host, name, guest["region"])


def test_a_machine_without_a_place_for_a_device_keeps_its_lease_and_is_told(host, name):
    machine = host.start(name, sized(), shell=False)

    def problem() -> str:
        return "".join(guest["problem"] for guest in guests(host))

    until(problem, "the problem is told")
    (guest,) = guests(host)
    assert "has no virtio-serial controller" in guest["problem"]
    assert guest["devices"] == ["region"] and not guest["ended"]
    assert grant(machine) == guest["lease"]
    with Program(host, guest["lease"]) as program:
        machine.domain.destroy()
        gone(host, name, guest["region"], program)


class LittleSharedMemory(HostPool):
    """gpupoold has 8 MiB below /dev/shm."""

    def _spawn(self, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        mount = 'mount -t tmpfs -o size=8m none /dev/shm && exec "$@"'
        return super()._spawn(["unshare", "--mount", "sh", "-c", mount, "sh", *command], log)


def test_without_room_for_the_region_the_start_is_refused(image):
    with Host(image, sandbox=LittleSharedMemory) as host:
        refused(host, "full", sized(), "of 16 MiB cannot be made: No space left on device")
        assert host.pool.ctl_json("slice", "list") == []
        assert host.pool.daemon is not None
        assert not list(Path(f"/proc/{host.pool.daemon.pid}/root/dev/shm").glob("gpupool-*-*"))
        plain = host.start("plain")
        assert plain.domain.isActive()
        hot = host.pool.ctl(
            "slice", "create", "--name", "hot", "--compute", "10", "--memory", "512"
        )
        assert hot.returncode == 0
        attached = host.pool.ctl("guest", "attach", "plain", "--slice", "hot")
        assert attached.returncode != 0 and "No space left on device" in attached.stderr
        (lease,) = host.pool.ctl_json("lease", "list")
        assert lease["kind"] == "owner" and guests(host) == []
        assert "shmem" not in plain.live_xml and "gpupool.example" not in plain.live_xml
