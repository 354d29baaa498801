"""A read-only disk with this machine's Python and packages: what a tenant would install in a guest.

Links to files and copies of them: the tree is only there until the disk is made.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from packaging.requirements import Requirement

from tests.e2e.guest import run
from tests.e2e.host import PATIENCE, Machine
from tests.e2e.image import cache_directory
from tests.e2e.podman import GLIBC, libraries

MOUNT = "/disk"
#: what else is installed on this machine
FOREIGN = {"site-packages", "dist-packages"}
#: no program here needs them, and they are half of all
LEFT_OUT = {"tests", "test", "bin", "include", "idlelib", "lib2to3", "ensurepip"}


def closure(names: Iterable[str]) -> dict[str, importlib.metadata.Distribution]:
    """The installed distributions of these names, and those that they need."""
    found: dict[str, importlib.metadata.Distribution] = {}
    todo = list(names)
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found[name] = importlib.metadata.distribution(name)
        for text in found[name].requires or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.append(requirement.name)
    return found


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    source = source.resolve()
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)  # with its time, which a .pyc file names


def make_disk(distributions: Sequence[str]) -> Path:
    """The disk: Python and the distributions; made once for each set of their versions."""
    found = closure(distributions)
    versions = sorted((name, each.version) for name, each in found.items())
    recipe = repr((sys.version, versions, Path(__file__).read_text()))
    disk = cache_directory() / f"python-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}.img"
    if disk.exists():
        return disk
    for old in cache_directory().glob("python-*.img"):
        old.unlink()  # large; a machine that still has it open keeps it
    with tempfile.TemporaryDirectory(prefix="python-", dir=cache_directory()) as work:
        _fill(Path(work) / "tree", found.values())
        _make_ext4(Path(work) / "tree", Path(work) / "disk.img")
        (Path(work) / "disk.img").rename(disk)
    return disk


def _fill(tree: Path, distributions: Iterable[importlib.metadata.Distribution]) -> None:
    standard = Path(sysconfig.get_path("stdlib"))
    place = tree / "lib" / standard.name
    for path in standard.rglob("*"):
        inside = path.relative_to(standard)
        if path.is_file() and not LEFT_OUT & {*inside.parts} and inside.parts[0] not in FOREIGN:
            _copy(path, place / inside)
    for distribution in distributions:
        for file in distribution.files or []:
            source = Path(str(distribution.locate_file(file)))
            if not LEFT_OUT & {*file.parts} and ".." not in file.parts and source.is_file():
                _copy(source, place / "site-packages" / file)
    # Where Debian's Python looks, which is not of a virtual environment there.
    debian = tree / "local" / "lib" / standard.name / "dist-packages"
    debian.parent.mkdir(parents=True)
    debian.symlink_to(f"{MOUNT}/lib/{standard.name}/site-packages")
    python = Path(sys.executable).resolve()
    _copy(python, tree / "bin" / "python3")
    for library in map(Path, libraries([python, *tree.rglob("*.so"), *tree.rglob("*.so.*")])):
        # Of the C library the guest has its own.
        if tree not in library.parents and library.name not in (*GLIBC, "ld-linux-x86-64.so.2"):
            _copy(library, tree / "more" / library.name)


def _make_ext4(tree: Path, disk: Path) -> None:
    kib = sum(path.lstat().st_size // 1024 + 5 for path in tree.rglob("*"))
    size = str(kib + kib // 8 + 4096)
    options = ("-q", "-F", "-t", "ext4", "-O", "^has_journal", "-m", "0")
    subprocess.run(["mke2fs", *options, "-d", str(tree), str(disk), size], check=True)
    disk.chmod(0o644)


def python_command(*words: str) -> str:
    """The command line of Python in the guest, which has the disk."""
    mount = f"[ -d {MOUNT} ] || {{ mkdir {MOUNT} && mount -o ro /dev/vda {MOUNT}; }}"
    settings = f"PYTHONHOME={MOUNT} LD_LIBRARY_PATH={MOUNT}/more PYTHONDONTWRITEBYTECODE=1"
    return f"{mount}; {settings} HOME=/tmp {MOUNT}/bin/python3 {' '.join(words)}"


def python(machine: Machine, *words: str) -> tuple[int, str]:
    """Runs it to its end: exit status, output."""
    return run(machine, python_command(*words), 3 * PATIENCE)
