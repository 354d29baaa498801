"""The life of a virtual machine's lease, with real libvirt and QEMU.

Each test looks at lease, region file, devices and metadata afterwards.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import libvirt
import pytest

from tests.e2e.host import Host, Machine, named, sized, until

GRANT_URI = "https://gpupool.example/xmlns/grant/1"
REQUEST_URI = "https://gpupool.example/xmlns/request/1"
NUMBERS = itertools.count(1)


@pytest.fixture
def name(host: Host) -> Iterator[str]:
    """A domain's name; whatever the test leaves of it is removed, and nothing may remain."""
    mine = f"vm{next(NUMBERS)}"
    yield mine
    if host.pool.daemon is None or host.pool.daemon.poll() is not None:
        host.pool.start_daemon()
    for domain in host.connection.listAllDomains():
        if domain.isActive():
            domain.destroy()
        domain.undefineFlags(libvirt.VIR_DOMAIN_UNDEFINE_MANAGED_SAVE)
    until(lambda: not guests(host), "the end of all leases")
    for piece in host.pool.ctl_json("slice", "list"):
        host.pool.ctl("slice", "delete", piece["name"], check=True)


@pytest.fixture(autouse=True)
def _logs(request: pytest.FixtureRequest, host: Host) -> Iterator[None]:
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed != failed:
        print(host.logs())


def guests(host: Host) -> list[dict[str, Any]]:
    return host.pool.ctl_json("guest", "list")


def leases(host: Host) -> list[dict[str, Any]]:
    return [entry for entry in host.pool.ctl_json("lease", "list") if entry["kind"] == "vm"]


def events(host: Host, kind: str, domain: str) -> list[dict[str, Any]]:
    done = host.pool.ctl("--json", "events", check=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [entry for entry in found if entry["kind"] == kind and domain in entry["text"]]


def whole(host: Host, machine: Machine) -> dict[str, Any]:
    """The guest, once all of its lease is there."""

    def look() -> dict[str, Any] | None:
        for entry in guests(host):
            if (
                entry["domain"] == machine.name
                and not entry["ended"]
                and sorted(entry["devices"]) == ["channel", "region"]
                and grant(machine) == entry["lease"]
            ):
                return entry
        return None

    return until(look, f"{machine.name} has its lease and devices")


def grant(machine: Machine) -> str:
    """The lease of the grant in the live metadata; empty: none."""
    import xml.etree.ElementTree as ET

    try:
        text = machine.domain.metadata(
            libvirt.VIR_DOMAIN_METADATA_ELEMENT, GRANT_URI, libvirt.VIR_DOMAIN_AFFECT_LIVE
        )
    except libvirt.libvirtError:
        return ""
    return ET.fromstring(text).get("lease", "")


def gone(host: Host, domain: str, region: str) -> None:
    """Nothing is left of the lease: exactly one end was told for each grant."""
    until(lambda: not [g for g in guests(host) if g["domain"] == domain], "nothing is left")
    assert not [entry for entry in leases(host) if entry["domain"] == domain]
    assert not Path(region).exists()
    granted = [entry["data"]["lease"] for entry in events(host, "guest.granted", domain)]
    ended = [entry["data"]["lease"] for entry in events(host, "guest.ended", domain)]
    assert sorted(granted) == sorted(ended)
    assert len(set(ended)) == len(ended)


def devices_in_guest(machine: Machine) -> tuple[bool, bool]:
    """(the control port, the region) as the guest sees them."""
    ports = machine.sh("cat /sys/class/virtio-ports/*/name").split()
    pci = machine.sh("cat /sys/bus/pci/devices/*/device").split()
    return "org.gpupool.0" in ports, "0x1110" in pci


@pytest.mark.parametrize("machine_type", ["pc", "q35"])
def test_a_start_grants_a_lease_with_devices_that_the_guest_sees(host, name, machine_type):
    # A q35 needs a free place for a device that comes later.
    spare = (
        "<controller type='pci' model='pcie-root'/>"
        + "<controller type='pci' model='pcie-root-port'/>" * 4
        + "<controller type='pci' model='pcie-to-pci-bridge'/>"
        if machine_type == "q35"
        else ""
    )
    machine = host.start(name, sized(25, 2048), machine=machine_type, devices=spare)
    guest = whole(host, machine)
    (lease,) = leases(host)
    assert lease["id"] == guest["lease"] and lease["domain"] == name
    (piece,) = host.pool.ctl_json("slice", "list")
    assert (piece["compute_percent"], piece["memory_mib"]) == (25, 2048)
    assert piece["lease"] == lease["id"]
    region = Path(guest["region"])
    assert region.name == f"gpupool-{machine.domain.UUIDString()}"
    assert region.stat().st_size == 16 << 20 and region.stat().st_mode & 0o777 == 0o660
    until(lambda: devices_in_guest(machine) == (True, True), "the guest sees both")
    # What the host writes is what the guest reads (a BAR is read by mmap: dd cannot).
    machine.domain.destroy()
    gone(host, name, guest["region"])
    assert host.pool.ctl_json("slice", "list") == []


def test_a_start_that_cannot_be_served_is_refused_with_the_reason(host, name):
    with pytest.raises(libvirt.libvirtError, match=r"gpupool: no GPU has room for 20 % and 99"):
        host.start(name, sized(20, 99_000_000))
    assert guests(host) == [] and leases(host) == []
    with pytest.raises(libvirt.libvirtError, match="there is no slice missing"):
        host.start(name + "b", named("missing"))
    with pytest.raises(libvirt.libvirtError, match="has no attribute memroy"):
        host.start(name + "c", sized().replace("memory", "memroy"))


def test_a_hand_made_slice_moves_to_the_machine_and_back(host, name):
    host.pool.ctl(
        "slice", "create", "--name", "mine", "--compute", "10", "--memory", "512", check=True
    )
    machine = host.start(name, named("mine"))
    guest = whole(host, machine)
    done = host.pool.ctl("run", "--slice", "mine", "--", "true")
    assert done.returncode == 5 and "virtual machine" in done.stderr
    assert host.pool.ctl("slice", "delete", "mine").returncode == 5
    with pytest.raises(libvirt.libvirtError, match=f"leased to the virtual machine {name}"):
        host.start(name + "b", named("mine"))
    machine.domain.destroy()
    gone(host, name, guest["region"])
    (lease,) = host.pool.ctl_json("lease", "list")
    assert lease["kind"] == "owner" and lease["slices"] == ["mine"]


def test_a_machine_without_request_starts_while_gpupoold_is_down(host, name):
    host.pool.end_daemon()
    machine = host.start(name)
    assert machine.domain.isActive()
    machine.domain.destroy()
    with pytest.raises(libvirt.libvirtError, match="gpupool: gpupoold does not run"):
        host.start(name + "b", sized())
    host.pool.start_daemon()
    assert guests(host) == []


def test_a_reboot_and_a_reset_keep_the_lease_and_begin_a_new_epoch(host, name):
    machine = host.start(name, sized())
    before = whole(host, machine)
    machine.send("reboot -f")
    until(lambda: whole(host, machine)["epoch"] >= 2, "the reboot is seen")
    machine.sh("true")  # it is up again
    after = whole(host, machine)
    assert after["lease"] == before["lease"] and after["region"] == before["region"]
    until(lambda: devices_in_guest(machine) == (True, True), "the guest sees both again")
    epoch = after["epoch"]
    machine.domain.reset()
    until(lambda: whole(host, machine)["epoch"] > epoch, "the reset is seen")
    assert events(host, "guest.ended", name) == []
    header = Path(after["region"]).read_bytes()[:16]
    assert header[:8] == b"GPPREGN1"
    assert int.from_bytes(header[8:], "little") == whole(host, machine)["epoch"]
    machine.domain.destroy()
    gone(host, name, before["region"])


@pytest.mark.parametrize("crash", ["destroy", "preserve"])
def test_a_panic_ends_the_lease(host, name, crash):
    machine = host.start(name, sized(), crash=crash)
    guest = whole(host, machine)
    machine.send("echo c > /proc/sysrq-trigger")
    until(lambda: leases(host) == [], "the lease has ended")
    if crash == "preserve":
        assert machine.domain.isActive()
        machine.domain.destroy()
    gone(host, name, guest["region"])


def test_qemu_killed_ends_the_lease(host, name):
    machine = host.start(name, sized())
    guest = whole(host, machine)
    os.kill(machine.pid, signal.SIGKILL)
    gone(host, name, guest["region"])


def test_save_ends_the_lease_and_restore_grants_one_again(host, name):
    machine = host.start(name, sized())
    before = whole(host, machine)
    machine.sh("echo kept > /tmp/mark")
    machine.close()
    machine.domain.managedSave()
    gone(host, name, before["region"])
    machine.domain.create()
    after = whole(host, machine)
    assert after["lease"] != before["lease"]
    assert machine.sh("cat /tmp/mark") == "kept"
    assert devices_in_guest(machine) == (True, True)
    machine.domain.destroy()
    gone(host, name, after["region"])


def test_a_restart_of_libvirtd_changes_nothing_and_what_happened_meanwhile_is_seen(host, name):
    machine = host.start(name, sized())
    before = whole(host, machine)
    host.stop_libvirtd()
    host.start_libvirtd()
    after = until(lambda: whole(host, machine), "gpupoold is connected again")
    assert after["lease"] == before["lease"]
    assert events(host, "guest.ended", name) == []
    pid = machine.pid
    host.stop_libvirtd()
    os.kill(pid, signal.SIGKILL)
    host.start_libvirtd()
    gone(host, name, before["region"])


def test_a_restart_of_gpupoold_changes_nothing_and_what_happened_meanwhile_is_seen(host, name):
    machine = host.start(name, sized())
    before = whole(host, machine)
    host.pool.end_daemon(signal.SIGKILL)
    host.pool.start_daemon()
    after = until(lambda: whole(host, machine), "it is followed again")
    assert after["lease"] == before["lease"]
    assert events(host, "guest.ended", name) == []
    host.pool.end_daemon(signal.SIGKILL)
    machine.domain.destroy()  # the hook finds nobody, and must not mind
    host.pool.start_daemon()
    gone(host, name, before["region"])


def test_a_redefinition_as_novas_hard_reboot_makes_it(host, name):
    nova = (
        "<nova:instance xmlns:nova='http://openstack.org/xmlns/libvirt/nova/1.1'>"
        "<nova:name>tenants-vm</nova:name><nova:owner><nova:user uuid='u1'>u</nova:user>"
        "<nova:project uuid='p1'>project</nova:project></nova:owner></nova:instance>"
    )
    machine = host.start(name, sized() + nova)
    before = whole(host, machine)
    assert (before["nova_name"], before["nova_project"]) == ("tenants-vm", "p1")
    identity = machine.domain.UUIDString()
    machine.domain.destroy()
    machine.domain.undefine()
    machine = host.start(name, sized() + nova, identity=identity)
    after = whole(host, machine)
    assert after["lease"] != before["lease"] and after["uuid"] == before["uuid"]
    ended = events(host, "guest.ended", name)
    assert [entry["data"]["lease"] for entry in ended] == [before["lease"]]
    machine.domain.destroy()
    gone(host, name, after["region"])


def test_attach_and_detach_on_a_running_machine(host, name):
    host.pool.ctl(
        "slice", "create", "--name", "hot", "--compute", "10", "--memory", "512", check=True
    )
    foreign = (
        "<channel type='unix'><source mode='bind'/><target type='virtio' name='a.b'/></channel>"
    )
    machine = host.start(name, devices=foreign)
    machine.sh("true")  # its operating system answers to hot-plug
    attached = host.pool.ctl_json("guest", "attach", name, "--slice", "hot")
    assert sorted(attached["devices"]) == ["channel", "region"] and attached["problem"] == ""
    assert grant(machine) == attached["lease"]
    until(lambda: devices_in_guest(machine) == (True, True), "the guest sees both")
    again = host.pool.ctl("guest", "attach", name, "--slice", "hot")
    assert again.returncode == 5 and "has slice hot already" in again.stderr
    missing = host.pool.ctl("guest", "attach", "nobody", "--slice", "hot")
    assert missing.returncode == 3 and "no domain nobody" in missing.stderr
    detached = host.pool.ctl_json("guest", "detach", name)
    assert detached["slice"] == "hot"
    gone(host, name, attached["region"])
    assert devices_in_guest(machine) == (False, False)
    assert grant(machine) == "" and "org.gpupool.0" not in machine.live_xml
    assert "name='a.b'" in machine.live_xml  # of others: left alone
    (lease,) = host.pool.ctl_json("lease", "list")
    assert lease["kind"] == "owner"
    # And once more, with the same machine.
    attached = host.pool.ctl_json("guest", "attach", name, "--slice", "hot")
    assert attached["problem"] == ""
    machine.domain.destroy()
    gone(host, name, attached["region"])


def test_a_live_migration_moves_the_lease(host, name, image):
    machine = host.start(name, sized())
    before = whole(host, machine)
    machine.sh("echo kept > /tmp/mark")
    machine.close()
    with Host(image) as other:
        flags = libvirt.VIR_MIGRATE_LIVE | libvirt.VIR_MIGRATE_PERSIST_DEST
        machine.domain.migrate3(
            other.connection, {libvirt.VIR_MIGRATE_PARAM_URI: "tcp://127.0.0.1:49200"}, flags
        )
        moved = Machine(other, name)
        after = whole(other, moved)
        assert after["lease"] != before["lease"]
        until(lambda: leases(host) == [], "the lease has ended at the source")
        assert len(events(host, "guest.ended", name)) == 1
        assert moved.sh("cat /tmp/mark") == "kept"
        assert devices_in_guest(moved) == (True, True)

        def header() -> bool:
            text = Path(after["region"]).read_bytes()[:48]
            return text[16:32].hex() == after["lease"].replace("-", "")

        until(header, "the region is the new lease's")
        moved.close()
        moved.domain.destroy()
        gone(other, name, after["region"])
