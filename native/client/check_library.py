"""Checks what a client library needs and exports: it is loaded into every application.

Usage: check_library.py LIBRARY. Exit status 1, and a line for each finding, if the library needs a
symbol newer than glibc 2.28, another library than libc's, or exports a name that isn't its API's.
Reads the ELF file itself: no binutils are needed.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

ALLOWED_LIBRARIES = {
    "libc.so.6", "ld-linux-x86-64.so.2", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libm.so.6",
}  # fmt: skip
NEWEST_GLIBC = (2, 28)
#: file name -> prefix of its names, some of them
EXPORTS = {
    "libcuda.so.1": ("cu", {"cuInit", "cuGetProcAddress_v2"}),
    "libnvidia-ml.so.1": ("nvml", {"nvmlInit_v2", "nvmlErrorString"}),
}
DT_NEEDED, DT_STRTAB, DT_VERNEED, DT_VERNEEDNUM = 1, 5, 0x6FFFFFFE, 0x6FFFFFFF


class Elf:
    """The dynamic section and symbols of a 64-bit little-endian ELF file."""

    def __init__(self, data: bytes) -> None:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError("not a 64-bit little-endian ELF file")
        self.data = data
        offset, entry, count = struct.unpack_from("<Q10xHH", data, 0x28)
        self.sections = [
            struct.unpack_from("<IIQQQQIIQQ", data, offset + i * entry) for i in range(count)
        ]

    def text(self, table: int, offset: int) -> str:
        """The string at an offset of the string section with that index."""
        start = self.sections[table][4] + offset
        return self.data[start : self.data.index(b"\0", start)].decode()

    def needed(self) -> list[str]:
        """Names of the libraries that it needs."""
        found = []
        for section in self.sections:
            if section[1] != 6:  # SHT_DYNAMIC
                continue
            for at in range(section[4], section[4] + section[5], 16):
                tag, value = struct.unpack_from("<QQ", self.data, at)
                if tag == DT_NEEDED:
                    found.append(self.text(section[6], value))
        return found

    def versions(self) -> list[str]:
        """Symbol versions that it needs, like GLIBC_2.14."""
        found = []
        for section in self.sections:
            if section[1] != 0x6FFFFFFE:  # SHT_GNU_verneed
                continue
            at = section[4]
            while True:
                _, count, _, first, following = struct.unpack_from("<HHIII", self.data, at)
                inner = at + first
                for _ in range(count):
                    _, _, _, name, skip = struct.unpack_from("<IHHII", self.data, inner)
                    found.append(self.text(section[6], name))
                    inner += skip
                if following == 0:
                    break
                at += following
        return found

    def exported(self) -> list[str]:
        """Names of the dynamic symbols that it defines."""
        found = []
        for section in self.sections:
            if section[1] != 11:  # SHT_DYNSYM
                continue
            for at in range(section[4] + 24, section[4] + section[5], 24):
                name, _, _, where = struct.unpack_from("<IBBH", self.data, at)
                if where not in (0, 0xFFF1):  # undefined; absolute symbols are version names
                    found.append(self.text(section[6], name))
        return found


def findings(elf: Elf, file_name: str) -> list[str]:
    """What is wrong with the library, as sentences."""
    found = [f"it needs {name}" for name in elf.needed() if name not in ALLOWED_LIBRARIES]
    for version in elf.versions():
        kind, _, number = version.partition("_")
        if kind != "GLIBC" or tuple(int(part) for part in number.split(".")) > NEWEST_GLIBC:
            found.append(f"it needs the symbol version {version}")
    names = elf.exported()
    prefix, some = EXPORTS[file_name]
    found += [f"it exports {name}" for name in names if not name.startswith(prefix)]
    if not some <= set(names):
        found.append("it doesn't export its API")
    return found


def main() -> int:
    """Prints what is wrong; returns the exit status."""
    path = Path(sys.argv[1])
    found = findings(Elf(path.read_bytes()), path.name)
    for sentence in found:
        print(f"{path}: {sentence}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
