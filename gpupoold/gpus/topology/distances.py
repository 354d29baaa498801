"""How far a device is from a card: pure functions over their places in the PCI tree."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gpupoold.gpus.topology.model import Distance, Place

_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_DEVICE = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def chain_of(parts: Iterable[str]) -> tuple[str, ...]:
    """Host bridge, bridges and device out of the parts of a device's real path in sysfs.

    What is below the PCI device (virtio2, net) is left out; empty for a path without PCI device.
    """
    chain: list[str] = []
    for part in parts:
        if _HOST_BRIDGE.fullmatch(part) or (chain and _DEVICE.fullmatch(part)):
            chain.append(part)
    return tuple(chain) if chain and _DEVICE.fullmatch(chain[-1]) else ()


def sysfs_address(address: str) -> str:
    """NVML's PCI address as sysfs writes it: 00000000:3B:00.0 is 0000:3b:00.0."""
    domain, _, rest = address.lower().partition(":")
    try:
        return f"{int(domain, 16):04x}:{rest}"
    except ValueError:
        return address.lower()


def distance(one: Place, other: Place) -> Distance:
    """The distance between two devices.

    Where one of them has no place in the PCI tree, or they are below different host bridges, it is
    the NUMA nodes that tell; UNKNOWN if they are not known either.
    """
    common = 0
    for ours, theirs in zip(one.chain, other.chain, strict=False):
        if ours != theirs:
            break
        common += 1
    if common:
        if _HOST_BRIDGE.fullmatch(one.chain[common - 1]):
            return Distance.PHB
        # Below what they share: nothing but the devices where that is the last bridge, and one
        # more on each side where it is a switch, which is two bridges, one towards the host and
        # one for each device.
        below = max(len(one.chain), len(other.chain)) - common
        return Distance.PIX if below <= 2 else Distance.PXB
    if one.numa_node < 0 or other.numa_node < 0:
        return Distance.UNKNOWN
    return Distance.NODE if one.numa_node == other.numa_node else Distance.SYS


def farthest(distances: Iterable[Distance]) -> Distance:
    """Of something with several parts, any of which may be used; UNKNOWN for none."""
    return max(distances, key=lambda found: found.rank, default=Distance.UNKNOWN)
