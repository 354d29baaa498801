"""The package of virtual machines holds what it should and nothing else, and works where it is
installed: in a root of its own over this machine's."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

from gpupoold import paths
from tests.functional.broker_host import MIB, make_lease
from tests.functional.guest_machine import Host, Machine
from tests.programs.catalog import RUNTIME_PROGRAMS
from tests.programs.toolchain import Compiler

SOURCE = Path(__file__).resolve().parents[2]
TOOL = SOURCE / "tools" / "guest_package.py"
FILES = {
    "etc/ld.so.conf.d/00-gpupool.conf": "-rw-r--r--",
    "usr/bin/gpupool-guest": "-rwxr-xr-x",
    "usr/lib/gpupool/libcuda.so": "lrwxrwxrwx",
    "usr/lib/gpupool/libcuda.so.1": "-rw-r--r--",
    "usr/lib/gpupool/setup.sh": "-rwxr-xr-x",
    "usr/lib/systemd/system/gpupool-guest.service": "-rw-r--r--",
    "usr/lib/udev/rules.d/60-gpupool-guest.rules": "-rw-r--r--",
    "usr/share/doc/gpupool-guest/copyright": "-rw-r--r--",
}
NVML = {
    "usr/lib/gpupool/libnvidia-ml.so": "lrwxrwxrwx",
    "usr/lib/gpupool/libnvidia-ml.so.1": "-rw-r--r--",
}
needs_dpkg = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="there is no dpkg")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the root directory")


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("guest_package", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def make(output: Path, native: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, TOOL, "--native", native, "--output", output, *more],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with both forms. A build for this machine only is packed as such."""
    native = paths.native_directory()
    output = tmp_path_factory.mktemp("package")
    portable = not tool().check_binary(native / "client" / "libcuda.so.1")
    done = make(output, native, *([] if portable else ["--any-glibc"]))
    assert done.returncode == 0, done.stderr
    return output


def wanted() -> dict[str, str]:
    nvml = (paths.native_directory() / "client" / "libnvidia-ml.so.1").exists()
    return {**FILES, **(NVML if nvml else {})}


@needs_dpkg
def test_the_deb_holds_what_it_should(package: Path, tmp_path: Path) -> None:
    [deb] = package.glob("*.deb")
    listing = subprocess.run(
        ["dpkg-deb", "--contents", deb], capture_output=True, text=True, check=True
    ).stdout
    found = {}
    for line in listing.splitlines():
        mode, owner, _, _, _, name = line.split(maxsplit=5)
        assert owner == "root/root"
        if mode.startswith("d"):
            assert mode == "drwxr-xr-x"
            continue
        found[name.partition(" -> ")[0].removeprefix("./")] = mode
    assert found == wanted()
    subprocess.run(["dpkg-deb", "--extract", deb, tmp_path], check=True)
    native = paths.native_directory()
    for inside, outside in (
        ("usr/bin/gpupool-guest", "guest/gpupool-guest"),
        ("usr/lib/gpupool/libcuda.so.1", "client/libcuda.so.1"),
    ):
        assert (tmp_path / inside).read_bytes() == (native / outside).read_bytes()
    assert (tmp_path / "usr/lib/gpupool/libcuda.so").readlink() == Path("libcuda.so.1")
    fields = subprocess.run(
        ["dpkg-deb", "--field", deb, "Package", "Architecture", "Depends"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert fields.splitlines() == [
        "Package: gpupool-guest",
        "Architecture: amd64",
        "Depends: libc6 (>= 2.28), passwd",
    ]


def test_the_tar_holds_the_same(package: Path) -> None:
    [path] = package.glob("*.tar.gz")
    with tarfile.open(path) as tar:
        members = tar.getmembers()
    assert {m.name for m in members if not m.isdir()} == set(wanted())
    assert {(m.uid, m.gid) for m in members} == {(0, 0)}


def test_the_same_input_makes_the_same_package(package: Path, tmp_path: Path) -> None:
    assert make(tmp_path, paths.native_directory(), "--any-glibc").returncode == 0
    for path in package.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_what_would_not_run_elsewhere_is_refused(tmp_path: Path) -> None:
    native = tmp_path / "native"
    (native / "guest").mkdir(parents=True)
    (native / "client").mkdir()
    shutil.copy(paths.native_directory() / "client" / "libcuda.so.1", native / "client")
    done = make(tmp_path / "out", native)
    assert done.returncode == 1
    assert "build the native parts first" in done.stderr
    # A program of this machine, which needs more than libc.
    shutil.copy(paths.native_directory() / "bin" / "gpupool-worker", native / "guest/gpupool-guest")
    done = make(tmp_path / "out", native)
    assert done.returncode == 1
    assert "it needs " in done.stderr
    assert not (tmp_path / "out").exists()


INSTALL = r"""
set -e
mount --make-rprivate /
mount -t tmpfs none "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
for place in proc sys dev tmp; do mount --rbind "/$place" "$1/root/$place"; done
exec chroot "$1/root" /bin/sh -e -c "$2" sh "$3" "$4" "$5"
"""

# $1: the package, $2: the port, $3: a program
INSIDE = r"""
dpkg --install "$1" >&2
getent group gpupool | cut -d: -f1
ldconfig -p | grep -m1 'libcuda.so.1 ' | sed 's/.* => //'
unset LD_LIBRARY_PATH GPUPOOL_LEASE_FILE
gpupool-guest run --port "$2" & helper=$!
for i in $(seq 300); do
  if gpupool-guest status >/dev/null; then break; fi
  sleep 0.1
done
gpupool-guest status
stat -c '%a %U %G' /run/gpupool/guest.sock
"$3"
useradd member
usermod -aG gpupool member
su member -c "$3"
su nobody -s /bin/sh -c 'gpupool-guest status' || echo "status $?"
kill $helper
wait $helper
dpkg --purge gpupool-guest >&2
ls -d /usr/lib/gpupool /usr/bin/gpupool-guest /etc/ld.so.conf.d/00-gpupool.conf 2>/dev/null || true
ldconfig -p | grep gpupool || echo "nothing is left"
"""


@needs_dpkg
@needs_root
def test_it_works_where_it_is_installed(package: Path, compiler: Compiler, tmp_path: Path) -> None:
    with Host.running() as host:
        check_installed(host, package, compiler, tmp_path)


def check_installed(host: Host, package: Path, compiler: Compiler, tmp_path: Path) -> None:
    machine = Machine(host.root / "vm")
    host.machines["vm"] = machine
    machine.port.plug()
    host.leases["vm"] = make_lease(memory=512 * MIB, gpu="", port=str(machine.port.host_path))
    host.push()
    [program] = next(p for p in RUNTIME_PROGRAMS if p.name == "vector_add").command(compiler)
    # Where a plain user may read it.
    shutil.copy(program, host.root / "program")
    [deb] = package.glob("*.deb")
    shutil.copy(deb, host.root)
    place = tmp_path / "root"
    place.mkdir()
    done = subprocess.run(
        [
            *("unshare", "--mount", "/bin/sh", "-c", INSTALL, "sh", place, INSIDE),
            *(host.root / deb.name, machine.port.guest_path, host.root / "program"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        "gpupool",
        "/usr/lib/gpupool/libcuda.so.1",
        "GPU: slice s0, 512 MiB, 25 % of a GPU",
        "660 root gpupool",
        "ok",
        "ok",
        "no GPU for user nobody, who is not in the group gpupool: usermod -aG gpupool nobody, "
        "and log in again",
        "status 7",
        "nothing is left",
    ], done.stderr
