"""gpupoolctl session."""

from __future__ import annotations

from typing import Any

import click

from gpupoold.cli.context import Cli, fields, moment

SESSION_FIELDS = (
    "id",
    "lease",
    "slice",
    "pid",
    "program",
    "carrier",
    "started_at",
    "memory_used_mib",
    "worker_pids",
)


def session_entry(message: Any) -> dict[str, Any]:
    """A session as JSON shows it."""
    entry = fields(message, *SESSION_FIELDS)
    entry["uid"] = message.uid if message.has_uid else None
    return entry


@click.group()
def group() -> None:
    """Running programs."""


@group.command("list")
@click.pass_obj
def list_(cli: Cli) -> None:
    """Show your sessions (root: all)."""
    from gpupoold.api import gpupool_pb2 as pb

    reply = cli.call("ListSessions", pb.ListSessionsRequest())
    cli.show(
        [session_entry(entry) for entry in reply.sessions],
        [
            ("ID", "id"),
            ("SLICE", "slice"),
            ("PID", "pid"),
            ("PROGRAM", "program"),
            ("CARRIER", "carrier"),
            ("MEMORY MIB", "memory_used_mib"),
            ("SINCE", lambda entry: moment(entry["started_at"])),
        ],
        "there are no sessions",
    )


@group.command()
@click.argument("session")
@click.pass_obj
def kill(cli: Cli, session: str) -> None:
    """End a session: its program gets a CUDA error at its next call."""
    from gpupoold.api import gpupool_pb2 as pb

    reply = cli.call("KillSession", pb.KillSessionRequest(id=session))
    if cli.as_json:
        cli.print_json(session_entry(reply))
    else:
        click.echo(f"session {reply.id} of process {reply.pid} was ended")
