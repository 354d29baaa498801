"""What a domain's XML says of its request, and that the schema says the same."""

from __future__ import annotations

import shutil
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupoold.errors import InvalidRequest
from gpupoold.guests import request
from gpupoold.guests.request import GuestRequest, Held, NovaInstance

SCHEMA = Path(__file__).resolve().parents[3] / "etc" / "libvirt" / "gpupool-request.rng"
URI = "https://gpupool.example/xmlns/request/1"
UUID = "11111111-2222-4333-8444-555555555555"


def element(attributes: str, content: str = "", uri: str = URI, tag: str = "slice") -> str:
    return f"<gp:{tag} xmlns:gp='{uri}' {attributes}>{content}</gp:{tag}>"


def domain(metadata: str = "", devices: str = "") -> str:
    return (
        f"<domain type='qemu' id='3'><name>vm</name><uuid>{UUID}</uuid>"
        f"<metadata>{metadata}</metadata><devices>{devices}</devices></domain>"
    )


GOOD = [
    (element("name='a.b-c_1'"), GuestRequest(name="a.b-c_1")),
    (element("compute='25' memory='8192'"), GuestRequest("", 25, 8192, "hard", 5)),
    (
        element("compute='1' memory='1' mode='elastic' priority='0'", " \n "),
        GuestRequest("", 1, 1, "elastic", 0),
    ),
    (
        element("compute='100' memory='17179869184' priority='10'"),
        GuestRequest("", 100, 1 << 34, "hard", 10),
    ),
]
BAD = [
    (element(""), "neither a name nor compute"),
    (element("compute='25'"), "neither a name nor memory"),
    (element("name='a' compute='25'"), "compute is that slice's"),
    (element("name='a' priority='5'"), "priority is that slice's"),
    (element("name=''"), "cannot be a slice's name"),
    (element("name='-a'"), "cannot be a slice's name"),
    (element("compute='0' memory='1'"), "from 1 to 100"),
    (element("compute='101' memory='1'"), "from 1 to 100"),
    (element("compute='25%' memory='1'"), "whole number of percent"),
    (element("compute='25' memory='0'"), "at least 1 MiB"),
    (element("compute='25' memory='8 GiB'"), "whole number of MiB"),
    (element("compute='25' memory='+1'"), "whole number of MiB"),
    (element("compute='25' memory='1' mode='soft'"), "no mode is called soft"),
    (element("compute='25' memory='1' mode=''"), "no mode is called ''"),
    (element("compute='25' memory='1' priority='11'"), "from 0 to 10"),
    (element("compute='25' memory='1' gpu='0'"), "no attribute gpu"),
    (element("name='a' xmlns:x='y' x:z='1'"), "no attribute {y}z"),
    (element("name='a'", "text"), "is empty"),
    (element("name='a'", "<b/>"), "is empty"),
    (element("name='a'", tag="slices"), "not slices"),
]


@pytest.mark.parametrize(("text", "wanted"), GOOD)
def test_a_request_that_is_right(text, wanted):
    assert request.parse_request(text) == wanted
    found = request.read_domain(domain(text))
    assert (found.request, found.request_problem, found.asks) == (wanted, "", True)


@pytest.mark.parametrize(("text", "why"), BAD)
def test_a_request_that_is_wrong_says_why(text, why):
    with pytest.raises(InvalidRequest, match="^.*" + why.replace("{", r"\{")):
        request.parse_request(text)
    found = request.read_domain(domain(text))
    assert found.request is None and why in found.request_problem and found.asks


def test_the_schema_says_the_same(tmp_path):
    assert shutil.which("xmllint"), "install libxml2-utils"
    names = []
    for number, (text, _) in enumerate(GOOD + BAD):
        (tmp_path / f"{number:02}.xml").write_text(text)
        names.append(f"{number:02}.xml")
    done = subprocess.run(
        ["xmllint", "--noout", "--relaxng", str(SCHEMA), *names],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    verdicts = dict(
        line.split(" ", 1)
        for line in done.stderr.splitlines()
        if line.endswith((" validates", " fails to validate"))
    )
    assert [name for name in names if verdicts.get(name) == "validates"] == names[: len(GOOD)]
    assert [name for name in names if verdicts.get(name) == "fails to validate"] == names[
        len(GOOD) :
    ]


def test_other_versions_and_two_requests_are_refused():
    newer = request.read_domain(domain(element("name='a'", uri=URI[:-1] + "2")))
    assert "this gpupoold knows " + URI in newer.request_problem
    both = domain(element("name='a'") + element("name='a'", uri=URI[:-1] + "2"))
    assert "more than one" in request.read_domain(both).request_problem


def test_a_domain_without_a_request():
    found = request.read_domain(domain("<x:y xmlns:x='https://elsewhere.example/'/>"))
    assert not found.asks and (found.uuid, found.name) == (UUID, "vm")
    assert found.channel.held == found.region.held == Held.NONE and found.nova is None


@pytest.mark.parametrize(
    "text",
    ["", "<domain/>", "<a", domain().replace(UUID, "x"), "<!DOCTYPE a []>" + domain()],
)
def test_what_is_no_domain(text):
    with pytest.raises(InvalidRequest):
        request.read_domain(text)


def test_our_devices_are_known_by_their_alias():
    channel, region = request.channel_xml(), request.region_xml(UUID, 16)
    found = request.read_domain(domain(devices=channel + region))
    assert found.channel.held == found.region.held == Held.OURS
    foreign = request.read_domain(domain(devices=(channel + region).replace("ua-gpupool", "ua-x")))
    assert foreign.channel.held == foreign.region.held == Held.FOREIGN
    other = request.region_xml(UUID.replace("1", "2"), 16)
    assert request.read_domain(domain(devices=other)).region.held == Held.NONE


def test_the_places_for_devices_that_come_later():
    def controller(index: int, model: str, at: str, more: str = "") -> str:
        return (
            f"<controller type='pci' index='{index}' model='{model}'>{more}"
            f"<address type='pci' domain='0x0000' bus='{at}' slot='0x01' function='0x0'/>"
            "</controller>"
        )

    # As libvirt writes it: 10 and 0x0a are the same bus.
    q35 = (
        "<controller type='pci' index='0' model='pcie-root'/>"
        + controller(1, "pcie-root-port", "0x00")
        + controller(2, "pcie-root-port", "0x00", "<target chassis='2' port='0x9'/>")
        + controller(10, "pcie-root-port", "0x00")
        + controller(11, "pcie-root-port", "0x00", "<target hotplug='off'/>")
        + controller(12, "pcie-root-port", "0x00")
        + controller(13, "pcie-to-pci-bridge", "0x01")
        + "<interface><address type='pci' domain='0x0000' bus='0x0a' slot='0x00' function='0x0'/>"
        "</interface><controller type='virtio-serial' index='0'/>"
    )
    found = request.read_domain(domain(devices=q35))
    assert found.free_ports == (2, 12) and found.has_serial
    pc = "<controller type='pci' index='0' model='pci-root'/>"
    found = request.read_domain(domain(devices=pc))
    assert found.free_ports == () and not found.has_serial
    plain = ET.fromstring(request.region_xml(UUID, 16))
    assert plain.find("address") is None
    placed = ET.fromstring(request.region_xml(UUID, 16, 12)).find("address")
    assert placed is not None
    assert {"type": "pci", "bus": "12", "slot": "0"}.items() <= placed.attrib.items()


def test_novas_metadata():
    nova = (
        "<nova:instance xmlns:nova='http://openstack.org/xmlns/libvirt/nova/1.1'>"
        "<nova:name>tenant</nova:name><nova:flavor name='gpu.small'/>"
        "<nova:owner><nova:project uuid='p1'>project</nova:project></nova:owner></nova:instance>"
    )
    found = request.read_domain(domain(nova))
    assert found.nova == NovaInstance("tenant", "p1", "project", "gpu.small")


@given(st.text(min_size=1, max_size=30))
def test_elements_that_we_write_survive_any_text(text):
    printable = "".join(c for c in text if c.isprintable() and ord(c) < 0xD800)
    written = request.grant_element(printable, printable, printable, printable)
    found = request.read_domain(
        domain(written.replace("<slice", f"<slice xmlns='{request.GRANT_URI}'"))
    )
    assert found.grant == (printable or "unknown")
