"""gpupoolctl topology."""

from __future__ import annotations

import click

from gpupoold.cli.context import Cli, fields


@click.command()
@click.pass_obj
def topology(cli: Cli) -> None:
    """Show each card's PCI address, NUMA node and near CPUs. Links between cards (NVLink, PCIe
    switches) are not shown in this release."""
    from gpupoold.api import gpupool_pb2 as pb

    reply = cli.call("ListGpus", pb.ListGpusRequest())
    entries = [
        fields(gpu, "index", "uuid", "name", "pci_address", "numa_node", "cpu_affinity")
        for gpu in reply.gpus
    ]
    for entry in entries:
        if entry["numa_node"] < 0:
            entry["numa_node"] = None
    if cli.as_json:
        cli.print_json({"gpus": entries})
        return
    cli.show(
        entries,
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
