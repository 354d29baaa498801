"""gpupoolctl events."""

from __future__ import annotations

import json
from typing import Any

import click

from gpupoold.cli.context import Cli, moment


def event_entry(message: Any) -> dict[str, Any]:
    """An event as JSON shows it."""
    return {
        "id": message.id,
        "time": message.time,
        "kind": message.kind,
        "subject": message.subject,
        "text": message.text,
        "data": json.loads(message.data_json or "{}"),
        "owner_uid": message.owner_uid if message.has_owner else None,
    }


@click.command()
@click.option("--follow", "-f", is_flag=True, help="Go on with each new event.")
@click.option(
    "--after",
    metavar="ID",
    type=click.IntRange(0, (1 << 63) - 1),
    default=0,
    help="Only later ones.",
)
@click.option(
    "--limit", "-n", metavar="N", type=click.IntRange(1, (1 << 31) - 1), help="The newest N stored."
)
@click.pass_obj
def events(cli: Cli, follow: bool, after: int, limit: int | None) -> None:
    """Show what happened to your slices and the cards (root: to all slices).

    With --json each event is one line.
    """
    from gpupoold.api import gpupool_pb2 as pb

    request = pb.WatchEventsRequest(after_id=after, follow=follow, limit=limit or 0)
    for message in cli.stream("WatchEvents", request):
        entry = event_entry(message)
        if cli.as_json:
            click.echo(json.dumps(entry))
        else:
            click.echo(
                f"{moment(entry['time'])}  {entry['kind']:<20}  {entry['subject'] or '-'}: "
                f"{entry['text']}"
            )
