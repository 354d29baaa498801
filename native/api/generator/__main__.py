"""Command line: `python -m generator --description DIR --output DIR [--list-outputs]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .description import DescriptionError, load
from .render import outputs, render


def main() -> int:
    """Generates everything. Exit status 1: the description is wrong (one sentence on stderr)."""
    parser = argparse.ArgumentParser(prog="generator", description=__doc__)
    parser.add_argument("--description", type=Path, required=True, help="native/api")
    parser.add_argument("--output", type=Path, help="directory for the generated files")
    parser.add_argument(
        "--list-outputs", action="store_true", help="only print the files that would be made"
    )
    arguments = parser.parse_args()
    templates = arguments.description / "templates"
    if arguments.list_outputs:
        print("\n".join(outputs(templates)))
        return 0
    if arguments.output is None:
        parser.error("--output is needed")
    try:
        render(load(arguments.description), templates, arguments.output)
    except DescriptionError as error:
        print(f"the CUDA API's description is wrong: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
