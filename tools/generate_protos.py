#!/usr/bin/env python3
"""Makes the protobuf modules of gpupoold from the .proto files (used by setup.py and by hand).

Usage: python tools/generate_protos.py [TARGET]

TARGET is the directory that holds the package `gpupoold` (default: the repository's root). The
modules import each other inside the package, so that nothing has to be on sys.path but the package.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# (source, package directory, with gRPC stubs)
SOURCES = [
    ("gpupoold/api/gpupool.proto", "gpupoold/api", True),
    ("gpupoold/hosts/peer.proto", "gpupoold/hosts", True),
    ("native/broker/broker.proto", "gpupoold/leases", False),
]


def generate(target: Path = ROOT) -> list[Path]:
    """Writes all modules below `target` and returns their paths; raises RuntimeError on failure."""
    import grpc_tools
    from grpc_tools import protoc

    well_known = Path(grpc_tools.__file__).parent / "_proto"
    folders = {(ROOT / source).parent: None for source, _, _ in SOURCES}
    homes = {Path(source).stem: package.replace("/", ".") for source, package, _ in SOURCES}
    written: list[Path] = []
    for source, package, with_grpc in SOURCES:
        proto = ROOT / source
        if not proto.exists():
            raise RuntimeError(f"{proto} is missing")
        out = target / package
        out.mkdir(parents=True, exist_ok=True)
        arguments = [
            "protoc",
            *(f"-I{folder}" for folder in folders),
            f"-I{well_known}",
            f"--python_out={out}",
            f"--pyi_out={out}",
        ]
        if with_grpc:
            arguments.append(f"--grpc_python_out={out}")
        if protoc.main([*arguments, str(proto)]) != 0:
            raise RuntimeError(f"protoc failed on {proto}")
        names = ["_pb2.py", "_pb2.pyi", *(["_pb2_grpc.py"] if with_grpc else [])]
        for path in (out / f"{proto.stem}{name}" for name in names):
            text = path.read_text()
            for stem, home in homes.items():
                text = re.sub(
                    rf"^import {stem}_pb2 as", f"from {home} import {stem}_pb2 as", text, flags=re.M
                )
            path.write_text(text)
            written.append(path)
    return written


if __name__ == "__main__":
    for path in generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT):
        print(path)
