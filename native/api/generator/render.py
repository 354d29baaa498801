"""Renders the templates with the description.

A template's first line says what it makes: `{#- output: api/cuda_abi.h -#}`, a path below the
output directory. A file is only written if it changes, so that a build stays incremental.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jinja2

from . import plain
from .description import Description

_OUTPUT = re.compile(r"\{#-?\s*output:\s*(\S+?)\s*-?#\}")


def outputs(templates: Path) -> dict[str, Path]:
    """Output path (relative) of every template. ValueError: a template names none."""
    found: dict[str, Path] = {}
    for template in sorted(templates.glob("*.j2")):
        if template.name.startswith("_"):  # macros for others
            continue
        with template.open() as stream:
            match = _OUTPUT.match(stream.readline())
        if match is None:
            raise ValueError(f"{template}: the first line doesn't say `output: PATH`")
        found[match.group(1)] = template
    return found


def render(description: Description, templates: Path, output: Path) -> list[Path]:
    """Renders every template below `output`; returns the paths of all files."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["c_string"] = _c_string
    environment.filters["field"] = _field
    environment.filters["field_name"] = _field_name
    context: dict[str, Any] = {
        "api": description,
        "types": description.types,
        "functions": description.functions,
        "operations": description.operations,
        "header_names": {f.header_name for f in description.functions if f.header_name},
        "twins": [f for f in description.functions if f.twin],
        "plain_functions": plain.select(description),
        "driver_functions": plain.driver_functions(description),
    }
    written = []
    for relative, template in outputs(templates).items():
        text = environment.get_template(template.name).render(context)
        path = output / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        written.append(path)
    return written


def _c_string(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _field_name(declaration: str) -> str:
    """The name in "type name[…]"; empty for a nested structure without a name."""
    match = re.search(r"(\w+)\s*(\[[^\]]*\])*$", declaration)
    return match.group(1) if match else ""


def _field(entry: str | dict[str, Any], indent: int = 2) -> str:
    """A field of a structure as C writes it."""
    pad = " " * indent
    if isinstance(entry, str):
        return f"{pad}{entry};"
    keyword = "struct" if "struct" in entry else "union"
    lines = [f"{pad}{keyword}{' ' + entry['tag'] if 'tag' in entry else ''} {{"]
    lines += [_field(inner, indent + 2) for inner in entry[keyword]]
    lines.append(f"{pad}}}{' ' + entry['name'] if 'name' in entry else ''};")
    return "\n".join(lines)
