"""gpupoolctl slice."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import click

from gpupoold.cli.context import Cli, fields

SLICE_FIELDS = (
    "name",
    "uuid",
    "kind",
    "gpu_uuid",
    "compute_percent",
    "memory_mib",
    "mode",
    "priority",
    "enforced_by",
    "memory_used_mib",
    "sessions",
    "id",
    "pci_address",
    "owner_uid",
    "owner",
    "temporary",
    "created_at",
    "lease",
    "gpu_health",
    "host",
)


class Number(click.IntRange):
    """A whole number in plain digits: int() would also take "1_0" and digits of other scripts."""

    def convert(self, value: Any, parameter: Any, context: Any) -> int:
        """Fails with a usage error."""
        if isinstance(value, str) and not re.fullmatch(r"-?[0-9]{1,20}", value):
            self.fail(f"{value!r} is not a whole number.", parameter, context)
        return int(super().convert(value, parameter, context))


COMPUTE = Number(1, 100)
MEMORY = Number(1, 1 << 34)


def slice_entry(message: Any) -> dict[str, Any]:
    """A slice as JSON shows it."""
    return fields(message, *SLICE_FIELDS)


def size_options(required: bool) -> Callable[[Any], Any]:
    """--compute and --memory."""

    def add(command: Any) -> Any:
        command = click.option(
            "--memory",
            metavar="MIB",
            type=MEMORY,
            required=required,
            help="Memory in MiB, at least 1. Programs take it in granules of 2 MiB.",
        )(command)
        return click.option(
            "--compute",
            metavar="PCT",
            type=COMPUTE,
            required=required,
            help="Share of the GPU's compute in whole percent, 1-100. Recorded; not enforced yet.",
        )(command)

    return add


def share_options(command: Any) -> Any:
    """--mode and --priority."""
    command = click.option(
        "--priority",
        metavar="N",
        type=Number(0, 10),
        help="0 (least) to 10; 5 unless given.",
    )(command)
    return click.option(
        "--mode",
        type=click.Choice(["hard", "elastic"]),
        default="hard",
        show_default=True,
        help="hard: never more than its share. elastic: idle time is usable too.",
    )(command)


@click.group()
def group() -> None:
    """Parts of cards."""


@group.command()
@click.option("--name", required=True, help="1-63 of A-Z a-z 0-9 . _ - ; unique on the host.")
@click.option(
    "--kind",
    type=click.Choice(["shared", "mig", "whole"]),
    default="shared",
    show_default=True,
    help="mig and whole are not in this release.",
)
@click.option("--host", default="", metavar="NAME", help="Of the pool; this one unless given.")
@click.option("--gpu", default="", metavar="UUID", help="The card; else the daemon chooses.")
@size_options(required=True)
@click.option("--profile", default="", metavar="P", help="MIG profile, for --kind mig.")
@share_options
@click.pass_obj
def create(
    cli: Cli,
    name: str,
    kind: str,
    host: str,
    gpu: str,
    compute: int,
    memory: int,
    profile: str,
    mode: str,
    priority: int | None,
) -> None:
    """Make a slice; it belongs to you."""
    from gpupoold.api import gpupool_pb2 as pb

    reply = cli.call(
        "CreateSlice",
        pb.CreateSliceRequest(
            name=name,
            kind=kind,
            host=host,
            gpu=gpu,
            compute_percent=compute,
            memory_mib=memory,
            profile=profile,
            mode=mode,
            priority=priority or 0,
            has_priority=priority is not None,
        ),
    )
    if cli.as_json:
        cli.print_json(slice_entry(reply))
    else:
        click.echo(
            f"slice {reply.name}: {reply.compute_percent} % and {reply.memory_mib} MiB of "
            f"{reply.gpu_uuid} of host {reply.host}; programs see it as {reply.uuid}"
        )


@group.command("list")
@click.pass_obj
def list_(cli: Cli) -> None:
    """Show your slices (root: all)."""
    from gpupoold.api import gpupool_pb2 as pb

    reply = cli.call("ListSlices", pb.ListSlicesRequest())
    cli.show(
        [slice_entry(entry) for entry in reply.slices],
        [
            ("NAME", "name"),
            ("OWNER", "owner"),
            ("KIND", "kind"),
            ("COMPUTE", lambda entry: f"{entry['compute_percent']} %"),
            ("MODE", "mode"),
            ("ENFORCED BY", "enforced_by"),
            ("MEMORY MIB", "memory_mib"),
            ("USED MIB", "memory_used_mib"),
            ("SESSIONS", "sessions"),
            ("HOST", "host"),
            ("GPU", "gpu_uuid"),
        ],
        "there are no slices",
    )


@group.command()
@click.argument("name")
@click.pass_obj
def show(cli: Cli, name: str) -> None:
    """Show one slice, by name, id or UUID."""
    from gpupoold.api import gpupool_pb2 as pb

    cli.show_one(slice_entry(cli.call("GetSlice", pb.GetSliceRequest(name=name))))


@group.command()
@click.argument("name")
@size_options(required=False)
@click.pass_obj
def resize(cli: Cli, name: str, compute: int | None, memory: int | None) -> None:
    """Change a slice's size; programs that run go on.

    Memory shrinks at most to what is in use, and at once. A slice that grows is larger for programs
    that start afterwards.
    """
    from gpupoold.api import gpupool_pb2 as pb

    if compute is None and memory is None:
        raise click.UsageError("give --compute or --memory")
    reply = cli.call(
        "ResizeSlice",
        pb.ResizeSliceRequest(name=name, compute_percent=compute or 0, memory_mib=memory or 0),
    )
    if cli.as_json:
        cli.print_json(slice_entry(reply))
    else:
        click.echo(f"slice {reply.name}: {reply.compute_percent} % and {reply.memory_mib} MiB")


@group.command()
@click.argument("name")
@click.option("--force", is_flag=True, help="End the programs that run on it.")
@click.pass_obj
def delete(cli: Cli, name: str, force: bool) -> None:
    """Remove a slice."""
    from gpupoold.api import gpupool_pb2 as pb

    cli.call("DeleteSlice", pb.DeleteSliceRequest(name=name, force=force))
    if cli.as_json:
        cli.print_json({"deleted": name})
    else:
        click.echo(f"slice {name} is gone")
