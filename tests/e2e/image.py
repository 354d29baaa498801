"""A bootable system for virtual machines: a stock Debian kernel and an initramfs made here.

Nothing is installed: the kernel's package is downloaded by apt, once, and unpacked in a cache.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

#: what a guest loads, with what these depend on
MODULES = ("virtio_pci", "virtio_console", "virtio_blk", "pvpanic-mmio", "pvpanic-pci")
SHELL_PORT = "org.test.shell"

INIT = f"""#!/bin/sh
export PATH=/bin:/sbin:/usr/bin:/usr/sbin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
while read -r module; do insmod "/lib/modules/$module"; done < /etc/modules
echo 1 > /proc/sys/kernel/sysrq
if [ -x /etc/rc.local ]; then setsid /etc/rc.local </dev/null & fi
echo "the guest is up"
port=
until [ -c "$port" ]; do
  for name in /sys/class/virtio-ports/*/name; do
    if [ "$(cat "$name")" = {SHELL_PORT} ]; then port=/dev/$(basename "$(dirname "$name")"); fi
  done
  sleep 0.2
done
# Held open all the time: at a port's last close the kernel throws away what has arrived already.
exec 3<>"$port"
while true; do
  setsid sh <&3 >&3 2>&3
  sleep 0.1
done
"""


@dataclass(frozen=True)
class Kernel:
    """A kernel of Debian's: the package that depends on the newest one, and what it loads."""

    package: str
    modules: tuple[str, ...]

    @property
    def is_cloud(self) -> bool:
        return "-cloud-" in self.package


#: small, and with all that virtual machines need
CLOUD = Kernel("linux-image-cloud-amd64", (*MODULES, "vmw_vsock_virtio_transport"))


@dataclass(frozen=True)
class Image:
    """Two files that QEMU boots."""

    kernel: Path
    initrd: Path


def cache_directory() -> Path:
    """Kept between runs; every user may read it."""
    base = os.environ.get("GPUPOOL_E2E_CACHE") or "/var/tmp/gpupool-e2e"
    path = Path(base)
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o755)
    return path


def _output(*command: str, cwd: Path | None = None) -> str:
    return subprocess.run(
        command, cwd=cwd, check=True, capture_output=True, text=True, timeout=300
    ).stdout


def _download_kernel(kernel: Kernel) -> Path:
    """The unpacked package of the newest kernel that apt knows, named after it."""
    shown = _output("apt-cache", "depends", kernel.package)
    package = re.findall(r"Depends: (linux-image-\S+)", shown)[0]
    fresh = cache_directory() / f"new-{os.getpid()}-{package}"
    fresh.mkdir()
    fresh.chmod(0o755)
    try:
        _output("apt-get", "download", "-qq", package, cwd=fresh)
        (archive,) = fresh.glob("*.deb")
        _output("dpkg-deb", "-x", str(archive), str(fresh))
        archive.unlink()
        _output("depmod", "-b", str(fresh), package.removeprefix("linux-image-"))
        return fresh.rename(cache_directory() / package)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def make_image(kernel: Kernel = CLOUD) -> Image:
    """The image; downloads and builds what the cache lacks."""
    trees = sorted(
        tree
        for tree in cache_directory().glob("linux-image-*")
        if ("-cloud-" in tree.name) == kernel.is_cloud
    )
    if trees:
        tree = trees[-1]
    else:
        try:
            tree = _download_kernel(kernel)
        except (subprocess.CalledProcessError, IndexError):
            # apt's lists are older than the archive, or there are none.
            _output("apt-get", "update", "-qq")
            tree = _download_kernel(kernel)
    version = tree.name.removeprefix("linux-image-")
    recipe = hashlib.sha256(repr((INIT, kernel.modules)).encode()).hexdigest()[:12]
    initrd = cache_directory() / f"initrd-{version}-{recipe}.img"
    if not initrd.exists():
        _make_initrd(tree, version, kernel.modules, initrd)
    return Image(tree / "boot" / f"vmlinuz-{version}", initrd)


def _make_initrd(tree: Path, version: str, loaded: Sequence[str], target: Path) -> None:
    work = target.with_suffix(f".{os.getpid()}")
    for name in ("bin", "sbin", "proc", "sys", "dev", "etc", "lib/modules", "tmp", "run"):
        (work / name).mkdir(parents=True)
    shutil.copy("/bin/busybox", work / "bin" / "busybox")
    for name in _output("/bin/busybox", "--list").split():
        if name != "busybox":
            (work / "bin" / name).symlink_to("busybox")
    modules: list[str] = []
    for module in loaded:
        shown = _output("modprobe", "-d", str(tree), "-S", version, "--show-depends", module)
        for path in re.findall(r"^insmod (\S+)", shown, re.M):
            name = Path(path).name
            if name not in modules:
                shutil.copy(path, work / "lib" / "modules" / name)
                modules.append(name)
    (work / "etc" / "modules").write_text("\n".join(modules) + "\n")
    (work / "init").write_text(INIT)
    (work / "init").chmod(0o755)
    pack(work, target)
    shutil.rmtree(work)


def pack(tree: Path, target: Path) -> None:
    """Makes the tree's initramfs. Of several, one file after another, the later ones' files win."""
    fresh = target.with_suffix(".new")
    with fresh.open("wb") as stream:
        subprocess.run(
            "find . | cpio -o -H newc --quiet -R 0:0",
            shell=True,
            cwd=tree,
            stdout=stream,
            check=True,
        )
    fresh.chmod(0o644)
    fresh.rename(target)
