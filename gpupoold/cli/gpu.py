"""gpupoolctl gpu."""

from __future__ import annotations

from typing import Any

import click

from gpupoold.cli.context import Cli, fields

GPU_FIELDS = (
    "uuid",
    "name",
    "memory_mib",
    "compute_capability",
    "mode",
    "health",
    "health_reason",
    "drained",
    "memory_reserved_mib",
    "memory_allocated_mib",
    "memory_free_mib",
    "compute_allocated_percent",
    "slices",
    "sessions",
    "index",
    "pci_address",
    "numa_node",
    "cpu_affinity",
    "host",
)


def gpu_entry(message: Any) -> dict[str, Any]:
    """A card as JSON shows it."""
    return fields(message, *GPU_FIELDS)


@click.group()
def group() -> None:
    """The cards of this host."""


def health_cell(entry: dict[str, Any]) -> str:
    """Health, and whether the card is drained."""
    return entry["health"] + (", drained" if entry["drained"] else "")


@group.command("list")
@click.option("--all-hosts", is_flag=True, help="Those of the other hosts of the pool, too.")
@click.pass_obj
def list_(cli: Cli, all_hosts: bool) -> None:
    """Show all cards."""
    from gpupoold.api import gpupool_pb2 as pb

    reply = cli.call("ListGpus", pb.ListGpusRequest(all_hosts=all_hosts))
    for problem in reply.problems:
        click.echo(f"gpupoolctl: {problem}", err=True)
    cli.show(
        [gpu_entry(gpu) for gpu in reply.gpus],
        [
            *([("HOST", "host")] if all_hosts else []),
            ("#", "index"),
            ("UUID", "uuid"),
            ("NAME", "name"),
            ("CC", "compute_capability"),
            ("MODE", "mode"),
            ("MEMORY MIB", "memory_mib"),
            ("FREE MIB", "memory_free_mib"),
            ("COMPUTE USED", lambda entry: f"{entry['compute_allocated_percent']} %"),
            ("SLICES", "slices"),
            ("SESSIONS", "sessions"),
            ("HEALTH", health_cell),
        ],
        "this host has no GPU",
    )


@group.command()
@click.argument("gpu")
@click.pass_obj
def show(cli: Cli, gpu: str) -> None:
    """Show one card: its UUID, the beginning of it, or its index."""
    from gpupoold.api import gpupool_pb2 as pb

    cli.show_one(gpu_entry(cli.call("GetGpu", pb.GetGpuRequest(uuid=gpu))))


def _drain(cli: Cli, gpu: str, drained: bool) -> None:
    from gpupoold.api import gpupool_pb2 as pb

    reply = cli.call("SetGpuDrained", pb.SetGpuDrainedRequest(uuid=gpu, drained=drained))
    if cli.as_json:
        cli.print_json(gpu_entry(reply))
    elif drained:
        click.echo(f"{reply.uuid} takes no new slices; it has {reply.slices}")
    else:
        click.echo(f"{reply.uuid} takes slices again")


@group.command()
@click.argument("gpu")
@click.pass_obj
def drain(cli: Cli, gpu: str) -> None:
    """Take no new slices on a card; those it has go on."""
    _drain(cli, gpu, True)


@group.command()
@click.argument("gpu")
@click.pass_obj
def undrain(cli: Cli, gpu: str) -> None:
    """Take slices on a card again."""
    _drain(cli, gpu, False)
