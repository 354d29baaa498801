"""Network and RDMA hardware as sysfs shows it. What is not there is unknown, never an error."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from gpupoold.gpus.topology.distances import chain_of, sysfs_address
from gpupoold.gpus.topology.model import Place, RdmaDevice, RdmaPort

#: a port of the switch inside an adapter that leads to a guest: pf0vf3, c1pf0sf88
_REPRESENTOR = re.compile(r"(c\d+)?pf\d+(vf|sf)\d+")
#: PCI classes of cards: display controllers and processing accelerators
_CARD_CLASSES = ("0x03", "0x12")
_SPEED_MAX = 10**8  # Mbit/s; "unknown" reads as -1 or 4294967295


@dataclass(frozen=True)
class Hardware:
    """What is behind a network interface."""

    place: Place
    driver: str  # empty: none
    physical: bool  # not made in software, and no way to a guest
    speed_mbps: int | None


class Sysfs:
    """Reads below `root`, at each call anew."""

    def __init__(self, root: Path | str = "/sys") -> None:
        self._root = Path(root)

    def card(self, pci_address: str, numa_node: int = -1) -> Place:
        """A card's place. The NUMA node is the given one where it is known.

        A simulated card has none, though another device may have its address.
        """
        device = self._root / "bus/pci/devices" / sysfs_address(pci_address)
        found = Place()
        if _text(device / "class").startswith(_CARD_CLASSES):
            found = self._place(device)
        return replace(found, numa_node=numa_node) if numa_node >= 0 else found

    def interface(self, name: str) -> Hardware:
        """What is behind the interface."""
        entry = self._root / "class/net" / name
        device = entry / "device"
        speed = _number(entry / "speed")
        return Hardware(
            self._place(device),
            os.path.basename(os.path.realpath(device / "driver"))
            if (device / "driver").exists()
            else "",
            device.exists() and not _REPRESENTOR.fullmatch(_text(entry / "phys_port_name")),
            speed if speed is not None and 0 < speed < _SPEED_MAX else None,
        )

    def rdma_devices(self) -> list[RdmaDevice]:
        """All RDMA devices with their ports, by name; distances are left empty."""
        found = []
        for entry in _entries(self._root / "class/infiniband"):
            ports = [port for port in _entries(entry / "ports") if port.name.isdecimal()]
            ports.sort(key=lambda port: int(port.name))
            place = self._place(entry / "device")
            found.append(
                RdmaDevice(
                    entry.name,
                    place,
                    tuple(self._port(entry, port, only=len(ports) == 1) for port in ports),
                )
            )
        return found

    def _port(self, entry: Path, port: Path, *, only: bool) -> RdmaPort:
        rate = re.match(r"([0-9.]+) Gb/sec", _text(port / "rate"))
        return RdmaPort(
            int(port.name),
            _text(port / "state").rpartition(":")[2].strip(),
            float(rate.group(1)) if rate else 0.0,
            _text(port / "link_layer"),
            tuple(sorted(set(self._interfaces(entry, port, only=only)))),
        )

    def _interfaces(self, entry: Path, port: Path, *, only: bool) -> Iterator[str]:
        """The interfaces of a port: of RoCE those of its addresses, those of the same PCI function
        and port, and the one that a device in software was made on."""
        # A file without address cannot be read.
        yield from filter(None, map(_text, _entries(port / "gid_attrs/ndevs")))
        for interface in _entries(entry / "device/net"):
            mine = only or _number(interface / "dev_port") == int(port.name) - 1
            if mine and not _REPRESENTOR.fullmatch(_text(interface / "phys_port_name")):
                yield interface.name
        if parent := _text(entry / "parent"):
            yield parent

    def _place(self, device: Path) -> Place:
        if not device.exists():
            return Place()
        real = Path(os.path.realpath(device))
        chain = chain_of(real.parts)
        if not chain:
            return Place()
        while real.name != chain[-1]:  # from virtio2 to the PCI device that it is on
            real = real.parent
        node = _number(real / "numa_node")
        if node is None or node < 0:
            node = self._only_node()
        return Place(chain, node)

    def _only_node(self) -> int:
        """The NUMA node of a device that has none: there may be but one."""
        online = _text(self._root / "devices/system/node/online")
        return int(online) if online.isdecimal() else -1


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    try:
        return int(_text(path))
    except ValueError:
        return None


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []
