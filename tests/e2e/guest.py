"""What a virtual machine has beside its kernel: the guest's package, programs, a C library.

The package is unpacked in / and its setup.sh run, as doc/virtual-machines.md says for systems
without dpkg; a loop stands for systemd, which would start the service again.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from gpupoold import paths
from tests.e2e.host import PATIENCE, Host, Machine, until
from tests.e2e.image import Image, pack
from tests.e2e.podman import GLIBC, libraries
from tests.programs.catalog import RUNTIME_PROGRAMS
from tests.programs.toolchain import Compiler

TOOL = Path(__file__).resolve().parents[2] / "tools" / "guest_package.py"
MATMUL = next(program for program in RUNTIME_PROGRAMS if program.name == "matmul")
NO_PORT, NO_HOST = 3, 4  # exit statuses of gpupool-guest status
UNAVAILABLE = 46  # CUDA_ERROR_DEVICE_UNAVAILABLE
NUMBERS = count(1)
#: what setup.sh uses
SYSTEM_PROGRAMS = ("getent", "groupadd", "ldconfig")
FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nplain:x:1000:1000::/:/bin/sh\n",
    "etc/group": "root:x:0:\nplain:x:1000:\n",
    "etc/gshadow": "",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\n",
    "etc/ld.so.conf": "include /etc/ld.so.conf.d/*.conf\n/lib/x86_64-linux-gnu\n",
    "etc/rc.local": """#!/bin/sh
/usr/lib/gpupool/setup.sh > /tmp/setup.log 2>&1
while true; do
  gpupool-guest run 2>> /tmp/helper.log
  sleep 1
done
""",
}


def guest_programs() -> dict[str, Path]:
    """matmul has a static CUDA runtime, which opens libcuda.so.1; the others are linked with it."""
    compiler = Compiler()
    return {
        "matmul": Path(MATMUL.command(compiler, "static13")[0]),
        **{name: compiler.driver(name) for name in ("loop", "memory", "nvml")},
        "hostile": compiler.plain("hostile", "guest"),
    }


def make_package(output: Path) -> Path:
    """The tar. A build for this machine only is packed as such."""
    command = [sys.executable, TOOL, "--native", paths.native_directory(), "--output", output]
    done = subprocess.run(
        [*command, "--any-glibc"], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    [package] = output.glob("*.tar.gz")
    return package


def make_guest_image(base: Image, programs: Mapping[str, Path], work: Path) -> Image:
    """`base` with the guest's package and the programs in /usr/bin. work: a folder for it."""
    tree = work / "guest"
    (tree / "usr" / "bin").mkdir(parents=True)
    # (tarfile wants a filter, or none, by Python's version.)
    subprocess.run(["tar", "-xf", make_package(work), "-C", tree], check=True)
    found = {name: shutil.which(name, path="/usr/sbin:/usr/bin") for name in SYSTEM_PROGRAMS}
    wanted = {**{name: Path(path) for name, path in found.items() if path}, **programs}
    assert {*SYSTEM_PROGRAMS} <= {*wanted}, f"not installed: {found}"
    for name, path in wanted.items():
        shutil.copy(path, tree / "usr" / "bin" / name)
        (tree / "usr" / "bin" / name).chmod(0o755)
    needed = {Path(library) for library in libraries(wanted.values())}
    [libc] = [library for library in needed if library.name == "libc.so.6"]
    for library in needed | {libc.with_name(name) for name in GLIBC}:
        assert "libcuda" not in library.name
        target = tree / str(library)[1:]
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, target)
    for name, text in FILES.items():
        (tree / name).write_text(text)
    (tree / "etc" / "rc.local").chmod(0o755)
    addition, initrd = work / "guest.img", work / "initrd.img"
    pack(tree, addition)
    initrd.write_bytes(base.initrd.read_bytes() + addition.read_bytes())
    initrd.chmod(0o644)
    shutil.rmtree(tree)
    addition.unlink()
    return Image(base.kernel, initrd)


# ---- in a machine that runs ---------------------------------------------------------------------


def run(machine: Machine, command: str, seconds: float = PATIENCE) -> tuple[int, str]:
    """Its exit status, and what it prints."""
    text = machine.sh(f'({command}) 2>&1 </dev/null; echo "status $?"', seconds)
    output, _, status = text.rpartition("status ")
    return int(status), output.strip()


def wait_status(machine: Machine, wanted: int) -> str:
    """What gpupool-guest status says, once it ends with this exit status."""
    found = (-1, "")

    def right() -> bool:
        nonlocal found
        found = run(machine, "gpupool-guest status")
        return found[0] == wanted

    try:
        until(right, f"gpupool-guest status: {wanted}", 60)
    except AssertionError:
        raise AssertionError(f"{found}\n{logs(machine)}") from None
    return found[1]


def logs(machine: Machine) -> str:
    """What setup.sh and the helper wrote."""
    return machine.sh("cat /tmp/setup.log /tmp/helper.log")


def computes(machine: Machine) -> None:
    """A program of today's finds the GPU and its result is right."""
    code, output = run(machine, "matmul")
    assert MATMUL.problem(code, output + "\n") is None, logs(machine)


def sessions(host: Host, guest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Those under the guest's lease, as the host tells."""
    listed = host.pool.ctl_json("session", "list")
    return [session for session in listed if session["lease"] == guest["lease"]]


def its_session(host: Host, guest: Mapping[str, Any]) -> dict[str, Any]:
    """That of the one program that works under the guest's lease. gpupoold hears of it by itself,
    perhaps later than the program got its first result."""
    found = until(lambda: sessions(host, guest), "a session under the lease")
    assert len(found) == 1, found
    return found[0]


class Loop:
    """A program that works until something fails, in the background of a machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._output = f"/tmp/loop-{next(NUMBERS)}"
        words = f"loop 0 </dev/null >{self._output} 2>&1 & echo $!"
        #: in the guest
        self.pid = int(machine.sh(words))
        try:
            until(lambda: "ready" in self.output(), "the program works", 60)
        except AssertionError:
            raise AssertionError(self.output() + logs(machine)) from None

    def output(self) -> str:
        return self._machine.sh(f"cat {self._output}")

    def runs(self) -> bool:
        """Whether it is still there, a few rounds later, and nothing failed."""
        code, _ = run(self._machine, f"sleep 0.5; kill -0 {self.pid}")
        return code == 0 and self.output() == "ready"

    def fails(self, machine: Machine | None = None) -> None:
        """It gets the error that stays, and ends. machine: where it is now."""
        self._machine = machine or self._machine
        expected = f"error {UNAVAILABLE}, again {UNAVAILABLE}"
        try:
            until(lambda: expected in self.output(), f"the program's {expected}", 60)
        except AssertionError:
            raise AssertionError(self.output() + logs(self._machine)) from None
        until(lambda: run(self._machine, f"kill -0 {self.pid}")[0] != 0, "the program's end")
