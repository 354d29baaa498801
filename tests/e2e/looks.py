"""What the tests of virtual machines look at: lease, devices, metadata, events."""

from __future__ import annotations

import json
import uuid
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import libvirt

from tests.e2e.host import Host, Machine, until
from tests.e2e.tenant import Program

GRANT_URI = "https://gpupool.example/xmlns/grant/1"


def guests(host: Host) -> list[dict[str, Any]]:
    return host.pool.ctl_json("guest", "list")


def leases(host: Host) -> list[dict[str, Any]]:
    return [entry for entry in host.pool.ctl_json("lease", "list") if entry["kind"] == "vm"]


def events(host: Host, kind: str, domain: str) -> list[dict[str, Any]]:
    done = host.pool.ctl("--json", "events", check=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [entry for entry in found if entry["kind"] == kind and domain in entry["text"]]


def whole(host: Host, machine: Machine) -> dict[str, Any]:
    """The guest, once all of its lease is there."""

    def look() -> dict[str, Any] | None:
        for entry in guests(host):
            if (
                entry["domain"] == machine.name
                and not entry["ended"]
                and sorted(entry["devices"]) == ["channel", "region"]
                and grant(machine) == entry["lease"]
            ):
                return entry
        return None

    return until(look, f"{machine.name} has its lease and devices")


def grant(machine: Machine) -> str:
    """The lease of the grant in the live metadata; empty: none."""
    try:
        text = machine.domain.metadata(
            libvirt.VIR_DOMAIN_METADATA_ELEMENT, GRANT_URI, libvirt.VIR_DOMAIN_AFFECT_LIVE
        )
    except libvirt.libvirtError:
        return ""
    return ET.fromstring(text).get("lease", "")


def gone(host: Host, domain: str, region: str, program: Program | None = None) -> None:
    """Nothing is left of the lease: exactly one end was told for each grant.

    program: one that ran under the lease; its worker is gone, and its next call fails.
    """
    until(lambda: not [g for g in guests(host) if g["domain"] == domain], "nothing is left")
    if program is not None:
        until(lambda: program.ended, "the end of the worker")
        assert program.allocate() != 0
    assert not [entry for entry in leases(host) if entry["domain"] == domain]
    assert not Path(region).exists()
    granted = [entry["data"]["lease"] for entry in events(host, "guest.granted", domain)]
    ended = [entry["data"]["lease"] for entry in events(host, "guest.ended", domain)]
    assert sorted(granted) == sorted(ended)
    assert len(set(ended)) == len(ended)


REGION_IN_GUEST = """
for device in /sys/bus/pci/devices/*; do
  if [ "$(cat $device/device)" = 0x1110 ]; then region=$(readlink -f $device); fi
done
memory() { sed -n 3p $region/resource | cut -d ' ' -f 1; }
if [ $(memory) = 0x0000000000000000 ]; then
  port=$(dirname $region)
  echo 1 > $port/remove
  echo 1 > /sys/bus/pci/rescan
fi
for offset in 0 8 16 24 48; do devmem $(($(memory) + offset)) 64; done
"""


def devices_in_guest(machine: Machine) -> tuple[bool, bool]:
    """(the control port, the region) as the guest sees them."""
    ports = machine.sh("cat /sys/class/virtio-ports/*/name").split()
    pci = machine.sh("cat /sys/bus/pci/devices/*/device").split()
    return "org.gpupool.0" in ports, "0x1110" in pci


def region_in_guest(machine: Machine) -> tuple[int, str]:
    """(epoch, lease) that the guest reads in the region's memory.

    Below a q35's port there is little room for what comes later: the guest looks for the port
    anew, which gives it enough.
    """
    until(lambda: devices_in_guest(machine) == (True, True), "the guest sees both devices")
    words = [int(word, 16) for word in machine.sh(REGION_IN_GUEST).split()[-5:]]
    data = b"".join(word.to_bytes(8, "little") for word in words)
    assert data[:8] == b"GPPREGN1", data
    assert data[32:36] == b"\x01\0\0\0", data  # the lease stands
    return words[1], str(uuid.UUID(bytes=data[16:32]))
