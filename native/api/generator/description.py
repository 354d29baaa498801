"""The description of the CUDA driver API (types.yaml, functions/*.yaml, operations.lock).

Loading checks it: names are unique, references resolve, and operation numbers are append-only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

CLASSES = ("local", "async", "sync", "hand_written", "unsupported")
DIRECTIONS = ("in", "out", "inout")
PER_THREAD = ("none", "ptds", "ptsz")

# What a code generator can rely on: how a parameter of this kind is written on the wire or used.
KINDS = frozenset(
    [
        "scalar",
        "size",
        "flags",
        "enum",
        "string",
        "struct",
        "hostptr",
        "pointer",
        "opaque",
        "callback",
        "image",
        "kernel_params",
        "launch_extra",
        "device",
        "devptr",
        "devptr32",
        "context",
        "module",
        "function",
        "kernel",
        "library",
        "stream",
        "event",
        "array",
        "mipmapped_array",
        "texture",
        "surface",
        "texture_reference",
        "surface_reference",
        "link",
        "graph",
        "graph_node",
        "graph_exec",
        "graph_condition",
        "graph_device_node",
        "pool",
        "user_object",
        "allocation",
        "graphics_resource",
        "green_context",
        "external_memory",
        "external_semaphore",
    ]
)
FUNCTION_KEYS = frozenset(
    [
        "name",
        "base",
        "since",
        "per_thread",
        "header_name",
        "same_as",
        "class",
        "op",
        "why",
        "creates",
        "destroys",
        "charges",
        "capture",
        "params",
    ]
)
PARAMETER_KEYS = frozenset(
    ["name", "type", "dir", "kind", "bytes", "count", "access", "align", "allowed"]
)

# YAML readers differ in how they take these words; a loader without them keeps every word a string.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class DescriptionError(ValueError):
    """The description contradicts itself; the message names the file and the entry."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a function. `bytes` and `count` are C expressions over the others,
    `align` and `allowed` constants."""

    name: str
    type: str
    dir: str
    kind: str
    bytes: str | None = None
    count: str | None = None
    access: str | None = None
    align: str | None = None  # a value that is no multiple of it is invalid
    allowed: str | None = None  # flags beyond these are invalid

    @property
    def declaration(self) -> str:
        """The parameter as C writes it."""
        return f"{self.type}{'' if self.type.endswith('*') else ' '}{self.name}"

    @property
    def base_type(self) -> str:
        """The type that is pointed to, without const; the type itself if it is no pointer."""
        return re.sub(r"\bconst\b|\*", "", self.type).strip()

    @property
    def is_pointer(self) -> bool:
        """Whether the caller passes an address (a handle or a device address is a value)."""
        return "*" in self.type


@dataclass(frozen=True)
class Function:
    """One exported function (its per-thread twin, if it has one, is not a function of its own)."""

    name: str
    base: str
    since: int
    per_thread: str
    cls: str
    area: str
    params: tuple[Parameter, ...]
    header_name: str | None = None
    same_as: str | None = None
    op: int | None = None
    why: str | None = None
    creates: str | None = None
    destroys: str | None = None
    charges: str | None = None
    capture: str | None = None

    @property
    def declaration_params(self) -> str:
        """Parameter list for a declaration."""
        return ", ".join(p.declaration for p in self.params) or "void"

    @property
    def types(self) -> str:
        """Parameter types for a function pointer type."""
        return ", ".join(p.type for p in self.params) or "void"

    @property
    def arguments(self) -> str:
        """Parameter names, for passing them on."""
        return ", ".join(p.name for p in self.params)

    @property
    def twin(self) -> str | None:
        """Name of the per-thread-default-stream twin."""
        return None if self.per_thread == "none" else f"{self.name}_{self.per_thread}"

    @property
    def op_name(self) -> str:
        """The operation's constant: cuMemAlloc_v2 is kMemAllocV2."""
        return operation_constant(self.name)


@dataclass(frozen=True)
class Operation:
    """An operation of the wire that no single CUDA function stands for."""

    name: str
    op: int
    description: str

    @property
    def op_name(self) -> str:
        """The operation's constant."""
        return operation_constant(self.name)


@dataclass
class Description:
    """The whole description, in the order of the files."""

    types: dict[str, Any]
    functions: list[Function] = field(default_factory=list)
    internal: list[Operation] = field(default_factory=list)

    def function(self, name: str) -> Function:
        """The function of that name; KeyError if there is none."""
        return self._by_name[name]

    def __post_init__(self) -> None:
        self._by_name: dict[str, Function] = {}

    @property
    def operations(self) -> list[Function | Operation]:
        """All that has an operation number, in the order of the numbers."""
        numbered: list[Function | Operation] = [f for f in self.functions if f.op is not None]
        numbered += self.internal
        return sorted(numbered, key=lambda entry: entry.op or 0)


def operation_constant(name: str) -> str:
    """The C++ constant of an operation: kMemAllocV2 for cuMemAlloc_v2, kUploadImage for it."""
    if name.startswith("cu") and name[2:3].isupper():
        name = name[2:]
    parts = name.split("_")
    return "k" + "".join(part[:1].upper() + part[1:] for part in parts)


def load(directory: Path) -> Description:
    """Reads and checks the description below `directory`.

    Raises DescriptionError with a sentence that names the entry.
    """
    types = yaml.load((directory / "types.yaml").read_text(), _LOADER)
    description = Description(types)
    for path in sorted((directory / "functions").glob("*.yaml")):
        entries = yaml.load(path.read_text(), _LOADER) or []
        for entry in entries:
            if "operation" in entry:
                description.internal.append(
                    Operation(entry["operation"], entry["op"], " ".join(entry["what"].split()))
                )
            else:
                description.functions.append(_function(entry, path.stem))
    _check(description)
    _check_lock(description, directory / "operations.lock")
    return description


def _function(entry: dict[str, Any], area: str) -> Function:
    where = f"functions/{area}.yaml: {entry.get('name', '?')}"
    unknown = set(entry) - FUNCTION_KEYS
    if unknown:
        raise DescriptionError(f"{where}: unknown key {', '.join(sorted(unknown))}")
    for key in ("name", "base", "since", "class", "params"):
        if key not in entry:
            raise DescriptionError(f"{where}: has no {key}")
    params = []
    for raw in entry["params"]:
        unknown = set(raw) - PARAMETER_KEYS
        if unknown:
            raise DescriptionError(f"{where}: {raw}: unknown key {', '.join(sorted(unknown))}")
        parameter = Parameter(**{key: str(value) for key, value in raw.items()})
        if parameter.dir not in DIRECTIONS or parameter.kind not in KINDS:
            raise DescriptionError(f"{where}: {parameter.name}: unknown direction or kind")
        params.append(parameter)
    function = Function(
        name=entry["name"],
        base=entry["base"],
        since=int(entry["since"]),
        per_thread=entry.get("per_thread", "none"),
        cls=entry["class"],
        area=area,
        params=tuple(params),
        **{
            key: entry.get(key)
            for key in (
                "header_name",
                "same_as",
                "op",
                "why",
                "creates",
                "destroys",
                "charges",
                "capture",
            )
        },
    )
    if function.cls not in CLASSES or function.per_thread not in PER_THREAD:
        raise DescriptionError(f"{where}: unknown class or per_thread")
    if (function.cls == "unsupported") != (function.why is not None):
        raise DescriptionError(
            f"{where}: `why` belongs to unsupported functions, and to all of them"
        )
    if function.op is not None and function.cls in ("unsupported", "local"):
        raise DescriptionError(f"{where}: a {function.cls} function has no operation number")
    return function


def _check(description: Description) -> None:
    by_name = description._by_name
    versions: dict[tuple[str, int], str] = {}
    for function in description.functions:
        if function.name in by_name:
            raise DescriptionError(f"{function.name} is described twice")
        by_name[function.name] = function
        other = versions.setdefault((function.base, function.since), function.name)
        if other != function.name:
            raise DescriptionError(f"{function.name} and {other} have the same base and version")
    for function in description.functions:
        if function.same_as is not None:
            target = by_name.get(function.same_as)
            if target is None or target.same_as is not None or target.types != function.types:
                raise DescriptionError(f"{function.name}: same_as {function.same_as} doesn't fit")
            if function.cls != target.cls:
                raise DescriptionError(f"{function.name}: its class differs from {target.name}'s")


def _check_lock(description: Description, path: Path) -> None:
    locked: dict[int, str] = {}
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            number_text, name = line.split()
            if int(number_text) in locked:
                raise DescriptionError(f"operations.lock: number {number_text} is there twice")
            locked[int(number_text)] = name
    used = {entry.op or 0: entry.name for entry in description.operations}
    if len(used) != len(description.operations):
        raise DescriptionError("two operations have the same number")
    for number, name in used.items():
        if not 0 < number < 0x8000:
            raise DescriptionError(f"{name}: operation number {number} is out of range")
        if locked.get(number) != name:
            raise DescriptionError(
                f"{name} has operation number {number}, which operations.lock gives to"
                f" {locked.get(number, 'nobody')}; a new operation gets a new line there"
            )
