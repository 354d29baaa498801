"""The life of a virtual machine's lease, with real libvirt and QEMU.

Each test looks at lease, worker, region file, devices and metadata afterwards.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import libvirt
import pytest

from tests.e2e.host import Host, Machine, free_port, named, sized, until
from tests.e2e.looks import (
    devices_in_guest,
    events,
    gone,
    grant,
    guests,
    leases,
    region_in_guest,
    whole,
)
from tests.e2e.tenant import Program


def gone_at_source(host: Host, name: str, program: Program) -> None:
    """As `gone`; the region's file has the same name at the destination, which is the same host."""
    until(lambda: not guests(host), "the lease has ended at the source")
    assert leases(host) == [] and len(events(host, "guest.ended", name)) == 1
    until(lambda: program.ended, "the end of the worker")


@pytest.mark.parametrize("machine_type", ["pc", "q35"])
def test_a_start_grants_a_lease_with_devices_that_the_guest_uses(host, name, machine_type):
    machine = host.start(name, sized(25, 2048), machine=machine_type)
    guest = whole(host, machine)
    (lease,) = leases(host)
    assert lease["id"] == guest["lease"] and lease["domain"] == name
    (piece,) = host.pool.ctl_json("slice", "list")
    assert (piece["compute_percent"], piece["memory_mib"]) == (25, 2048)
    assert piece["lease"] == lease["id"]
    region = Path(guest["region"])
    assert region.name == f"gpupool-{machine.domain.UUIDString()}"
    assert region.stat().st_size == 16 << 20 and region.stat().st_mode & 0o777 == 0o660
    assert region_in_guest(machine) == (1, guest["lease"])
    with Program(host, guest["lease"]) as program:
        assert program.memory_mib == 2048
        assert whole(host, machine)["sessions"] == 1
        machine.domain.destroy()
        gone(host, name, guest["region"], program)
    assert host.pool.ctl_json("slice", "list") == []


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


@pytest.mark.parametrize("machine_type", ["pc", "q35"])
def test_a_reboot_and_a_reset_keep_the_lease_and_begin_a_new_epoch(host, name, machine_type):
    machine = host.start(name, sized(), machine=machine_type)
    before = whole(host, machine)
    with Program(host, before["lease"]) as program:
        machine.send("reboot -f")
        until(lambda: whole(host, machine)["epoch"] >= 2, "the reboot is seen")
        until(lambda: program.ended, "the session ends with the boot that it was of")
    machine.sh("true")  # it is up again
    after = whole(host, machine)
    assert after["lease"] == before["lease"] and after["region"] == before["region"]
    assert region_in_guest(machine) == (after["epoch"], after["lease"])
    machine.domain.reset()
    until(lambda: whole(host, machine)["epoch"] > after["epoch"], "the reset is seen")
    assert events(host, "guest.ended", name) == []
    header = Path(after["region"]).read_bytes()[:16]
    assert header[:8] == b"GPPREGN1"
    assert int.from_bytes(header[8:], "little") == whole(host, machine)["epoch"]
    with Program(host, after["lease"]) as program:  # a new boot has new sessions
        assert program.allocate() == 0
        machine.domain.destroy()
        gone(host, name, before["region"], program)


@pytest.mark.parametrize("crash", ["destroy", "preserve"])
def test_a_panic_ends_the_lease(host, name, crash):
    machine = host.start(name, sized(), crash=crash)
    guest = whole(host, machine)
    with Program(host, guest["lease"]) as program:
        machine.send("echo c > /proc/sysrq-trigger")
        until(lambda: leases(host) == [], "the lease has ended")
        if crash == "preserve":
            assert machine.domain.isActive()
            machine.domain.destroy()
        gone(host, name, guest["region"], program)


def test_qemu_killed_ends_the_lease(host, name):
    machine = host.start(name, sized())
    guest = whole(host, machine)
    with Program(host, guest["lease"]) as program:
        os.kill(machine.pid, signal.SIGKILL)
        gone(host, name, guest["region"], program)


def test_save_ends_the_lease_and_restore_grants_one_again(host, name):
    machine = host.start(name, sized())
    before = whole(host, machine)
    machine.sh("echo kept > /tmp/mark")
    machine.close()
    with Program(host, before["lease"]) as program:
        machine.domain.managedSave()
        gone(host, name, before["region"], program)
    machine.domain.create()
    after = whole(host, machine)
    assert after["lease"] != before["lease"]
    assert machine.sh("cat /tmp/mark") == "kept"
    until(lambda: region_in_guest(machine) == (1, after["lease"]), "the guest sees the new lease")
    machine.domain.destroy()
    gone(host, name, after["region"])


def test_a_restart_of_libvirtd_changes_nothing_and_what_happened_meanwhile_is_seen(host, name):
    machine = host.start(name, sized())
    before = whole(host, machine)
    with Program(host, before["lease"]) as program:
        host.stop_libvirtd()
        assert program.allocate() == 0
        host.start_libvirtd()
        after = whole(host, machine)
        assert after["lease"] == before["lease"]
        assert events(host, "guest.ended", name) == []
        assert program.allocate() == 0
        pid = machine.pid
        host.stop_libvirtd()
        os.kill(pid, signal.SIGKILL)
        host.start_libvirtd()
        gone(host, name, before["region"], program)


def test_a_restart_of_gpupoold_changes_nothing_and_what_happened_meanwhile_is_seen(host, name):
    machine = host.start(name, sized())
    before = whole(host, machine)
    with Program(host, before["lease"]) as program:
        host.pool.end_daemon(signal.SIGKILL)
        assert program.allocate() == 0
        host.pool.start_daemon()
        after = whole(host, machine)
        assert after["lease"] == before["lease"]
        assert events(host, "guest.ended", name) == []
        assert program.allocate() == 0
        host.pool.end_daemon(signal.SIGKILL)
        machine.domain.destroy()  # the hook finds nobody, and must not mind
        host.pool.start_daemon()
        gone(host, name, before["region"], program)


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


@pytest.mark.parametrize("machine_type", ["pc", "q35"])
def test_attach_and_detach_on_a_running_machine(host, name, machine_type):
    host.pool.ctl(
        "slice", "create", "--name", "hot", "--compute", "10", "--memory", "512", check=True
    )
    foreign = (
        "<channel type='unix'><source mode='bind'/><target type='virtio' name='a.b'/></channel>"
    )
    machine = host.start(name, devices=foreign, machine=machine_type)
    machine.sh("true")  # its operating system answers to hot-plug
    attached = host.pool.ctl_json("guest", "attach", name, "--slice", "hot")
    assert sorted(attached["devices"]) == ["channel", "region"] and attached["problem"] == ""
    assert grant(machine) == attached["lease"]
    assert region_in_guest(machine) == (1, attached["lease"])
    again = host.pool.ctl("guest", "attach", name, "--slice", "hot")
    assert again.returncode == 5 and "has slice hot already" in again.stderr
    missing = host.pool.ctl("guest", "attach", "nobody", "--slice", "hot")
    assert missing.returncode == 3 and "no domain nobody" in missing.stderr
    with Program(host, attached["lease"]) as program:
        used = host.pool.ctl("guest", "detach", name)
        assert used.returncode == 5 and "has 1 running session" in used.stderr
        assert program.allocate() == 0
        detached = host.pool.ctl_json("guest", "detach", name, "--force")
        assert detached["slice"] == "hot"
        gone(host, name, attached["region"], program)
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


@pytest.mark.parametrize("machine_type", ["pc", "q35"])
def test_a_live_migration_moves_the_lease(host, name, image, machine_type):
    machine = host.start(name, sized(), machine=machine_type)
    before = whole(host, machine)
    machine.sh("echo kept > /tmp/mark")
    machine.close()
    with Host(image) as other, Program(host, before["lease"]) as program:
        flags = libvirt.VIR_MIGRATE_LIVE | libvirt.VIR_MIGRATE_PERSIST_DEST
        to = {libvirt.VIR_MIGRATE_PARAM_URI: f"tcp://127.0.0.1:{free_port()}"}
        machine.domain.migrate3(other.connection, to, flags)
        moved = Machine(other, name)
        after = whole(other, moved)
        assert after["lease"] != before["lease"]
        gone_at_source(host, name, program)
        assert moved.sh("cat /tmp/mark") == "kept"
        until(lambda: region_in_guest(moved) == (1, after["lease"]), "the guest sees its new lease")
        moved.close()
        moved.domain.destroy()
        gone(other, name, after["region"])
