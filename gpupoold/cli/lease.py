"""gpupoolctl lease."""

from __future__ import annotations

from typing import Any

import click

from gpupoold.cli.context import Cli, fields, moment

LEASE_FIELDS = (
    "id",
    "kind",
    "owner_uid",
    "owner",
    "slices",
    "sessions",
    "pid",
    "created_at",
    "domain",
    "peer",
    "consumer",
)


def lease_entry(message: Any) -> dict[str, Any]:
    """A lease as JSON shows it."""
    return fields(message, *LEASE_FIELDS)


@click.group()
def group() -> None:
    """Who holds which slices."""


@group.command("list")
@click.pass_obj
def list_(cli: Cli) -> None:
    """Show your leases (root: all)."""
    from gpupoold.api import gpupool_pb2 as pb

    reply = cli.call("ListLeases", pb.ListLeasesRequest())
    cli.show(
        [lease_entry(entry) for entry in reply.leases],
        [
            ("ID", "id"),
            ("KIND", "kind"),
            ("OWNER", "owner"),
            ("SLICES", "slices"),
            ("SESSIONS", "sessions"),
            ("PID", lambda entry: str(entry["pid"] or "-")),
            ("DOMAIN", "domain"),
            ("HOST", "peer"),
            ("SINCE", lambda entry: moment(entry["created_at"])),
        ],
        "there are no leases",
    )


@group.command()
@click.argument("lease")
@click.pass_obj
def show(cli: Cli, lease: str) -> None:
    """Show one lease, by its id or the beginning of it."""
    from gpupoold.api import gpupool_pb2 as pb

    cli.show_one(lease_entry(cli.call("GetLease", pb.GetLeaseRequest(id=lease))))
