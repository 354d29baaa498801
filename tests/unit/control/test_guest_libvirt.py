"""The connection to libvirt, with libvirt's own test driver: real events and metadata, no QEMU."""

from __future__ import annotations

import contextlib
import time

import pytest

from gpupoold.errors import ConfigurationError, NotFound
from gpupoold.guests import connection, request
from gpupoold.guests.connection import HypervisorGone, Libvirt
from gpupoold.guests.manager import Guests
from gpupoold.guests.region import Regions
from gpupoold.pool import Pool
from gpupoold.store import Store

from .fakes import FakeDriver, gpu, settings

libvirt = pytest.importorskip("libvirt")
REQUEST = f"<gp:slice xmlns:gp='{request.REQUEST_URI}' compute='20' memory='1024'/>"
DOMAIN = """<domain type='test'><name>{name}</name><metadata>{metadata}</metadata>
<memory unit='MiB'>64</memory><os><type>hvm</type></os></domain>"""


def until(condition, seconds: float = 30.0):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)
    return value


@pytest.fixture
def hypervisor():
    hints: list[tuple[str, bool]] = []
    own = Libvirt("test:///default", lambda name, booted: hints.append((name, booted)))
    own.connect()
    own.hints = hints
    yield own
    own.close()


def test_events_come_as_hints(hypervisor):
    (name,) = hypervisor.active()
    domain = hypervisor._connection.lookupByUUIDString(name)
    domain.destroy()
    until(lambda: (name, False) in hypervisor.hints)
    assert hypervisor.look(name) is None and hypervisor.active() == []
    domain.create()
    look = hypervisor.look(name)
    assert look.xml.name == "test" and look.settled and not look.crashed and not look.xml.asks


def test_metadata_is_written_and_taken_away(hypervisor):
    (name,) = hypervisor.active()
    element = request.request_element("mine")
    hypervisor.set_metadata(name, request.REQUEST_URI, request.REQUEST_PREFIX, element)
    assert hypervisor.look(name).xml.request.name == "mine"
    grant = request.grant_element("some-lease", "mine", "GPU-1", "host")
    hypervisor.set_metadata(name, request.GRANT_URI, request.GRANT_PREFIX, grant)
    assert hypervisor.look(name).xml.grant == "some-lease"
    hypervisor.set_metadata(name, request.REQUEST_URI, request.REQUEST_PREFIX, None)
    hypervisor.set_metadata(name, request.GRANT_URI, request.GRANT_PREFIX, None)
    look = hypervisor.look(name)
    assert look.xml.request is None and look.xml.grant == ""


def test_domains_are_found_by_name_or_uuid(hypervisor):
    (name,) = hypervisor.active()
    assert hypervisor.find("test") == hypervisor.find(name) == name
    with pytest.raises(NotFound, match="has no domain other"):
        hypervisor.find("other")


def test_a_libvirt_that_is_not_there_is_said():
    own = Libvirt("qemu+unix:///system?socket=/nowhere/libvirt-sock", lambda name, booted: None)
    with pytest.raises(HypervisorGone, match="libvirt cannot be reached at qemu"):
        own.connect()
    with pytest.raises(HypervisorGone):
        own.active()


def test_without_the_python_package_the_configuration_is_wrong(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "libvirt", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'gpupool\[libvirt\]'"):
        connection.load_libvirt()


def test_a_domain_that_asks_gets_a_lease_as_long_as_it_runs(root):
    options = settings(
        root,
        libvirt_uri="test:///default",
        libvirt_attach_devices="false",
        libvirt_region_group="",
    )
    store = Store(options.database)
    store.open()
    pool = Pool(options, store, FakeDriver([gpu(0)]))
    pool.start()
    guests = Guests(options, pool)
    guests.leases._regions = Regions("x", 1, "", str(root))
    guests.start()
    try:
        until(lambda: not guests.problem)
        # The test driver has domains of each connection of its own: use gpupoold's.
        own = guests._hypervisor._connection
        domain = own.defineXML(DOMAIN.format(name="asks", metadata=REQUEST))
        domain.create()
        guest = until(store.guests)[0]
        assert guest.domain_name == "asks" and guest.region_path == ""
        until(lambda: guest.id in domain.XMLDesc())  # the grant
        domain.destroy()
        until(lambda: store.guests() == [])
        assert store.leases() == [] and store.slices() == []
        kinds = [event.kind for event in store.events() if event.kind.startswith("guest")]
        assert kinds == ["guest.granted", "guest.ended"]
    finally:
        guests.stop()
        pool.stop()
        with contextlib.suppress(Exception):
            store.close()
