"""What is known of a host's interfaces, RDMA devices, and routes to its peers."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field


class Distance(enum.StrEnum):
    """What lies between a device and a card, in the words of `nvidia-smi topo`, nearest first."""

    PIX = "PIX"  # at most one PCIe switch
    PXB = "PXB"  # several PCIe switches, no host bridge
    PHB = "PHB"  # a PCIe host bridge
    NODE = "NODE"  # several host bridges of one NUMA node
    SYS = "SYS"  # the interconnect between NUMA nodes
    UNKNOWN = "UNKNOWN"

    @property
    def rank(self) -> int:
        """Smaller is nearer."""
        return list(Distance).index(self)


@dataclass(frozen=True)
class Place:
    """Where a device is in the machine."""

    #: from its PCI host bridge to the device itself: ("pci0000:00", "0000:00:01.0", ...); empty:
    #: not a PCI device, or not known
    chain: tuple[str, ...] = ()
    numa_node: int = -1  # -1: unknown

    @property
    def pci_address(self) -> str:
        """Empty: none."""
        return self.chain[-1] if self.chain else ""


@dataclass(frozen=True)
class Interface:
    """A network interface. One without hardware of its own (a bond) has that of its parts."""

    name: str
    state: str  # as the kernel calls it: up, down, lowerlayerdown, dormant, unknown
    mtu: int  # bytes
    speed_mbps: int | None  # Mbit/s; None: unknown
    driver: str  # of a virtual interface its kind: bond, veth
    place: Place
    addresses: tuple[str, ...]  # ADDRESS/PREFIX
    distances: dict[str, Distance]  # by the card's uuid


@dataclass(frozen=True)
class RdmaPort:
    """One port of an RDMA device, and the interfaces that share it."""

    number: int
    state: str  # as the kernel calls it: ACTIVE, DOWN, INIT, ARMED
    rate_gbps: float  # Gbit/s; 0: unknown
    link_layer: str  # InfiniBand | Ethernet
    interfaces: tuple[str, ...]


@dataclass(frozen=True)
class RdmaDevice:
    """An RDMA device: an InfiniBand or RoCE adapter, or one in software."""

    name: str
    place: Place
    ports: tuple[RdmaPort, ...]
    distances: dict[str, Distance] = field(default_factory=dict)  # by the card's uuid


@dataclass(frozen=True)
class Path:
    """What travels between a card and a peer goes this way."""

    gpu_uuid: str
    interface: str  # empty: none
    rdma_device: str  # empty: no RDMA
    rdma_port: int  # 0: no RDMA
    distance: Distance  # of the RDMA device, or else of the interface, to the card
    why: str  # a short sentence


@dataclass(frozen=True)
class PeerRoute:
    """The route to a peer now."""

    name: str
    address: str  # ADDRESS:PORT as configured
    resolved: str = ""  # the IP address that the route is for; empty: none
    interface: str = ""
    gateway: str = ""  # empty: the peer is on the interface's own network
    source: str = ""
    mtu: int = 0  # bytes; 0: no route
    problem: str = ""  # why there is no route
    paths: tuple[Path, ...] = ()  # one for each card


@dataclass(frozen=True)
class Topology:
    """All of it."""

    interfaces: Sequence[Interface]
    rdma_devices: Sequence[RdmaDevice]
    peers: Sequence[PeerRoute]
    problem: str = ""  # why interfaces and routes are not known
