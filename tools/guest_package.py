"""Makes the package of virtual machines: gpupool-guest_VERSION_amd64.deb, and the same as a tar.

It holds the client's libraries, the helper with its service, and what they need. Nothing of it
needs Python, and all of it runs on any x86-64 machine with glibc 2.28. Without dpkg: unpack the tar
in / and run /usr/lib/gpupool/setup.sh.
"""

from __future__ import annotations

import argparse
import configparser
import gzip
import hashlib
import importlib.util
import io
import os
import struct
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = "usr/lib/gpupool"
#: of every file: the same input makes the same package
EPOCH = int(os.environ.get("SOURCE_DATE_EPOCH", "1764547200"))
EM_X86_64 = 62

CONTROL = """\
Package: gpupool-guest
Version: {version}
Architecture: amd64
Maintainer: gpupool
Section: misc
Priority: optional
Depends: libc6 (>= 2.28), passwd
Installed-Size: {kib}
Description: GPU slices for this virtual machine
 The CUDA driver library of gpupool's tenants, and the helper that carries it to
 the host. Programs run unmodified; users in the group gpupool may use the GPU.
 "gpupool-guest status" says whether there is one, or why not.
"""

POSTINST = """\
#!/bin/sh
set -e
[ "$1" != configure ] || /usr/lib/gpupool/setup.sh
"""

PRERM = """\
#!/bin/sh
set -e
if [ "$1" = remove ] && [ -d /run/systemd/system ]; then
  systemctl disable --now --quiet gpupool-guest.service || true
fi
"""

POSTRM = """\
#!/bin/sh
set -e
ldconfig
if [ -d /run/systemd/system ]; then
  systemctl daemon-reload || true
fi
"""

COPYRIGHT = """\
gpupool-guest is licensed under the Apache License, Version 2.0. It contains libsodium (ISC), zstd
(BSD-3-Clause), LZ4 (BSD-2-Clause), nlohmann/json (MIT) and LLVM's libc++ (Apache-2.0 with LLVM
exceptions).

"""


class PackageError(Exception):
    """The package cannot be made; the message says why."""


@dataclass(frozen=True)
class Entry:
    """One file, or one symbolic link where `target` is set. `path` is relative to /."""

    path: str
    data: bytes = b""
    mode: int = 0o644
    target: str = ""


def version() -> str:
    """That of the source."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return setup["metadata"]["version"]


def _checker() -> Any:
    path = ROOT / "native" / "client" / "check_library.py"
    spec = importlib.util.spec_from_file_location("check_library", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def check_binary(path: Path) -> list[str]:
    """Why the file would not run on any x86-64 machine with glibc 2.28."""
    checker = _checker()
    data = path.read_bytes()
    elf = checker.Elf(data)
    found = []
    if struct.unpack_from("<H", data, 18)[0] != EM_X86_64:
        found.append("it is not for x86-64")
    found += [f"it needs {name}" for name in elf.needed() if name not in checker.ALLOWED_LIBRARIES]
    for name in elf.versions():
        kind, _, number = name.partition("_")
        newest = checker.NEWEST_GLIBC
        if kind != "GLIBC" or tuple(int(part) for part in number.split(".")) > newest:
            found.append(f"it needs the symbol version {name}")
    return found


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PackageError(f"{path}: {error.strerror}: build the native parts first") from None


def entries(native: Path, any_glibc: bool) -> list[Entry]:
    """What is in the package. Raises PackageError."""
    libraries = ["libcuda.so.1"]
    if (native / "client" / "libnvidia-ml.so.1").exists():
        libraries.append("libnvidia-ml.so.1")
    binaries = [native / "guest" / "gpupool-guest", *(native / "client" / n for n in libraries)]
    for path in binaries:
        _read(path)
        problems = [] if any_glibc else check_binary(path)
        if problems:
            raise PackageError(
                f"{path}: {'; '.join(problems)} (--any-glibc: for this machine only)"
            )
    result = [Entry("usr/bin/gpupool-guest", _read(binaries[0]), 0o755)]
    for name in libraries:
        result.append(Entry(f"{LIBRARIES}/{name}", _read(native / "client" / name)))
        result.append(Entry(f"{LIBRARIES}/{name.removesuffix('.1')}", target=name))
    guest = ROOT / "etc" / "guest"
    unit, rules = "gpupool-guest.service", "60-gpupool-guest.rules"
    result += [
        Entry(f"{LIBRARIES}/setup.sh", _read(guest / "setup.sh"), 0o755),
        Entry(f"usr/lib/systemd/system/{unit}", _read(guest / unit)),
        Entry(f"usr/lib/udev/rules.d/{rules}", _read(guest / rules)),
        # First in the alphabet: also before a libcuda.so.1 that an image brings along.
        Entry("etc/ld.so.conf.d/00-gpupool.conf", f"/{LIBRARIES}\n".encode()),
        Entry(
            "usr/share/doc/gpupool-guest/copyright",
            COPYRIGHT.encode() + _read(ROOT / "LICENSE"),
        ),
    ]
    return sorted(result, key=lambda entry: entry.path)


def _directories(contents: list[Entry]) -> Iterator[str]:
    seen = {
        str(parent)
        for entry in contents
        for parent in Path(entry.path).parents
        if str(parent) != "."
    }
    yield from sorted(seen)


def make_tar(contents: list[Entry], prefix: str = "") -> bytes:
    """A compressed tar, everything root's."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.GNU_FORMAT) as tar:

        def add(name: str, kind: bytes, mode: int, data: bytes = b"", target: str = "") -> None:
            info = tarfile.TarInfo(prefix + name)
            info.type, info.mode, info.mtime = kind, mode, EPOCH
            info.uname = info.gname = "root"
            info.size, info.linkname = len(data), target
            tar.addfile(info, io.BytesIO(data))

        if prefix:
            add("", tarfile.DIRTYPE, 0o755)
        for directory in _directories(contents):
            add(directory, tarfile.DIRTYPE, 0o755)
        for entry in contents:
            if entry.target:
                add(entry.path, tarfile.SYMTYPE, 0o777, target=entry.target)
            else:
                add(entry.path, tarfile.REGTYPE, entry.mode, entry.data)
    return gzip.compress(raw.getvalue(), mtime=EPOCH)


def make_deb(contents: list[Entry]) -> bytes:
    """The Debian package: an ar archive of three members, deb(5)."""
    files = [entry for entry in contents if not entry.target]
    sums = "".join(
        f"{hashlib.md5(entry.data, usedforsecurity=False).hexdigest()}  {entry.path}\n"
        for entry in files
    )
    kib = sum(len(entry.data) + 1023 for entry in files) // 1024
    conffiles = "".join(f"/{e.path}\n" for e in files if e.path.startswith("etc/"))
    control = [
        Entry("conffiles", conffiles.encode()),
        Entry("control", CONTROL.format(version=version(), kib=kib).encode()),
        Entry("md5sums", sums.encode()),
        Entry("postinst", POSTINST.encode(), 0o755),
        Entry("postrm", POSTRM.encode(), 0o755),
        Entry("prerm", PRERM.encode(), 0o755),
    ]
    result = b"!<arch>\n"
    for name, data in (
        ("debian-binary", b"2.0\n"),
        ("control.tar.gz", make_tar(control, "./")),
        ("data.tar.gz", make_tar(contents, "./")),
    ):
        header = f"{name:<16}{EPOCH:<12}{0:<6}{0:<6}{0o100644:<8o}{len(data):<10}`\n"
        result += header.encode() + data + b"\n" * (len(data) % 2)
    return result


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--native",
        type=Path,
        default=Path(os.environ.get("GPUPOOL_NATIVE_DIR", ROOT / "build" / "native")),
        help="where the native parts were built or installed (default: build/native)",
    )
    parser.add_argument("--output", type=Path, default=Path("."), help="default: here")
    parser.add_argument(
        "--any-glibc", action="store_true", help="also what only runs on a machine like this one"
    )
    chosen = parser.parse_args(arguments)
    try:
        contents = entries(chosen.native, chosen.any_glibc)
    except (PackageError, ValueError) as error:
        print(f"guest_package: {error}", file=sys.stderr)
        return 1
    chosen.output.mkdir(parents=True, exist_ok=True)
    name = f"gpupool-guest_{version()}_amd64"
    for suffix, data in ((".deb", make_deb(contents)), (".tar.gz", make_tar(contents))):
        path = chosen.output / (name + suffix)
        path.write_bytes(data)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
