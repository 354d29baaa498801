"""gpupoolctl api: the coverage that the generator writes."""

from __future__ import annotations

from typing import Any

import click

from gpupoold import coverage, errors
from gpupoold.cli.context import Cli, CommandError, table


def load() -> dict[str, Any]:
    """The coverage file; raises CommandError if it is missing or damaged."""
    try:
        return coverage.load()
    except FileNotFoundError as error:
        raise CommandError(f"{error.filename} is missing: is gpupool fully installed?") from None
    except (OSError, ValueError) as error:
        raise CommandError(str(error)) from None


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
        raise CommandError("no function matches", errors.EXIT_NOT_FOUND)
    if not summary:
        table(
            ["FUNCTION", "AREA", "CLASS", "SIMULATED", "NOTE"],
            [
                [
                    str(entry.get("name")),
                    str(entry.get("area", "")),
                    str(entry.get("class")),
                    "yes" if entry.get("simulated") else "no",
                    _note(entry),
                ]
                for entry in functions
            ],
        )
    total = sum(counts.values())
    click.echo(
        f"{total} functions: "
        + ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    )


def _note(entry: dict[str, Any]) -> str:
    same = f"same as {entry['same_as']}" if entry.get("same_as") else ""
    return "; ".join(part for part in (same, str(entry.get("why") or "")) if part)
