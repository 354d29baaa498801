"""Command line: what each built library defines of the driver API, as JSON.

`python -m generator.coverage --description DIR --output FILE --nm NM client=PATH simulated=PATH …`

A library defines a function if its symbol has another address than the stub of the same name.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from .description import Description, load

_STUB = "gpupool_stub_"


def defined_functions(library: Path, nm: str) -> set[str]:
    """Names that the library defines itself.

    Raises RuntimeError if the library was stripped, so that stubs can't be told apart.
    """
    listing = subprocess.run(
        [nm, "--defined-only", str(library)], check=True, capture_output=True, text=True
    ).stdout
    addresses = {}
    for line in listing.splitlines():
        parts = line.split()
        if len(parts) == 3:
            addresses[parts[2]] = parts[0]
    stubs = {
        name.removeprefix(_STUB): at for name, at in addresses.items() if name.startswith(_STUB)
    }
    if not stubs:
        raise RuntimeError(f"{library} has no symbol table")
    return {name for name, at in stubs.items() if addresses.get(name, at) != at}


def coverage(description: Description, libraries: dict[str, Path], nm: str) -> dict[str, Any]:
    """The content of coverage.json; `client`, `simulated` … say whether that library defines it."""
    defined = {kind: defined_functions(path, nm) for kind, path in libraries.items()}
    functions = []
    for function in sorted(description.functions, key=lambda f: f.name):
        real = function.same_as or function.name
        entry: dict[str, Any] = {
            "name": function.name,
            "area": function.area,
            "since": function.since,
            "class": function.cls,
        }
        for key in ("op", "why", "same_as"):
            value = getattr(function, key)
            if value is not None:
                entry[key] = value
        if function.twin:
            entry["twin"] = function.twin
        for kind, names in defined.items():
            entry[kind] = real in names
        functions.append(entry)
    return {"cuda_version": description.types["version"], "functions": functions}


def contradictions(report: dict[str, Any]) -> list[str]:
    """Functions whose class says something else than the client library does."""
    return [
        f"{entry['name']}: class {entry['class']}, but the client library"
        f" {'defines' if entry['client'] else 'does not define'} it"
        for entry in report["functions"]
        if "client" in entry and entry["client"] == (entry["class"] == "unsupported")
    ]


def main() -> int:
    """Writes the report; status 1 if the description contradicts the client library."""
    parser = argparse.ArgumentParser(prog="generator.coverage", description=__doc__)
    parser.add_argument("--description", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--nm", default="nm")
    parser.add_argument("libraries", nargs="*", metavar="KIND=PATH")
    arguments = parser.parse_args()
    libraries = dict(item.split("=", 1) for item in arguments.libraries)
    report = coverage(
        load(arguments.description),
        {kind: Path(path) for kind, path in libraries.items()},
        arguments.nm,
    )
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    wrong = contradictions(report)
    for sentence in wrong:
        print(f"native/api/functions: {sentence}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
