"""A machine of files: a sysfs tree, and a kernel that tells links and routes as the test says.

NUMA node 0
  pci0000:00
    root port 00:01.0 - switch 01:00.0
                          02:00.0 - 03:00.0 GPU 0
                          02:01.0 - 04:00.0 eth1, mlx5_0
                          02:02.0 - switch 05:00.0
                                      06:00.0 - 07:00.0 ib0, mlx5_1
    root port 00:02.0 - 08:00.0 eth0
  pci0000:40
    root port 40:01.0 - 41:00.0 eth2, mlx5_2
NUMA node 1
  pci0000:80
    root port 80:01.0 - switch 81:00.0
                          82:00.0 - 83:00.0 GPU 1
    root port 80:02.0 - 84:00.0 and 84:00.1, the ports of bond0: eth3, eth4, mlx5_bond_0
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from gpupoold.gpus.topology.netlink import Link, NoRoute, Route

from .fakes import gpu

GPU0 = replace(gpu(0), pci_address="00000000:03:00.0", numa_node=0)
GPU1 = replace(gpu(1), pci_address="00000000:83:00.0", numa_node=1)

SWITCH = "pci0000:00/0000:00:01.0/0000:01:00.0"
DEVICES = {
    "gpu0": f"{SWITCH}/0000:02:00.0/0000:03:00.0",
    "eth1": f"{SWITCH}/0000:02:01.0/0000:04:00.0",
    "ib0": f"{SWITCH}/0000:02:02.0/0000:05:00.0/0000:06:00.0/0000:07:00.0",
    "eth0": "pci0000:00/0000:00:02.0/0000:08:00.0",
    "eth2": "pci0000:40/0000:40:01.0/0000:41:00.0",
    "gpu1": "pci0000:80/0000:80:01.0/0000:81:00.0/0000:82:00.0/0000:83:00.0",
    "eth3": "pci0000:80/0000:80:02.0/0000:84:00.0",
    "eth4": "pci0000:80/0000:80:02.0/0000:84:00.1",
}


class Tree:
    """A sysfs."""

    def __init__(self, root: Path, nodes: str = "0-1") -> None:
        self.root = root
        self.write("devices/system/node/online", nodes)

    def write(self, name: str, text: object) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def link(self, name: str, target: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(os.path.relpath(self.root / target, path.parent))

    def pci(self, chain: str, node: int, kind: str = "0x020000", driver: str = "mlx5_core") -> str:
        """A PCI device; returns its directory below the root."""
        place = f"devices/{chain}"
        self.write(f"{place}/class", kind)
        self.write(f"{place}/numa_node", node)
        self.write(f"bus/pci/drivers/{driver}/new_id", "")
        self.link(f"{place}/driver", f"bus/pci/drivers/{driver}")
        self.link(f"bus/pci/devices/{Path(chain).name}", place)
        return place

    def interface(self, name: str, device: str, speed: int | None = None, **files: object) -> None:
        """A network interface; device: the directory of its device, empty for one in software."""
        place = f"{device}/net/{name}" if device else f"devices/virtual/net/{name}"
        self.write(f"{place}/mtu", 1500)
        if speed is not None:
            self.write(f"{place}/speed", speed)
        for file, content in files.items():
            self.write(f"{place}/{file}", content)
        if device:
            self.link(f"{place}/device", device)
        self.link(f"class/net/{name}", place)

    def rdma(self, name: str, device: str) -> str:
        """An RDMA device without ports; returns its directory."""
        place = f"{device}/infiniband/{name}" if device else f"devices/virtual/infiniband/{name}"
        self.write(f"{place}/node_type", "1: CA")
        if device:
            self.link(f"{place}/device", device)
        self.link(f"class/infiniband/{name}", place)
        return place

    def port(
        self, place: str, number: int, state: str, rate: str, layer: str, *interfaces: str
    ) -> None:
        """A port of an RDMA device; interfaces: those of its addresses."""
        port = f"{place}/ports/{number}"
        self.write(f"{port}/state", state)
        self.write(f"{port}/rate", rate)
        self.write(f"{port}/link_layer", layer)
        for index, interface in enumerate(interfaces):
            self.write(f"{port}/gid_attrs/ndevs/{index}", interface)
        # As the kernel does for the places of addresses that are not there: an error to read.
        (self.root / port / "gid_attrs/ndevs/200").mkdir(parents=True)


def machine(root: Path) -> Tree:
    """The one above."""
    tree = Tree(root)
    place = {
        name: tree.pci(chain, int("0000:80" in chain), driver="nvidia", kind="0x030200")
        if name.startswith("gpu")
        else tree.pci(chain, int("0000:80" in chain))
        for name, chain in DEVICES.items()
    }
    tree.interface("lo", "")
    tree.interface("eth0", place["eth0"], 10000)
    tree.interface("eth1", place["eth1"], 100000, dev_port=0)
    tree.interface("ib0", place["ib0"], 200000, dev_port=0)
    tree.interface("eth2", place["eth2"], -1)
    tree.interface("eth3", place["eth3"], 25000)
    tree.interface("eth4", place["eth4"], 25000)
    tree.interface("bond0", "", 50000)
    tree.port(
        tree.rdma("mlx5_0", place["eth1"]), 1, "4: ACTIVE", "100 Gb/sec (4X EDR)", "Ethernet",
        "eth1", "eth1.7",
    )  # fmt: skip
    tree.port(
        tree.rdma("mlx5_1", place["ib0"]), 1, "4: ACTIVE", "200 Gb/sec (4X HDR)", "InfiniBand"
    )
    tree.port(
        tree.rdma("mlx5_2", place["eth2"]), 1, "1: DOWN", "40 Gb/sec (4X QDR)", "Ethernet", "eth2"
    )
    tree.port(
        tree.rdma("mlx5_bond_0", place["eth3"]), 1, "4: ACTIVE", "25 Gb/sec (1X EDR)", "Ethernet",
        "bond0",
    )  # fmt: skip
    return tree


LINKS = [
    Link(1, "lo", state="unknown", mtu=65536, loopback=True, addresses=("127.0.0.1/8", "::1/128")),
    Link(2, "eth0", addresses=("192.0.2.5/24", "fe80::5/64")),
    Link(3, "eth1", mtu=9000, addresses=("198.51.100.5/24",)),
    Link(4, "ib0", mtu=4092, addresses=("203.0.113.5/24",)),
    Link(5, "eth2", state="down"),
    Link(6, "eth3", mtu=9000, master=8),
    Link(7, "eth4", mtu=9000, master=8),
    Link(8, "bond0", "bond", mtu=9000, addresses=("2001:db8::5/64",)),
    Link(9, "eth1.7", "vlan", mtu=8900, parent=3),
    Link(10, "virbr0", "bridge", addresses=("192.168.122.1/24",)),
    Link(11, "vnet0", "tun", master=10, addresses=("fe80::1/64",)),
    Link(12, "veth1", "veth", parent=13, addresses=("fe80::2/64",)),
    Link(13, "veth2", "veth", parent=12),
    Link(14, "ifb0", "ifb", state="down"),
]


class Kernel:
    """Links and routes of the test's choice; counts how often it was opened and closed."""

    def __init__(
        self, routes: Mapping[str, Route] | None = None, links: Sequence[Link] = LINKS
    ) -> None:
        self.routes = dict(routes or {})
        self._links = list(links)
        self.opened = self.closed = 0

    def __call__(self) -> Kernel:
        return self

    def __enter__(self) -> Kernel:
        self.opened += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.closed += 1

    def links(self) -> list[Link]:
        return self._links

    def route(self, address: str) -> Route:
        try:
            return self.routes[address]
        except KeyError:
            raise NoRoute(f"there is no route to {address}: Network is unreachable") from None
