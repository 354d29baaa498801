"""A machine in which real virtual machines can be made: KVM and vhost-vsock in a guest.

Not every machine that tests run on has them. QEMU emulates a processor with AMD's virtualisation,
on which Debian's full kernel loads its KVM; the files of this machine are there, read-only, and
what runs inside runs as it would here, some ten times slower. It has one processor: with two, which
QEMU 7.2 emulates in threads of their own, machines inside lost their state now and then and began
anew.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from tests.e2e.image import MODULES, SHELL_PORT, Kernel, make_image

FULL = Kernel(
    "linux-image-amd64",
    (*MODULES, "9p", "9pnet_virtio", "kvm_amd", "vhost_vsock"),
)
#: of this machine's files, below a root of its own
ROOT = """\
mkdir -p /host /root && mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=262144,cache=loose \
  host /host && mount -t tmpfs root /root && cd /root && for d in $(ls /host); do
  [ -L /host/$d ] && cp -a /host/$d . && continue
  [ -d /host/$d ] || continue
  mkdir $d; case $d in proc|sys|dev|run|tmp) ;; *) mount --bind /host/$d $d ;; esac
done
mount -t proc proc proc; mount -t sysfs sys sys; mount --bind /dev dev; chmod 1777 tmp
mkdir -p dev/pts dev/shm && mount -t devpts pts dev/pts && mount -t tmpfs shm dev/shm
chmod 1777 dev/shm
mount -t tmpfs cache var/cache && mkdir -p var/cache/libvirt/qemu
chmod 666 dev/kvm dev/vhost-vsock
ip link set lo up
for d in {needed}; do [ -d .$d ] || { mkdir -p .$d && mount --bind /host$d .$d; }; done
# In place of the first root, which a process that enters another mount namespace would see again.
mount --move . / && echo "root: 0"
"""


class Nested:
    """A context manager. Its commands run below a root that has this machine's files."""

    def __init__(self, memory_mib: int = 3072) -> None:
        self._memory_mib = memory_mib
        self._directory = tempfile.TemporaryDirectory(prefix="gpnested-")
        self._qemu: subprocess.Popen[bytes] | None = None

    @property
    def _console(self) -> Path:
        return Path(self._directory.name) / "console"

    def __enter__(self) -> Nested:
        image = make_image(FULL)
        shell = Path(self._directory.name) / "shell"
        command = [
            *("setpriv", "--pdeathsig", "KILL", "--"),
            *("qemu-system-x86_64", "-accel", "tcg", "-cpu", "max"),
            *("-m", str(self._memory_mib), "-nodefaults", "-display", "none", "-no-reboot"),
            *("-kernel", str(image.kernel), "-initrd", str(image.initrd)),
            *("-append", "console=ttyS0 quiet panic=1"),
            *("-serial", f"file:{self._console}"),
            *(
                "-virtfs",
                "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap",
            ),
            *("-device", "virtio-serial-pci"),
            *("-chardev", f"socket,id=shell,path={shell},server=on,wait=off"),
            *("-device", f"virtserialport,chardev=shell,name={SHELL_PORT}"),
        ]
        self._qemu = subprocess.Popen(command)
        deadline = time.monotonic() + 60
        while not shell.exists():
            assert self._qemu.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        self._shell = socket.socket(socket.AF_UNIX)
        self._shell.connect(str(shell))
        # A checkout may lie where the machine has folders of its own (/tmp).
        needed = " ".join(shlex.quote(path) for path in (os.getcwd(), sys.prefix))
        prepared = self._sh(ROOT.replace("{needed}", needed), 120)
        assert prepared.splitlines()[-1:] == ["root: 0"], prepared + self.console()
        return self

    def __exit__(self, *_: object) -> None:
        if self._qemu is not None:
            self._qemu.send_signal(signal.SIGKILL)
            self._qemu.wait()
        self._directory.cleanup()

    def console(self) -> str:
        """For a test that failed."""
        status = self._qemu.poll() if self._qemu is not None else None
        text = self._console.read_text(errors="replace")[-3000:]
        return f"{text}\nQEMU's exit status: {status}"

    def _sh(self, command: str, seconds: float) -> str:
        mark = uuid.uuid4().hex[:8]
        self._shell.settimeout(seconds)
        self._shell.sendall(f"{command.strip()}\necho {mark}'-end'\n".encode())
        data = b""
        try:
            while f"{mark}-end".encode() not in data:
                chunk = self._shell.recv(65536)
                assert chunk, data.decode(errors="replace") + self.console()
                data += chunk
        except TimeoutError:
            raise AssertionError(data.decode(errors="replace") + self.console()) from None
        return data.decode(errors="replace").rpartition(f"{mark}-end")[0].strip()

    def run(self, command: str, seconds: float) -> tuple[int, str]:
        """A command in the machine, in this process's directory: exit status, output."""
        inner = f"cd {os.getcwd()} && export HOME=/tmp && {command}"
        text = self._sh(
            f"chroot . /bin/sh -c '{inner}' </dev/null 2>&1; echo \"status $?\"", seconds
        )
        output, _, status = text.rpartition("status ")
        return int(status or -1), output.strip()
