"""What a domain's XML says: its request for a slice, the grant, its devices of ours.

The request is one element of the domain's metadata, in the namespace REQUEST_URI:

    <gp:slice xmlns:gp="https://gpupool.example/xmlns/request/1" name="training"/>
    <gp:slice xmlns:gp="https://gpupool.example/xmlns/request/1" compute="25" memory="8192"/>

The first takes a slice that was made by hand, the second has one made. etc/libvirt/*.rng describe
the same for other programs. Pure functions.
"""

from __future__ import annotations

import enum
import re
import uuid
import xml.etree.ElementTree as ET
from dataclasses import dataclass, replace
from xml.sax.saxutils import quoteattr

from gpupoold.errors import InvalidRequest
from gpupoold.model import PRIORITY_DEFAULT, SliceMode, printable
from gpupoold.slices import planning

#: the beginning of the namespace of every version of the request
REQUEST_URIS = "https://gpupool.example/xmlns/request/"
REQUEST_URI = REQUEST_URIS + "1"
GRANT_URI = "https://gpupool.example/xmlns/grant/1"
#: prefixes that the elements get in the metadata
REQUEST_PREFIX = "gp"
GRANT_PREFIX = "gpgrant"
#: any version of Nova's metadata (nova/virt/libvirt/config.py)
NOVA_URIS = "http://openstack.org/xmlns/libvirt/nova/"

CHANNEL_TARGET = "org.gpupool.0"
#: libvirt keeps an alias that begins with ua- through save, restore and migration: by it a device
#: is known as ours
CHANNEL_ALIAS = "ua-gpupool-channel"
VSOCK_ALIAS = "ua-gpupool-vsock"
REGION_ALIAS = "ua-gpupool-region"

XML_MAX = 4 << 20
_SIZED = ("compute", "memory", "mode", "priority")


@dataclass(frozen=True)
class GuestRequest:
    """A hand-made slice by name, or a size. Units as in planning.Request."""

    name: str = ""
    compute_percent: int = 0
    memory_mib: int = 0
    mode: str = SliceMode.HARD.value
    priority: int = PRIORITY_DEFAULT

    def sized(self, name: str) -> planning.Request:
        """The slice to make, under this name."""
        return planning.Request(
            name=name,
            compute_percent=self.compute_percent,
            memory_mib=self.memory_mib,
            mode=self.mode,
            priority=self.priority,
        )


#: of a virtual machine; lower ones mean the host and the like (vm_sockets.h)
FIRST_CID = 3


class Held(enum.Enum):
    """Whether a domain has a device, and whether gpupoold attached it."""

    NONE = "none"
    OURS = "ours"
    FOREIGN = "foreign"


@dataclass(frozen=True)
class Device:
    """A device of a live domain; `xml` is its whole element, as detaching needs it."""

    held: Held = Held.NONE
    xml: str = ""
    path: str = ""  # of a channel: the host's socket
    unused: bool = False  # of a channel: nobody in the guest has it open
    cid: int = 0  # of a vsock device: the context id by which the host's kernel knows the guest


@dataclass(frozen=True)
class NovaInstance:
    """What Nova wrote about its instance; empty where it did not."""

    name: str = ""
    project_id: str = ""
    project_name: str = ""
    flavor: str = ""


@dataclass(frozen=True)
class DomainXml:
    """A domain as its XML describes it. request_problem: why the request cannot be understood.

    free_ports: the buses of PCI Express root ports that have nothing plugged in.
    """

    uuid: str
    name: str
    request: GuestRequest | None = None
    request_problem: str = ""
    grant: str = ""  # the lease of the grant that stands in the metadata
    channel: Device = Device()
    region: Device = Device()
    vsock: Device = Device()
    nova: NovaInstance | None = None
    has_serial: bool = True  # a controller for the channel; libvirt adds none to a running machine
    free_ports: tuple[int, ...] = ()

    @property
    def asks(self) -> bool:
        """Whether there is a request, understood or not."""
        return self.request is not None or bool(self.request_problem)


def region_name(domain_uuid: str) -> str:
    """A domain's region below /dev/shm. Migration needs the name to be the same everywhere."""
    return f"gpupool-{domain_uuid}"


def read_domain(text: str) -> DomainXml:
    """Raises InvalidRequest where it is no domain; a bad request is a `request_problem`."""
    if len(text) > XML_MAX:
        raise InvalidRequest(f"a domain's XML of {len(text)} characters is too long")
    if "<!DOCTYPE" in text:
        raise InvalidRequest("a domain's XML has no document type")
    try:
        root = ET.fromstring(text)  # noqa: S314  (libvirt's own output; no document type, bounded)
    except ET.ParseError as error:
        raise InvalidRequest(f"the domain's XML cannot be parsed: {error}") from None
    name, identity = root.findtext("name"), root.findtext("uuid")
    if root.tag != "domain" or not name or not identity:
        raise InvalidRequest("not the XML of a domain: no name or no UUID")
    try:
        identity = str(uuid.UUID(identity))
    except ValueError:
        raise InvalidRequest(f"not a domain's UUID: {printable(identity)}") from None
    metadata = root.find("metadata")
    elements = list(metadata) if metadata is not None else []
    request, problem = None, ""
    try:
        request = _request_of(elements)
    except InvalidRequest as error:
        problem = str(error)
    return DomainXml(
        uuid=identity,
        name=name,
        request=request,
        request_problem=problem,
        grant=_grant_of(elements),
        channel=_channel_of(root),
        region=_region_of(root, region_name(identity)),
        vsock=_vsock_of(root),
        nova=_nova_of(elements),
        has_serial=root.find("devices/controller[@type='virtio-serial']") is not None,
        free_ports=_free_ports_of(root),
    )


def parse_request(text: str) -> GuestRequest:
    """The request of one metadata element; raises InvalidRequest."""
    try:
        return _parse(ET.fromstring(text))  # noqa: S314
    except ET.ParseError as error:
        raise InvalidRequest(f"the request cannot be parsed: {error}") from None


def _namespace(element: ET.Element) -> str:
    return element.tag[1:].partition("}")[0] if element.tag.startswith("{") else ""


def _request_of(elements: list[ET.Element]) -> GuestRequest | None:
    found = [entry for entry in elements if _namespace(entry).startswith(REQUEST_URIS)]
    if not found:
        return None
    if len(found) > 1:
        raise InvalidRequest("the metadata holds more than one request for a slice")
    return _parse(found[0])


def _parse(element: ET.Element) -> GuestRequest:
    space = _namespace(element)
    if space != REQUEST_URI:
        raise InvalidRequest(
            f"the request for a slice is in the namespace {printable(space)}; this gpupoold knows "
            f"{REQUEST_URI}"
        )
    tag = element.tag.partition("}")[2]
    if tag != "slice":
        raise InvalidRequest(f"the request for a slice is an element `slice`, not {printable(tag)}")
    if len(element) or (element.text or "").strip():
        raise InvalidRequest("the element `slice` of a request is empty, with attributes only")
    given = dict(element.attrib)
    unknown = sorted(set(given) - {"name", *_SIZED})
    if unknown:
        raise InvalidRequest(
            f"the request for a slice has no attribute {printable(unknown[0])}; it has name, or "
            "compute, memory, mode and priority"
        )
    if "name" in given:
        others = [name for name in _SIZED if name in given]
        if others:
            raise InvalidRequest(
                f"the request names the slice {printable(given['name'])}: then {others[0]} is that "
                "slice's and cannot be given"
            )
        planning.check_name(given["name"])
        return GuestRequest(name=given["name"])
    for name in ("compute", "memory"):
        if name not in given:
            raise InvalidRequest(
                f"the request for a slice has neither a name nor {name}: give name, or compute "
                "(percent) and memory (MiB)"
            )
    request = GuestRequest(
        compute_percent=_number("compute", given["compute"]),
        memory_mib=_number("memory", given["memory"]),
        mode=given.get("mode", SliceMode.HARD.value),
        priority=_number("priority", given.get("priority", str(PRIORITY_DEFAULT))),
    )
    if not request.mode:
        raise InvalidRequest("no mode is called '': hard or elastic")
    planning.check_request(request.sized("x"))
    return request


def _number(name: str, text: str) -> int:
    # The digits of planning's largest number are far fewer.
    if not re.fullmatch(r"[0-9]{1,18}", text):
        unit = {"compute": " of percent", "memory": " of MiB"}.get(name, "")
        raise InvalidRequest(
            f"the request's {name} is a whole number{unit}, not {printable(text[:40])!r}"
        )
    return int(text)


def request_element(name: str) -> str:
    """The request for a slice by name, as setMetadata takes it."""
    return f"<slice name={quoteattr(name)}/>"


def grant_element(lease: str, slice_name: str, virtual_uuid: str, host: str) -> str:
    """The grant, as setMetadata takes it. It holds no secret."""
    return (
        f"<slice lease={quoteattr(lease)} name={quoteattr(slice_name)} "
        f"uuid={quoteattr(virtual_uuid)} host={quoteattr(host)}/>"
    )


def _grant_of(elements: list[ET.Element]) -> str:
    for element in elements:
        if _namespace(element) == GRANT_URI:
            return element.get("lease", "") or "unknown"
    return ""


def _nova_of(elements: list[ET.Element]) -> NovaInstance | None:
    for element in elements:
        space = _namespace(element)
        if not space.startswith(NOVA_URIS) or not element.tag.endswith("}instance"):
            continue
        prefix = f"{{{space}}}"
        project = element.find(f"{prefix}owner/{prefix}project")
        flavor = element.find(f"{prefix}flavor")
        return NovaInstance(
            name=printable(element.findtext(f"{prefix}name", "")),
            project_id=printable(project.get("uuid", "")) if project is not None else "",
            project_name=printable(project.text or "") if project is not None else "",
            flavor=printable(flavor.get("name", "")) if flavor is not None else "",
        )
    return None


def _alias(element: ET.Element) -> str:
    alias = element.find("alias")
    return alias.get("name", "") if alias is not None else ""


def _device(element: ET.Element, alias: str, path: str = "", *, unused: bool = False) -> Device:
    held = Held.OURS if _alias(element) == alias else Held.FOREIGN
    return Device(held, ET.tostring(element, encoding="unicode").strip(), path, unused)


def _channel_of(root: ET.Element) -> Device:
    for element in root.findall("devices/channel"):
        target = element.find("target")
        if target is not None and target.get("name") == CHANNEL_TARGET:
            source = element.find("source")
            return _device(
                element,
                CHANNEL_ALIAS,
                source.get("path", "") if source is not None else "",
                # QEMU tells libvirt when a process in the guest opens or closes it.
                unused=target.get("state") == "disconnected",
            )
    return Device()


def _region_of(root: ET.Element, name: str) -> Device:
    for element in root.findall("devices/shmem"):
        if element.get("name") == name:
            return _device(element, REGION_ALIAS)
    return Device()


def _vsock_of(root: ET.Element) -> Device:
    """A domain has one at most."""
    element = root.find("devices/vsock")
    if element is None:
        return Device()
    address = element.find("cid")
    cid = _number_of(address.get("address")) if address is not None else None
    return replace(_device(element, VSOCK_ALIAS), cid=cid if cid and cid >= FIRST_CID else 0)


def _number_of(text: str | None) -> int | None:
    try:
        return int(text or "", 0)  # libvirt writes buses as 0x05, indices as 5
    except ValueError:
        return None


def _free_ports_of(root: ET.Element) -> tuple[int, ...]:
    used = {
        _number_of(address.get("bus"))
        for address in root.iterfind("devices//address[@type='pci']")
        if not _number_of(address.get("domain", "0"))
    }
    ports = set()
    for port in root.iterfind("devices/controller[@type='pci'][@model='pcie-root-port']"):
        target = port.find("target")
        bus = _number_of(port.get("index"))
        plugs = target is None or target.get("hotplug") != "off"
        if plugs and bus is not None and bus not in used:
            ports.add(bus)
    return tuple(sorted(ports))


def channel_xml() -> str:
    """The control port. libvirt chooses the host's path."""
    return (
        "<channel type='unix'><source mode='bind'/>"
        f"<target type='virtio' name='{CHANNEL_TARGET}'/>"
        f"<alias name='{CHANNEL_ALIAS}'/></channel>"
    )


def vsock_xml() -> str:
    """A vsock device. libvirt chooses the context id."""
    return f"<vsock model='virtio'><cid auto='yes'/><alias name='{VSOCK_ALIAS}'/></vsock>"


def region_xml(domain_uuid: str, size_mib: int, bus: int | None = None) -> str:
    """The region. role master: it moves with a live migration.

    bus: a free PCI Express root port's. libvirt chooses one of a conventional bridge by itself,
    which many machines have not, and behind which a guest cannot make room for the region.
    """
    address = (
        f"<address type='pci' domain='0' bus='{bus}' slot='0' function='0'/>"
        if bus is not None
        else ""
    )
    return (
        f"<shmem name='{region_name(domain_uuid)}' role='master'>"
        f"<model type='ivshmem-plain'/><size unit='M'>{size_mib}</size>"
        f"<alias name='{REGION_ALIAS}'/>{address}</shmem>"
    )
