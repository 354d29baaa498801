"""Puts together what sysfs, netlink and the driver know of a host's ways to its peers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gpupoold.conf.load import PeerSettings
from gpupoold.gpus.topology.distances import distance, farthest
from gpupoold.gpus.topology.model import (
    Distance,
    Interface,
    Path,
    PeerRoute,
    Place,
    RdmaDevice,
    RdmaPort,
    Topology,
)
from gpupoold.gpus.topology.names import Resolver
from gpupoold.gpus.topology.netlink import Link, Netlink, Network, NetworkError, NoRoute, Route
from gpupoold.gpus.topology.sysfs import Hardware, Sysfs
from gpupoold.model import Gpu

#: kinds whose traffic goes by their master's other parts, too
BONDS = ("bond", "team")
#: kinds that are another interface's, with the same hardware
ON_ANOTHER = ("vlan", "macvlan", "ipvlan", "macvtap", "ipvtap")


class Surveyor:
    """Looks at this host when it is asked. Safe to use from several threads."""

    def __init__(
        self,
        peers: Sequence[PeerSettings],
        sysfs: Sysfs | None = None,
        network: Callable[[], Network] = Netlink,
        resolver: Resolver | None = None,
    ) -> None:
        self._peers = peers
        self._sysfs = sysfs or Sysfs()
        self._network = network
        self._resolver = resolver or Resolver()

    def look(self, gpus: Sequence[Gpu]) -> Topology:
        """The topology now, in little more than names.WAIT_SECONDS at most.

        What cannot be found out is said in the answer.
        """
        # Before anything is opened: it is the only thing that takes time.
        hosts = {peer.name: host_of(peer.address) for peer in self._peers}
        found = self._resolver.resolve(hosts.values())
        cards = {gpu.uuid: self._sysfs.card(gpu.pci_address, gpu.numa_node) for gpu in gpus}
        try:
            with self._network() as network:
                links = network.links()
                routes = [
                    _find_route(peer, *found[hosts[peer.name]], network) for peer in self._peers
                ]
        except NetworkError as error:
            problem = str(error)
            links = []
            routes = [
                _Found(PeerRoute(peer.name, peer.address, problem=problem)) for peer in self._peers
            ]
        else:
            problem = ""
        host = _Host(links, self._sysfs, cards)
        used = {found.route.link for found in routes if found.route}
        return Topology(
            [host.interface(link) for link in links if host.is_shown(link, used)],
            host.rdma_devices,
            [host.with_paths(found) for found in routes],
            problem,
        )


def host_of(address: str) -> str:
    """The host in ADDRESS:PORT or [ADDRESS]:PORT."""
    return address.rpartition(":")[0].strip("[]")


@dataclass(frozen=True)
class _Found:
    """A peer with the kernel's route to it."""

    peer: PeerRoute
    route: Route | None = None


def _find_route(
    peer: PeerSettings, addresses: Sequence[str], problem: str, network: Network
) -> _Found:
    """By the first address that there is a route to."""
    for address in addresses:
        try:
            route = network.route(address)
        except NoRoute as error:
            problem = problem or str(error)
            continue
        return _Found(PeerRoute(peer.name, peer.address, address), route)
    return _Found(PeerRoute(peer.name, peer.address, problem=problem))


class _Host:
    """Interfaces and RDMA devices at one moment."""

    def __init__(self, links: Sequence[Link], sysfs: Sysfs, cards: Mapping[str, Place]) -> None:
        self._cards = cards
        self._links = {link.index: link for link in links}
        self._hardware = {link.index: sysfs.interface(link.name) for link in links}
        self.rdma_devices = [self._measured(device) for device in sysfs.rdma_devices()]

    # ---- interfaces -----------------------------------------------------------------------------

    def is_shown(self, link: Link, used: Iterable[int]) -> bool:
        """Whether it may lead to another host: hardware, and what has an address or a route.

        What leads to guests (veth, tap) has neither.
        """
        if link.loopback:
            return False
        return (
            self._hardware[link.index].physical
            or link.has_address
            or link.index in used
            or (link.kind in BONDS and any(part.physical for part in self._parts(link)))
        )

    def interface(self, link: Link) -> Interface:
        """For people and programs."""
        mine = self._hardware[link.index]
        return Interface(
            name=link.name,
            state=link.state,
            mtu=link.mtu,
            speed_mbps=mine.speed_mbps,
            driver=mine.driver or link.kind,
            place=mine.place,
            addresses=link.addresses,
            distances={uuid: self._distance(link, card) for uuid, card in self._cards.items()},
        )

    def _below(self, link: Link, seen: frozenset[int] = frozenset()) -> list[Link]:
        """The interfaces that one made in software is on, and those that they are on."""
        seen = seen | {link.index}
        if link.kind in ON_ANOTHER:
            direct = [self._links[link.parent]] if link.parent in self._links else []
        else:
            direct = [other for other in self._links.values() if other.master == link.index]
        found = []
        for other in direct:
            if other.index not in seen:
                found += [other, *self._below(other, seen)]
        return found

    def _parts(self, link: Link) -> list[Hardware]:
        """The hardware of an interface, its own or that of those it is on."""
        hardware = [self._hardware[one.index] for one in (link, *self._below(link))]
        return [one for one in hardware if one.physical]

    def _distance(self, link: Link, card: Place) -> Distance:
        return farthest(distance(part.place, card) for part in self._parts(link))

    # ---- RDMA -----------------------------------------------------------------------------------

    def _measured(self, device: RdmaDevice) -> RdmaDevice:
        """With its distances; one made in software is where its interfaces are."""
        names = {name for port in device.ports for name in port.interfaces}
        links = [link for link in self._links.values() if link.name in names]
        distances = {
            uuid: distance(device.place, card)
            if device.place.chain
            else farthest(self._distance(link, card) for link in links)
            for uuid, card in self._cards.items()
        }
        return replace(device, distances=distances)

    def _rdma_of(self, link: Link) -> list[tuple[RdmaDevice, RdmaPort]]:
        """The ports that belong to an interface. A bridge has none: what its parts have does not
        know its address."""
        names = {link.name}
        if link.kind != "bridge":
            names |= {one.name for one in self._below(link)}
        return [
            (device, port)
            for device in self.rdma_devices
            for port in device.ports
            if names.intersection(port.interfaces)
        ]

    # ---- paths ----------------------------------------------------------------------------------

    def with_paths(self, found: _Found) -> PeerRoute:
        """The peer with its route's interface and the path for each card."""
        peer, route = found.peer, found.route
        if route is None:
            none = [Path(uuid, "", "", 0, Distance.UNKNOWN, peer.problem) for uuid in self._cards]
            return replace(peer, paths=tuple(none))
        # An interface may have come or gone since the list was made.
        link = self._links.get(route.link, Link(route.link, f"interface {route.link}", mtu=0))
        return replace(
            peer,
            interface=link.name,
            gateway=route.gateway,
            source=route.source,
            mtu=route.mtu or link.mtu,
            paths=tuple(
                self._path(uuid, card, link, route.local) for uuid, card in self._cards.items()
            ),
        )

    def _path(self, uuid: str, card: Place, link: Link, local: bool) -> Path:
        if local:
            why = "the address is this host's own: nothing leaves the host"
            return Path(uuid, link.name, "", 0, Distance.UNKNOWN, why)
        ports = sorted(
            self._rdma_of(link),
            key=lambda entry: (
                entry[1].state != "ACTIVE",
                entry[0].distances[uuid].rank,
                entry[0].name,
                entry[1].number,
            ),
        )
        if not ports:
            why = f"the route leaves by {link.name}; no RDMA device belongs to it, so TCP"
            return Path(uuid, link.name, "", 0, self._own_distance(link, card), why)
        device, port = ports[0]
        which = f"port {port.number} of RDMA device {device.name}"
        if port.state != "ACTIVE":
            why = f"the route leaves by {link.name}; its {which} is {port.state}, so TCP"
            return Path(uuid, link.name, "", 0, self._own_distance(link, card), why)
        why = f"the route leaves by {link.name}; {which} belongs to it and is active"
        return Path(uuid, link.name, device.name, port.number, device.distances[uuid], why)

    def _own_distance(self, link: Link, card: Place) -> Distance:
        known = link.index in self._links
        return self._distance(link, card) if known else Distance.UNKNOWN
