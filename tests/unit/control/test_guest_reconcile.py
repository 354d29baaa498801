"""Leases of virtual machines follow what is, whatever is told, lost, or interrupted.

A simulated hypervisor plays libvirt's part; store, pool and manager are the real ones.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import uuid
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gpupoold.errors import Conflict, NotFound, NotPermitted, PoolError
from gpupoold.guests import reconcile, request
from gpupoold.guests.connection import HypervisorError, HypervisorGone, Look
from gpupoold.guests.manager import Guests
from gpupoold.guests.request import GRANT_URI, REQUEST_URI, Device, DomainXml, GuestRequest, Held
from gpupoold.leases.desired import lease_messages
from gpupoold.model import Caller, Guest, LeaseKind, ProcessIdentity
from gpupoold.pool import Pool
from gpupoold.slices.planning import Request
from gpupoold.store import Store

from .fakes import FakeDriver, gpu, settings

ROOT = Caller(0, os.getpid(), True)
ALICE = Caller(1001, os.getpid(), False)
A, B = "aaaaaaaa-0000-4000-8000-000000000001", "bbbbbbbb-0000-4000-8000-000000000002"


CID = 7


def kind_of(xml: str) -> str:
    return "region" if "<shmem" in xml else "vsock" if "<vsock" in xml else "channel"


class Killed(BaseException):
    """gpupoold is killed here."""


@dataclass
class Domain:
    """What libvirt knows of one domain."""

    uuid: str
    request: GuestRequest | None = None  # of the definition
    xml: DomainXml | None = None  # while it is active
    crashed: bool = False
    stubborn: bool = False  # its operating system gives no device back
    qemu: ProcessIdentity | None = None


class FakeHypervisor:
    """Domains, and failures of the test's choice."""

    def __init__(self, domains: dict[str, Domain]) -> None:
        self.domains = domains
        self.gone = False
        self.refuses_attach = ""
        self.attached = 0
        self.kill_in = -1  # calls until gpupoold dies; below 0: never

    def _step(self) -> None:
        if self.gone:
            raise HypervisorGone("libvirt is not connected")
        if self.kill_in == 0:
            raise Killed
        self.kill_in -= 1

    def connect(self) -> None:
        if self.gone:
            raise HypervisorGone("libvirt cannot be reached")

    def close(self) -> None:
        pass

    def active(self) -> list[str]:
        self._step()
        return [domain.uuid for domain in self.domains.values() if domain.xml]

    def look(self, domain_uuid: str) -> Look | None:
        self._step()
        domain = self.domains.get(domain_uuid)
        if domain is None or domain.xml is None:
            return None
        return Look(domain.xml, domain.crashed, settled=True, qemu=domain.qemu)

    def find(self, wanted: str) -> str:
        self._step()
        for domain in self.domains.values():
            if wanted in (domain.uuid, f"vm-{domain.uuid[0]}"):
                return domain.uuid
        raise NotFound(f"libvirt has no domain {wanted}")

    def _running(self, domain_uuid: str) -> DomainXml:
        xml = self.domains[domain_uuid].xml
        if xml is None:
            raise HypervisorError("the domain is not running")
        return xml

    def attach(self, domain_uuid: str, xml: str) -> None:
        self._step()
        found = self._running(domain_uuid)
        kind = kind_of(xml)
        if self.refuses_attach == kind:
            raise HypervisorError("No more available PCI slots")
        assert getattr(found, kind).held == Held.NONE, "attached twice"
        self.attached += 1
        path = f"/run/{domain_uuid}/{self.attached}" if kind == "channel" else ""
        device = Device(Held.OURS, xml, path, cid=CID if kind == "vsock" else 0)
        self.domains[domain_uuid].xml = replace(found, **{kind: device})
        self._step()  # it is done, and gpupoold may not live to know it

    def detach(self, domain_uuid: str, xml: str) -> None:
        self._step()
        found = self._running(domain_uuid)
        kind = kind_of(xml)
        assert getattr(found, kind).held == Held.OURS, "a device of others, or none"
        if not self.domains[domain_uuid].stubborn:
            self.domains[domain_uuid].xml = replace(found, **{kind: Device()})
        self._step()

    def set_metadata(self, domain_uuid: str, uri: str, prefix: str, element: str | None) -> None:
        self._step()
        found = self._running(domain_uuid)
        if uri == GRANT_URI:
            match = re.search(r'lease="([^"]+)"', element or "")
            found = replace(found, grant=match[1] if match else "")
        else:
            assert uri == REQUEST_URI
            match = re.search(r'name="([^"]+)"', element or "")
            found = replace(found, request=GuestRequest(name=match[1]) if match else None)
        self.domains[domain_uuid].xml = found
        self._step()


class World:
    """libvirt, its hook, and a gpupoold that can be killed at any moment."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.settings = settings(root, libvirt_uri="fake:///", libvirt_region_size="1")
        self.domains = {name: Domain(name) for name in (A, B)}
        self.hypervisor = FakeHypervisor(self.domains)
        self.up = False
        self.begin()
        self.pool.create_slice(ALICE, Request(name="mine", compute_percent=10, memory_mib=512))

    def begin(self) -> None:
        self.store = Store(self.settings.database)
        self.store.open()
        self.store._db.execute("PRAGMA synchronous = OFF")  # no power is cut here
        self.pool = Pool(self.settings, self.store, FakeDriver([gpu(0, memory_mib=8192)]))
        self.pool._gpus = self.pool.driver.inventory()
        self.pool._take_stock()
        self.pool._repair()
        self.guests = Guests(self.settings, self.pool, self.hypervisor)
        self.guests.problem = ""
        regions = self.guests.leases._regions
        regions._directory, regions._group = str(self.root / "shm"), ""
        (self.root / "shm").mkdir(exist_ok=True)
        self.guests.leases.clean_up()
        self.hypervisor.kill_in = -1
        self.up = True

    def end(self) -> None:
        if self.up:
            self.store.close()
            self.up = False

    # ---- what libvirt does ----------------------------------------------------------------------

    def xml_text(self, domain: Domain, wanted: GuestRequest | None) -> str:
        inside = ""
        if wanted is not None:
            attributes = (
                f"name='{wanted.name}'"
                if wanted.name
                else f"compute='{wanted.compute_percent}' memory='{wanted.memory_mib}'"
            )
            inside = f"<g:slice xmlns:g='{REQUEST_URI}' {attributes}/>"
        return (
            f"<domain><name>vm-{domain.uuid[0]}</name><uuid>{domain.uuid}</uuid>"
            f"<metadata>{inside}</metadata></domain>"
        )

    def create(self, name: str, *, hooked: bool = True) -> bool:
        """libvirt starts a domain; False: vetoed."""
        domain = self.domains[name]
        if domain.xml is not None:
            return False
        if domain.request is not None and hooked:
            if not self.up:
                return False
            if self.guests.on_hook("prepare", self.xml_text(domain, domain.request)):
                return False
        domain.crashed = False
        domain.xml = DomainXml(name, f"vm-{name[0]}", request=domain.request)
        return True

    def destroy(self, name: str, *, told: bool = True) -> None:
        domain = self.domains[name]
        if domain.xml is None:
            return
        text = self.xml_text(domain, domain.xml.request)
        domain.xml = None
        if told and self.up:
            self.guests.on_hook("release", text)

    def look_at_all(self) -> None:
        if not self.up:
            return
        try:
            self.guests.reconcile_all()
        except HypervisorGone:
            pass
        except Killed:
            self.end()

    # ---- what must be ---------------------------------------------------------------------------

    def settle(self) -> None:
        self.hypervisor.gone = False
        self.hypervisor.refuses_attach = ""
        for domain in self.domains.values():
            domain.stubborn = False
        self.end()
        self.begin()
        for _ in range(3):
            self.guests.reconcile_all()

    def check(self) -> None:
        guests = self.store.guests()
        leases = {lease.id: lease for lease in self.store.leases()}
        assert all(guest.ended_at is None for guest in guests), "something is left"
        by_domain = {guest.domain_uuid: guest for guest in guests}
        assert len(by_domain) == len(guests)
        vm_leases = {lease.id for lease in leases.values() if lease.kind == LeaseKind.VM}
        assert vm_leases == {guest.id for guest in guests}
        for domain in self.domains.values():
            guest = by_domain.get(domain.uuid)
            xml = domain.xml
            asks = xml is not None and xml.request is not None and not domain.crashed
            if guest is not None:
                assert asks
            if xml is None:
                continue
            held = Held.OURS if guest is not None else Held.NONE
            assert (xml.channel.held, xml.region.held) == (held, held)
            assert xml.grant == (guest.id if guest is not None else "")
            if asks and guest is None:  # then there was truly nothing for it
                assert self.guests._problems.get(domain.uuid)
        files = set(os.listdir(self.root / "shm"))
        assert files == {os.path.basename(guest.region_path) for guest in guests}
        # Each lease was granted once and ended once, or stands.
        events = self.store.events()
        granted = Counter(e.data["lease"] for e in events if e.kind == "guest.granted")
        ended = Counter(e.data["lease"] for e in events if e.kind == "guest.ended")
        assert set(granted.values()) <= {1} and set(ended.values()) <= {1}
        assert set(granted) - set(ended) == set(vm_leases)
        # Each slice is in exactly one lease; made ones are gone with their machine.
        pieces = {piece.id: piece for piece in self.store.slices()}
        assert Counter(s for lease in leases.values() for s in lease.slice_ids) == Counter(
            list(pieces)
        )
        temporary = {piece.name for piece in pieces.values() if piece.temporary}
        assert temporary == {guest.slice_name for guest in guests if guest.temporary}


@pytest.fixture
def world(root):
    own = World(root)
    yield own
    own.end()


SIZED = GuestRequest(compute_percent=20, memory_mib=1024)
NAMED = GuestRequest(name="mine")
LARGE = GuestRequest(compute_percent=20, memory_mib=5000)  # only one fits
NAMES = st.sampled_from([A, B])
STEPS = st.one_of(
    st.tuples(st.just("define"), NAMES, st.sampled_from([None, SIZED, NAMED, LARGE])),
    st.tuples(st.just("create"), NAMES, st.booleans()),
    st.tuples(st.just("destroy"), NAMES, st.booleans()),
    st.tuples(st.just("crash"), NAMES, st.none()),
    st.tuples(st.just("reboot"), NAMES, st.none()),
    st.tuples(st.just("attach"), NAMES, st.none()),
    st.tuples(st.just("detach"), NAMES, st.none()),
    st.tuples(st.just("look"), NAMES, st.integers(1, 3)),
    st.tuples(st.just("stubborn"), NAMES, st.booleans()),
    st.tuples(st.just("libvirt"), NAMES, st.booleans()),
    st.tuples(st.just("refuses"), NAMES, st.sampled_from(["", "region", "channel"])),
    st.tuples(st.just("kill"), NAMES, st.integers(0, 12)),
    st.tuples(st.just("restart"), NAMES, st.none()),
)


def step(world: World, what: str, name: str, value) -> None:
    domain = world.domains[name]
    if what == "define":
        domain.request = value
    elif what == "create":
        world.create(name, hooked=value)
    elif what == "destroy":
        world.destroy(name, told=value)
    elif what == "crash" and domain.xml is not None:
        domain.crashed = True
    elif what == "reboot" and world.up and domain.xml is not None:
        world.guests._boot(name)
    elif what in ("attach", "detach") and world.up:
        try:
            if what == "attach":
                world.guests._attach(name, "mine")
            else:
                world.guests._detach(name, force=False)
        except PoolError:
            pass
        except Killed:
            world.end()
    elif what == "look":
        for _ in range(value):
            world.look_at_all()
    elif what == "stubborn":
        domain.stubborn = value
    elif what == "libvirt":
        world.hypervisor.gone = value
    elif what == "refuses":
        world.hypervisor.refuses_attach = value
    elif what == "kill":
        world.hypervisor.kill_in = value
        world.look_at_all()
    elif what == "restart":
        world.end()
        world.begin()


@given(st.lists(STEPS, max_size=25))
@hypothesis_settings(
    max_examples=int(os.environ.get("GPUPOOL_EXAMPLES", "60")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
def test_whatever_happens_the_leases_are_those_of_the_machines_that_run(steps):
    root = Path(tempfile.mkdtemp(prefix="gp-", dir="/dev/shm"))
    world = World(root)
    try:
        for what, name, value in steps:
            step(world, what, name, value)
        world.settle()
        world.check()
    finally:
        world.end()
        shutil.rmtree(root)


def test_a_start_gets_lease_devices_and_grant_and_a_stop_takes_them(world):
    world.domains[A].request = SIZED
    assert world.create(A)
    (guest,) = world.store.guests()  # at admission: before anything was looked at
    assert guest.domain_uuid == A and guest.temporary and os.path.exists(guest.region_path)
    world.look_at_all()
    world.check()
    assert world.domains[A].xml.grant == guest.id
    (view,) = world.guests.list(ROOT)
    assert view.devices == ("channel", "region") and view.problem == ""
    assert world.guests.list(ALICE) == []
    world.destroy(A)
    world.look_at_all()
    assert not os.path.exists(guest.region_path)
    world.check()
    assert [piece.name for piece in world.store.slices()] == ["mine"]


def test_the_hook_says_why_not(world):
    domain = world.domains[A]
    say = lambda wanted: world.guests.on_hook("prepare", world.xml_text(domain, wanted))  # noqa: E731
    assert "no GPU has room for 20 % and 99999 MiB" in say(GuestRequest("", 20, 99999))
    assert "there is no slice other" in say(GuestRequest(name="other"))
    assert "whole percentage" in say(GuestRequest("", 101, 1))
    assert world.store.guests() == [] and say(None) == ""
    refused = [event for event in world.store.events() if event.kind == "guest.refused"]
    assert len(refused) == 3


def test_a_hand_made_slice_is_one_consumers_at_a_time(world):
    for name in (A, B):
        world.domains[name].request = NAMED
    assert world.create(A)
    assert "leased to the virtual machine vm-a" in world.guests.on_hook(
        "prepare", world.xml_text(world.domains[B], NAMED)
    )
    with pytest.raises(Conflict, match="leased to a virtual machine"):
        world.pool.delete_slice(ALICE, "mine", force=False)
    world.destroy(A)
    (lease,) = world.store.leases()
    assert (lease.kind, lease.owner_uid) == (LeaseKind.OWNER, ALICE.uid)
    assert world.create(B)


def test_a_slice_that_is_deleted_by_force_is_not_granted_again(world):
    world.domains[A].request = NAMED
    world.create(A)
    world.look_at_all()
    world.pool.delete_slice(ALICE, "mine", force=True)
    world.look_at_all()
    world.check()
    assert world.store.guests() == [] and world.domains[A].xml.request is None


def test_attach_rolls_back_where_a_device_cannot_be_attached(world):
    world.create(A)
    world.hypervisor.refuses_attach = "channel"
    with pytest.raises(PoolError, match=r"not attached: No more available PCI slots"):
        world.guests._attach(A, "mine")
    world.look_at_all()
    world.check()
    assert world.store.guests() == []
    world.hypervisor.refuses_attach = ""
    view = world.guests._attach(A, "mine")
    assert view.devices == ("channel", "region")
    with pytest.raises(Conflict, match="has slice mine already"):
        world.guests._attach(A, "mine")
    world.domains[A].stubborn = True
    view = world.guests._detach(A, force=False)
    assert view.guest.ended_at is not None and "not given back" in view.problem
    with pytest.raises(Conflict, match="not given back the region"):
        world.guests._attach(A, "mine")
    world.settle()
    world.check()


@pytest.mark.parametrize("refused", ["region", "channel"])
def test_a_device_that_is_refused_holds_up_nothing_else(world, refused):
    world.domains[A].request = SIZED
    world.hypervisor.refuses_attach = refused
    world.create(A)
    world.look_at_all()
    (view,) = world.guests.list(ROOT)
    assert view.devices == (("channel",) if refused == "region" else ("region",))
    assert view.problem == "No more available PCI slots"
    assert world.domains[A].xml.grant == view.guest.id
    world.hypervisor.refuses_attach = ""
    world.look_at_all()
    world.check()
    (view,) = world.guests.list(ROOT)
    assert view.devices == ("channel", "region") and view.problem == ""


def test_the_region_takes_a_free_port_and_a_missing_controller_is_said(world):
    world.domains[A].request = SIZED
    world.create(A)
    world.domains[A].xml = replace(world.domains[A].xml, free_ports=(3, 7), has_serial=False)
    world.look_at_all()
    assert "bus='7'" in world.domains[A].xml.region.xml
    (view,) = world.guests.list(ROOT)
    assert view.devices == ("region",)
    assert "no virtio-serial controller" in view.problem


def test_only_root_attaches(world):
    with pytest.raises(NotPermitted):
        world.guests.attach(ALICE, A, "mine")
    with pytest.raises(NotPermitted):
        world.guests.detach(ALICE, A, False)


def test_devices_of_others_are_left_alone(world):
    world.domains[A].request = SIZED
    world.create(A)
    foreign = Device(Held.FOREIGN, "<channel/>")
    world.domains[A].xml = replace(world.domains[A].xml, channel=foreign)
    world.look_at_all()
    assert world.domains[A].xml.channel == foreign
    assert world.domains[A].xml.region.held == Held.OURS
    world.domains[A].xml = replace(world.domains[A].xml, request=None)
    world.look_at_all()
    assert world.domains[A].xml.channel == foreign
    assert world.domains[A].xml.region.held == Held.NONE


def port_that_the_broker_is_told(world):
    [message] = [
        message
        for message in lease_messages(world.pool.broker.desired())
        if message.consumer.startswith("virtual machine")
    ]
    return message.port


def test_the_broker_is_told_where_the_port_is(world):
    world.domains[A].request = SIZED
    world.create(A)
    assert port_that_the_broker_is_told(world) == ""
    world.look_at_all()
    path = world.domains[A].xml.channel.path
    assert path and port_that_the_broker_is_told(world) == path
    # Also by a gpupoold that has not looked at libvirt yet.
    world.end()
    world.begin()
    assert port_that_the_broker_is_told(world) == path
    world.domains[A].xml = replace(
        world.domains[A].xml, channel=Device(Held.FOREIGN, "<channel/>", "/somewhere")
    )
    world.look_at_all()
    assert port_that_the_broker_is_told(world) == ""


def test_the_broker_is_told_of_the_region_where_it_may_use_it(world):
    world.domains[A].request = SIZED
    world.create(A)
    desired = world.pool.broker.desired()

    def region(*, regions):
        settings = replace(desired.settings, regions=regions, libvirt_region_mib=8)
        [message] = [
            message
            for message in lease_messages(replace(desired, settings=settings))
            if message.consumer.startswith("virtual machine")
        ]
        return message.region

    [guest] = desired.guests
    told = region(regions=True)
    assert (told.path, told.inode) == (guest.region_path, os.stat(guest.region_path).st_ino)
    assert told.bytes == 8 << 20
    assert region(regions=False).path == ""


def test_a_domain_in_the_midst_of_something_is_not_touched():
    guest = Guest(str(uuid.uuid4()), A, "vm", "s", 0, True, "/x", 1, 1, 0.0)
    seen = reconcile.Seen(A, "vm", True, SIZED, settled=False)
    decide = reconcile.decide
    assert decide(seen, [guest], {guest.id}, attach_devices=True, stale_headers={guest.id}) == []
    settled = replace(seen, settled=True)
    kinds = [
        type(action).__name__
        for action in decide(settled, [guest], {guest.id}, attach_devices=True)
    ]
    assert kinds == ["Attach", "Attach", "WriteGrant"]
    without = decide(settled, [guest], {guest.id}, attach_devices=False)
    assert [type(action).__name__ for action in without] == ["WriteGrant"]


def test_sessions_end_with_the_service_that_carries_them():
    guest = Guest(str(uuid.uuid4()), A, "vm", "s", 0, True, "/x", 1, 1, 0.0)
    ours = Held.OURS
    used = reconcile.Seen(A, "vm", True, SIZED, grant=guest.id, channel=ours, region=ours)

    def decide(seen, carried):
        return reconcile.decide(seen, [guest], {guest.id}, attach_devices=True, carried=carried)

    assert decide(used, ["one"]) == []
    unused = replace(used, port_unused=True)
    assert decide(unused, []) == []
    assert decide(unused, ["one", "two"]) == [reconcile.EndSessions(guest, ("one", "two"))]
    assert decide(replace(unused, settled=False), ["one"]) == []


@pytest.mark.parametrize(("state", "unused"), [("disconnected", True), ("connected", False)])
def test_whether_a_port_is_used_is_in_the_live_xml(state, unused):
    xml = f"""<domain><name>vm</name><uuid>{A}</uuid><devices><channel type='unix'>
      <source mode='bind' path='/p'/><target type='virtio' name='org.gpupool.0' state='{state}'/>
      <alias name='ua-gpupool-channel'/></channel></devices></domain>"""
    assert request.read_domain(xml).channel.unused is unused


def test_names_are_in_one_place():
    assert request.region_name(A) == f"gpupool-{A}"
    assert f"<shmem name='gpupool-{A}' role='master'>" in request.region_xml(A, 16)
