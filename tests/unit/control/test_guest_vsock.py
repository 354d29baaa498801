"""The vsock device of a virtual machine, and for which process its context id counts."""

from __future__ import annotations

import os
import subprocess
import uuid
from dataclasses import replace

import pytest

from gpupoold.guests import manager, reconcile, request
from gpupoold.guests.connection import qemu_process
from gpupoold.guests.request import Device, Held
from gpupoold.leases import processes
from gpupoold.leases.desired import lease_messages
from gpupoold.model import Guest, ProcessIdentity

from .test_guest_reconcile import CID, ROOT, SIZED, A, B, World


@pytest.fixture
def world(root):
    own = World(root)
    yield own
    own.end()


@pytest.fixture
def vsock_world(world, monkeypatch):
    monkeypatch.setattr(manager, "VHOST_VSOCK", os.devnull)
    for number, domain in enumerate(world.domains.values()):
        domain.request = SIZED
        domain.qemu = ProcessIdentity(4711 + number, 99, "boot")
        world.create(domain.uuid)
    return world


def told_of_vsock(world):
    """By domain: the CID, and the process that it holds for."""
    return {
        message.consumer.rpartition("-")[2]: (message.vsock_cid, message.process.pid)
        for message in lease_messages(world.pool.broker.desired())
        if message.consumer.startswith("virtual machine")
    }


def test_a_vsock_device_is_attached_and_detached_where_the_host_can(vsock_world):
    world = vsock_world
    world.guests.reconcile(A)
    assert world.domains[A].xml.vsock.held == Held.OURS
    assert told_of_vsock(world) == {"a": (CID, 4711), "b": (0, 0)}
    [view] = [v for v in world.guests.list(ROOT) if v.guest.domain_uuid == A]
    assert view.devices == ("channel", "region", "vsock") and view.problem == ""
    # Also by a gpupoold that has not looked at libvirt yet.
    world.end()
    world.begin()
    assert told_of_vsock(world)["a"] == (CID, 4711)
    world.domains[A].xml = replace(world.domains[A].xml, request=None)
    world.guests.reconcile(A)
    assert world.domains[A].xml.vsock.held == Held.NONE


def test_a_vsock_device_of_the_machine_serves_and_stays(vsock_world):
    world, own = vsock_world, Device(Held.FOREIGN, "<vsock/>", cid=42)
    world.domains[A].xml = replace(world.domains[A].xml, vsock=own)
    world.guests.reconcile(A)
    assert told_of_vsock(world)["a"] == (42, 4711)
    world.domains[A].xml = replace(world.domains[A].xml, request=None)
    world.guests.reconcile(A)
    assert world.domains[A].xml.vsock == own


def test_no_cid_is_told_without_the_process_that_has_it(vsock_world):
    world = vsock_world
    world.domains[A].qemu = None
    world.guests.reconcile(A)
    assert world.domains[A].xml.vsock.held == Held.OURS
    assert told_of_vsock(world)["a"] == (0, 0)


def test_a_cid_is_of_one_machine(vsock_world):
    """Also where what was told of another machine is older than its end."""
    world = vsock_world
    world.guests.reconcile(A)
    world.guests.reconcile(B)  # libvirt gives it the same: A has ended, and nobody told yet
    assert told_of_vsock(world) == {"a": (0, 0), "b": (CID, 4712)}


def test_another_qemu_process_is_another_lease(vsock_world):
    world = vsock_world
    world.guests.reconcile(A)
    before = world.guests.leases.live(A)
    world.destroy(A, told=False)
    world.create(A, hooked=False)
    world.domains[A].qemu = ProcessIdentity(5000, 100, "boot")
    world.guests.reconcile(A)
    after = world.guests.leases.live(A)
    assert after is not None and after.id != before.id
    assert told_of_vsock(world)["a"] == (CID, 5000)


def test_a_machine_without_room_for_vsock_has_no_problem(vsock_world):
    world = vsock_world
    world.hypervisor.refuses_attach = "vsock"
    world.guests.reconcile(A)
    [view] = [v for v in world.guests.list(ROOT) if v.guest.domain_uuid == A]
    assert view.devices == ("channel", "region") and view.problem == ""
    world.hypervisor.refuses_attach = ""
    world.guests.reconcile(A)  # not asked again before its next start
    assert world.domains[A].xml.vsock.held == Held.NONE


def test_where_nobody_listens_nothing_is_attached(vsock_world):
    world = vsock_world
    world.guests._settings = replace(world.settings, vsock_port=0)
    world.guests.reconcile(A)
    assert world.domains[A].xml.vsock.held == Held.NONE


def test_the_process_of_a_machine_is_the_one_that_runs_it(tmp_path):
    with subprocess.Popen(["/bin/sh", "-c", "read x", "-uuid", A], stdin=subprocess.PIPE) as qemu:
        (tmp_path / "vm.pid").write_text(str(qemu.pid))
        found = qemu_process("vm", A, str(tmp_path))
        assert found == processes.identify(qemu.pid) and found is not None
        assert qemu_process("vm", B, str(tmp_path)) is None  # an old file
        assert qemu_process("other", A, str(tmp_path)) is None
        qemu.communicate()


def test_a_vsock_device_comes_before_the_channel_and_its_cid_is_told():
    guest = Guest(str(uuid.uuid4()), A, "vm", "s", 0, True, "/x", 1, 1, 0.0)
    seen = reconcile.Seen(A, "vm", True, SIZED, grant=guest.id)
    qemu = ProcessIdentity(4711, 99, "boot")

    def decide(seen, guest=guest, *, attach_vsock=True):
        devices = {"attach_devices": True, "attach_vsock": attach_vsock}
        return reconcile.decide(seen, [guest], {guest.id}, **devices)

    assert [action.what for action in decide(seen)] == ["region", "vsock", "channel"]
    assert [action.what for action in decide(seen, attach_vsock=False)] == ["region", "channel"]
    ready = replace(seen, region=Held.OURS, channel=Held.OURS)
    for held in (Held.OURS, Held.FOREIGN):
        there = replace(ready, vsock=held, vsock_cid=7, qemu=qemu)
        assert decide(there) == [reconcile.SetPort(guest, "", 7, qemu)]
        assert decide(there, replace(guest, vsock_cid=7, qemu=qemu)) == []
        # Without a lease only what is gpupoold's goes.
        actions = reconcile.decide(replace(there, grant=""), [], set(), attach_devices=True)
        detached = [a.what for a in actions if isinstance(a, reconcile.Detach)]
        assert detached == ["region", "channel", *(["vsock"] if held == Held.OURS else [])]


@pytest.mark.parametrize(
    ("xml", "held", "cid"),
    [
        ("", Held.NONE, 0),
        ("<vsock model='virtio'><cid auto='no' address='5'/></vsock>", Held.FOREIGN, 5),
        (request.vsock_xml().replace("<cid auto='yes'/>", "<cid address='3'/>"), Held.OURS, 3),
        (request.vsock_xml(), Held.OURS, 0),  # libvirt has not chosen one yet
        ("<vsock><cid address='2'/></vsock>", Held.FOREIGN, 0),  # the host's own
        ("<vsock><cid address='x'/></vsock>", Held.FOREIGN, 0),
    ],
)
def test_a_vsock_device_in_the_live_xml(xml, held, cid):
    whole = f"<domain><name>vm</name><uuid>{A}</uuid><devices>{xml}</devices></domain>"
    device = request.read_domain(whole).vsock
    assert (device.held, device.cid) == (held, cid)
