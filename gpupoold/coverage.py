"""What is covered of the CUDA driver API: the file that the native build writes, and its table."""

from __future__ import annotations

import json
from typing import Any

from gpupoold import paths

_CLASSES = {
    "local": "answered by the client library alone",
    "async": "sent to the worker, not answered",
    "sync": "sent to the worker and answered",
    "hand_written": "sent to the worker in a form of its own",
    "unsupported": "refused with CUDA_ERROR_NOT_SUPPORTED; cuGetProcAddress finds it only for the"
    " CUDA runtime, whose callers get cudaErrorNotSupported",
}


def load() -> dict[str, Any]:
    """The installed coverage file. Raises OSError or ValueError if it cannot be read."""
    data = json.loads(paths.coverage_file().read_text())
    if not isinstance(data, dict) or not isinstance(data.get("functions"), list):
        raise ValueError(f"{paths.coverage_file()} is not a coverage file")
    return data


def markdown(data: dict[str, Any]) -> str:
    """The page for the documentation: a summary, then a table of the functions by area."""
    functions = data["functions"]
    major, minor = data["cuda_version"] // 1000, data["cuda_version"] % 1000 // 10
    lines = [
        "# Coverage of the CUDA driver API",
        "",
        f"Generated from the API's description (CUDA {major}.{minor}) and the built libraries by"
        " `tools/generate_docs.py`. Every public name is exported.",
        "",
        "| class | functions | meaning |",
        "|---|---:|---|",
    ]
    for name, meaning in _CLASSES.items():
        count = sum(entry["class"] == name for entry in functions)
        lines.append(f"| {name.replace('_', '-')} | {count} | {meaning} |")
    areas: dict[str, list[dict[str, Any]]] = {}
    for entry in functions:
        areas.setdefault(entry["area"], []).append(entry)
    for area, entries in sorted(areas.items()):
        lines += [
            "",
            f"## {area.replace('_', ' ').capitalize()}",
            "",
            "| function | class | simulated GPU | note |",
            "|---|---|---|---|",
        ]
        for entry in entries:
            note = entry.get("why", "")
            if "same_as" in entry:
                note = f"the same as `{entry['same_as']}`" + (f". {note}" if note else "")
            simulated = "yes" if entry.get("simulated") else "no"
            lines.append(
                f"| `{entry['name']}` | {entry['class'].replace('_', '-')} | {simulated} | {note} |"
            )
    return "\n".join(lines) + "\n"
