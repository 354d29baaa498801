"""gpupoolctl topology."""

from __future__ import annotations

from typing import Any

import click

from gpupoold.cli.context import Cli, fields

LEGEND = """\
PIX   at most one PCIe switch between the two
PXB   several PCIe switches, no host bridge
PHB   a PCIe host bridge (the processor)
NODE  several host bridges of one NUMA node
SYS   the interconnect between NUMA nodes"""


@click.command()
@click.pass_obj
def topology(cli: Cli) -> None:
    """Show where the cards are in this host (PCI address, NUMA node, near CPUs), its network
    interfaces and RDMA devices with their distance to each card, and the route to each peer with
    the path for each card. NVLink between cards is not shown in this release."""
    from gpupoold.api import gpupool_pb2 as pb

    gpus = [_gpu(entry) for entry in cli.call("ListGpus", pb.ListGpusRequest()).gpus]
    found = cli.call("GetTopology", pb.GetTopologyRequest())
    value = {
        "gpus": gpus,
        "interfaces": [_interface(entry) for entry in found.interfaces],
        "rdma_devices": [_rdma_device(entry) for entry in found.rdma_devices],
        "peers": [_peer(entry) for entry in found.peers],
        "problem": found.problem,
    }
    if cli.as_json:
        cli.print_json(value)
    else:
        _show(cli, value)


def _gpu(message: Any) -> dict[str, Any]:
    entry = fields(message, "index", "uuid", "name", "pci_address", "numa_node", "cpu_affinity")
    return _with_node(entry)


def _with_node(entry: dict[str, Any]) -> dict[str, Any]:
    if entry["numa_node"] < 0:
        entry["numa_node"] = None
    return entry


def _distances(message: Any) -> dict[str, str]:
    return {entry.gpu_uuid: entry.distance for entry in message.distances}


def _interface(message: Any) -> dict[str, Any]:
    names = ("name", "state", "mtu", "speed_mbps", "pci_address", "numa_node", "driver")
    entry = _with_node(fields(message, *names, "addresses"))
    entry["speed_mbps"] = entry["speed_mbps"] or None
    return {**entry, "distances": _distances(message)}


def _rdma_device(message: Any) -> dict[str, Any]:
    entry = _with_node(fields(message, "name", "pci_address", "numa_node"))
    ports = [
        fields(port, "number", "state", "rate_gbps", "link_layer", "interfaces")
        for port in message.ports
    ]
    for port in ports:
        port["rate_gbps"] = port["rate_gbps"] or None
    return {**entry, "ports": ports, "distances": _distances(message)}


def _peer(message: Any) -> dict[str, Any]:
    entry = fields(message, "name", "address", "resolved", "interface", "gateway", "source", "mtu")
    entry["mtu"] = entry["mtu"] or None
    names = ("gpu_uuid", "interface", "rdma_device", "rdma_port", "distance", "why")
    paths = [fields(path, *names) for path in message.paths]
    for path in paths:
        path["rdma_port"] = path["rdma_port"] or None
    return {**entry, "problem": message.problem, "paths": paths}


def _show(cli: Cli, value: dict[str, Any]) -> None:
    """Tables for people."""
    gpus = value["gpus"]
    cli.show(
        gpus,
        [
            ("#", "index"),
            ("UUID", "uuid"),
            ("NAME", "name"),
            ("PCI ADDRESS", "pci_address"),
            ("NUMA NODE", "numa_node"),
            ("CPUS", "cpu_affinity"),
        ],
        "this host has no GPU",
    )
    if value["problem"]:
        click.echo(f"\n{value['problem']}")
    click.echo()
    cli.show(
        value["interfaces"],
        [
            ("INTERFACE", "name"),
            ("STATE", "state"),
            ("MTU", "mtu"),
            ("MBIT/S", "speed_mbps"),
            ("PCI ADDRESS", "pci_address"),
            ("NUMA NODE", "numa_node"),
            ("DRIVER", "driver"),
            ("ADDRESSES", "addresses"),
        ],
        "no network interface is known",
    )
    click.echo()
    cli.show(
        [
            {**device, **port, "device": device["name"]}
            for device in value["rdma_devices"]
            for port in device["ports"]
        ],
        [
            ("RDMA DEVICE", "device"),
            ("PORT", "number"),
            ("STATE", "state"),
            ("GBIT/S", lambda port: f"{port['rate_gbps']:g}" if port["rate_gbps"] else "-"),
            ("LINK LAYER", "link_layer"),
            ("INTERFACES", "interfaces"),
            ("PCI ADDRESS", "pci_address"),
            ("NUMA NODE", "numa_node"),
        ],
        "this host has no RDMA device",
    )
    devices = value["interfaces"] + value["rdma_devices"]
    if gpus and devices:
        _show_distances(cli, gpus, devices)
    click.echo()
    cli.show(
        value["peers"],
        [
            ("PEER", "name"),
            ("ADDRESS", "address"),
            ("RESOLVED", "resolved"),
            ("INTERFACE", "interface"),
            ("GATEWAY", "gateway"),
            ("SOURCE", "source"),
            ("MTU", "mtu"),
            ("PROBLEM", "problem"),
        ],
        "no peer is configured",
    )
    number = {gpu["uuid"]: gpu["index"] for gpu in gpus}
    paths = [
        {**path, "peer": peer["name"], "gpu": f"GPU{number.get(path['gpu_uuid'], '?')}"}
        for peer in value["peers"]
        for path in peer["paths"]
        if not peer["problem"]  # told once, above
    ]
    if paths:
        click.echo()
        cli.show(
            paths,
            [
                ("PEER", "peer"),
                ("CARD", "gpu"),
                ("INTERFACE", "interface"),
                ("RDMA DEVICE", "rdma_device"),
                ("RDMA PORT", "rdma_port"),
                ("DISTANCE", "distance"),
                ("WHY", "why"),
            ],
            "",
        )


def _show_distances(cli: Cli, gpus: list[dict[str, Any]], devices: list[dict[str, Any]]) -> None:
    """One line for each device, one column for each card."""
    click.echo()
    cli.show(
        [
            {"name": device["name"]}
            | {gpu["uuid"]: device["distances"].get(gpu["uuid"], "") for gpu in gpus}
            for device in devices
        ],
        [("DISTANCE", "name"), *((f"GPU{gpu['index']}", gpu["uuid"]) for gpu in gpus)],
        "",
    )
    click.echo(LEGEND)
