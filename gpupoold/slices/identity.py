"""Names for slices: the virtual UUID and PCI address that programs see."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable

#: domains from here on belong to slices; real ones are small (VMD uses 0x10000 and more)
FIRST_DOMAIN = 0x4750
LAST_DOMAIN = 0x47FF
BUSES = 255  # 0x01..0xff: bus 0 is a root complex
DEVICES = 32


def new_virtual_uuid() -> str:
    """A fresh random UUID in the form of a GPU's: "GPU-" and 36 characters."""
    return f"GPU-{uuid.uuid4()}"


def pci_address(number: int) -> str:
    """The `number`th address (from 0): neighbours differ in their bus.

    Raises ValueError when there are no more.
    """
    rest, bus = divmod(number, BUSES)
    domain, device = divmod(rest, DEVICES)
    domain += FIRST_DOMAIN
    if domain > LAST_DOMAIN:
        raise ValueError("no virtual PCI address is left")
    return f"{domain:08x}:{bus + 1:02x}:{device:02x}.0"


def free_pci_address(taken: Iterable[str]) -> str:
    """The first address that is not taken."""
    used = set(taken)
    number = 0
    while (address := pci_address(number)) in used:
        number += 1
    return address


def parse_pci_address(text: str) -> tuple[int, int, int]:
    """(domain, bus, device) of "DDDDDDDD:BB:DD.0"; raises ValueError."""
    match = re.fullmatch(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.0", text)
    if not match:
        raise ValueError(f"not a PCI address: {text}")
    return int(match[1], 16), int(match[2], 16), int(match[3], 16)
