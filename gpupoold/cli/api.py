"""gpupoolctl api: the coverage that the generator writes."""

from __future__ import annotations

import json
from typing import Any

import click

from gpupoold import paths
from gpupoold.cli.context import Cli, CommandError, table


def load() -> dict[str, Any]:
    """The coverage file; raises CommandError if it is missing or damaged."""
    path = paths.coverage_file()
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise CommandError(f"{path} is missing: is gpupool fully installed?") from None
    except (OSError, ValueError) as error:
        raise CommandError(f"{path} cannot be read: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("functions"), list):
        raise CommandError(f"{path} is not a coverage file")
    return data


@click.command()
@click.option("--class", "wanted", metavar="CLASS", help="Only functions of one class.")
@click.option("--search", metavar="TEXT", default="", help="Only names that hold the text.")
@click.option("--summary", is_flag=True, help="Only the numbers.")
@click.pass_obj
def api(cli: Cli, wanted: str | None, search: str, summary: bool) -> None:
    """Show which functions of the CUDA driver API are served, and how.

    It is part of the installation, so no daemon is asked.
    """
    data = load()
    functions = [
        entry
        for entry in data["functions"]
        if (wanted is None or entry.get("class") == wanted)
        and search.lower() in str(entry.get("name", "")).lower()
    ]
    counts: dict[str, int] = {}
    for entry in functions:
        counts[str(entry.get("class"))] = counts.get(str(entry.get("class")), 0) + 1
    if cli.as_json:
        shown = {key: value for key, value in data.items() if key != "functions"}
        shown["counts"] = counts
        if not summary:
            shown["functions"] = functions
        cli.print_json(shown)
        return
    if not functions:
        raise CommandError("no function matches", 3)
    if not summary:
        table(
            ["FUNCTION", "CLASS", "NOTE"],
            [[str(e.get("name")), str(e.get("class")), _note(e)] for e in functions],
        )
    total = sum(counts.values())
    click.echo(
        f"{total} functions: "
        + ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    )


def _note(entry: dict[str, Any]) -> str:
    return str(entry.get("why") or entry.get("note") or "")
