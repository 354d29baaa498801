"""gpupoolctl guest."""

from __future__ import annotations

from typing import Any

import click

from gpupoold.cli.context import Cli, fields, moment

GUEST_FIELDS = (
    "domain",
    "uuid",
    "slice",
    "lease",
    "ended",
    "devices",
    "channel",
    "region",
    "epoch",
    "sessions",
    "problem",
    "created_at",
    "nova_name",
    "nova_project",
)


def guest_entry(message: Any) -> dict[str, Any]:
    """A virtual machine as JSON shows it."""
    return fields(message, *GUEST_FIELDS)


@click.group()
def group() -> None:
    """Virtual machines that have slices."""


@group.command("list")
@click.pass_obj
def list_(cli: Cli) -> None:
    """Show the virtual machines with your slices (root: all)."""
    from gpupoold.api import gpupool_pb2 as pb

    reply = cli.call("ListGuests", pb.ListGuestsRequest())
    if reply.problem:
        click.echo(f"gpupoolctl: {reply.problem}; this is what was last known", err=True)
    cli.show(
        [guest_entry(entry) for entry in reply.guests],
        [
            ("DOMAIN", "domain"),
            ("SLICE", "slice"),
            ("STATE", lambda entry: "ending" if entry["ended"] else "leased"),
            ("DEVICES", "devices"),
            ("BOOTS", "epoch"),
            ("SESSIONS", "sessions"),
            ("SINCE", lambda entry: moment(entry["created_at"])),
            ("PROBLEM", "problem"),
        ],
        "no virtual machine has a slice",
    )


@group.command()
@click.argument("domain")
@click.option("--slice", "slice_name", metavar="NAME", required=True, help="A slice made by hand.")
@click.pass_obj
def attach(cli: Cli, domain: str, slice_name: str) -> None:
    """Give a slice to a running virtual machine, until it stops or the slice is detached.

    DOMAIN is libvirt's name or UUID of the machine. For root alone.
    """
    from gpupoold.api import gpupool_pb2 as pb

    guest = cli.call("AttachGuest", pb.AttachGuestRequest(domain=domain, slice=slice_name))
    cli.show_one(guest_entry(guest))


@group.command()
@click.argument("domain")
@click.option("--force", is_flag=True, help="Also from programs that run on it.")
@click.pass_obj
def detach(cli: Cli, domain: str, force: bool) -> None:
    """Take its slice from a running virtual machine.

    One that asks for a slice in its definition gets one again when it is started the next time. For
    root alone.
    """
    from gpupoold.api import gpupool_pb2 as pb

    guest = cli.call("DetachGuest", pb.DetachGuestRequest(domain=domain, force=force))
    if cli.as_json:
        cli.print_json(guest_entry(guest))
    elif guest.problem:
        click.echo(f"slice {guest.slice} is free again; {guest.domain}: {guest.problem}")
    else:
        click.echo(f"slice {guest.slice} is free again")
