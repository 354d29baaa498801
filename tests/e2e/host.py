"""A private libvirtd beside a throw-away pool, and virtual machines on it.

libvirtd and virtlogd are children of the test in a mount namespace of their own, where copies lie
over libvirt's directories: the machine's own libvirt is not touched, and two hosts can live on one
machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import libvirt

from gpupoold.testing.sandbox import Sandbox
from tests.e2e.image import SHELL_PORT, Image

T = TypeVar("T")
ETC = Path(__file__).resolve().parents[2] / "etc" / "libvirt"
#: a busy machine is some times slower than a quiet one
PATIENCE = 120.0
#: not every machine's /dev/kvm works
VIRT = os.environ.get("GPUPOOL_E2E_VIRT", "qemu")

libvirt.registerErrorHandler(lambda context, error: None, None)

KEEPER = Path(__file__).resolve().parent / "keeper.py"


def until(condition: Callable[[], T], what: str, seconds: float = PATIENCE) -> T:
    """Waits until it is true and returns it."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"it did not come about: {what}"
        time.sleep(0.1)
    return value


def free_port() -> int:
    """A TCP port that nobody uses."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class HostPool(Sandbox):
    """The broker of a host sees libvirt's sockets: it lives in the same mount namespace."""

    namespace = 0  # a process in it

    def broker_command(self) -> list[str]:
        enter = ["nsenter", f"--mount=/proc/{self.namespace}/ns/mnt", f"--wd={self.root}", "--"]
        return [*enter, *super().broker_command()]


class Host:
    """One host of a pool: broker, gpupoold and libvirtd; a context manager."""

    def __init__(
        self,
        image: Image,
        *,
        sandbox: type[HostPool] = HostPool,
        options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.image = image
        self.root = Path(tempfile.mkdtemp(prefix="gpe2e-", dir="/tmp"))
        self.root.chmod(0o755)
        self.uri = f"qemu:///system?socket={self.root}/sock/libvirt-sock"
        self.pool = sandbox(
            options={
                "libvirt": {
                    "uri": self.uri,
                    "interval": 5,
                    "qemu_pid_dir": self.root / "run" / "qemu",
                },
                "DEFAULT": {"debug": "true"},
                **(options or {}),
            },
            start_broker=False,
        )
        self._keeper: subprocess.Popen[str] | None = None
        self._libvirtd = 0
        self.connection: Any = None

    # ---- life -----------------------------------------------------------------------------------

    def __enter__(self) -> Host:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        self.pool.start()
        for name in ("run", "etc", "var", "log", "sock", "log/qemu"):
            (self.root / name).mkdir()
        shutil.copytree("/var/lib/libvirt", self.root / "var", dirs_exist_ok=True)
        shutil.rmtree(self.root / "var" / "qemu", ignore_errors=True)
        shutil.copytree("/etc/libvirt", self.root / "etc", dirs_exist_ok=True)
        for name in ("qemu", "hooks"):
            shutil.rmtree(self.root / "etc" / name, ignore_errors=True)
        hooks = self.root / "etc" / "hooks" / "qemu.d"
        hooks.mkdir(parents=True)
        text = (ETC / "hooks" / "qemu").read_text()
        configuration = 'CONFIGURATION = "/etc/gpupoold/gpupoold.conf"'
        assert configuration in text
        hook = hooks / "gpupool"
        hook.write_text(text.replace(configuration, f'CONFIGURATION = "{self.pool.config_file}"'))
        hook.chmod(0o755)
        with (self.root / "etc" / "libvirtd.conf").open("a") as stream:
            stream.write(
                f'\nhost_uuid = "{uuid.uuid4()}"\nunix_sock_dir = "{self.root}/sock"\n'
                'auth_unix_rw = "none"\nauth_unix_ro = "none"\n'
            )
        with (self.root / "etc" / "qemu.conf").open("a") as stream:
            # A namespace of each machine would take the mount over /dev/kvm along, and fails.
            # Control groups would be among those of the machine's own libvirt.
            stream.write("\nnamespaces = [ ]\ncgroup_controllers = [ ]\n")
        Path("/run/libvirt").mkdir(exist_ok=True)
        self._keeper = subprocess.Popen(
            [
                "unshare",
                "--mount",
                sys.executable,
                str(KEEPER),
                *map(str, (self.root, self.pool.root)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env=self.pool.environment,
            start_new_session=True,  # a signal for all of the test's processes is not for it
        )
        assert self._keeper.stdout is not None
        assert int(self._keeper.stdout.readline()) == self._keeper.pid
        self.pool.namespace = self._keeper.pid
        self.pool.start_broker()
        self.pool.wait_healthy()
        self._spawn("virtlogd", "-p", "/run/libvirt/virtlogd.pid")
        self.start_libvirtd()

    def _spawn(self, *command: str) -> int:
        """Starts it in the namespace and returns its process id."""
        keeper = self._keeper
        assert keeper is not None and keeper.stdin is not None and keeper.stdout is not None
        keeper.stdin.write(json.dumps(command) + "\n")
        keeper.stdin.flush()
        return int(keeper.stdout.readline())

    def start_libvirtd(self) -> None:
        """Starts it and connects to it."""
        self._libvirtd = self._spawn("libvirtd", "-p", "/run/libvirt/libvirtd.pid")

        def connected() -> Any:
            with contextlib.suppress(libvirt.libvirtError):
                return libvirt.open(self.uri)

        self.connection = until(connected, "libvirtd")

    def stop_libvirtd(self) -> None:
        """Ends it; its virtual machines run on."""
        self.connection.close()
        os.kill(self._libvirtd, signal.SIGTERM)
        until(lambda: not Path(f"/proc/{self._libvirtd}").exists(), "the end of libvirtd")

    def __exit__(self, *_: object) -> None:
        if self.connection is not None:
            with contextlib.suppress(libvirt.libvirtError):
                for domain in self.connection.listAllDomains():
                    with contextlib.suppress(libvirt.libvirtError):
                        domain.destroy()
            with contextlib.suppress(libvirt.libvirtError):
                self.connection.close()
        self.pool.stop()
        if self._keeper is not None:
            assert self._keeper.stdin is not None
            self._keeper.stdin.close()
            self._keeper.wait(60)
        shutil.rmtree(self.root, ignore_errors=True)

    def inside(self, path: str) -> Path:
        """A path of the mount namespace, as seen from here."""
        assert self._keeper is not None
        return Path(f"/proc/{self._keeper.pid}/root{path}")

    def logs(self) -> str:
        """For a test that failed."""
        parts = [self.pool.log_tails(120)]
        for path in [
            self.root / "daemons.log",
            *sorted((self.root / "log" / "qemu").glob("*.log")),
        ]:
            with contextlib.suppress(OSError):
                tail = path.read_text(errors="replace").splitlines()[-40:]
                parts += [f"--- {path.name}", *tail]
        return "\n".join(parts)

    # ---- virtual machines -----------------------------------------------------------------------

    def xml(
        self,
        name: str,
        metadata: str = "",
        *,
        machine: str = "pc",
        identity: str = "",
        crash: str = "destroy",
        devices: str = "",
        disk: Path | None = None,
        shell: bool = True,
        memory: int = 192,
        image: Image | None = None,
    ) -> str:
        """A definition. shell: with the channel that `Machine.sh` needs. image: another than the
        host's. disk: a read-only one."""
        boots = image or self.image
        # The processors that QEMU emulates by default are older than what NumPy is built for.
        cpu = "<cpu mode='maximum'/>" if disk is not None else ""
        if shell:
            devices += (
                "<channel type='unix'><source mode='bind'/>"
                f"<target type='virtio' name='{SHELL_PORT}'/></channel>"
            )
        if disk is not None:
            devices += (
                f"<disk type='file' device='disk'><driver type='raw'/>"
                f"<source file='{disk}'><seclabel model='dac' relabel='no'/></source>"
                "<target dev='vda' bus='virtio'/><readonly/></disk>"
            )
        if machine == "q35":
            # Two that its own devices take, and one for what comes later.
            ports = "<controller type='pci' model='pcie-root-port'/>" * 3
            devices += f"<controller type='pci' model='pcie-root'/>{ports}"
        return f"""<domain type='{VIRT}'>
  <name>{name}</name>
  <uuid>{identity or uuid.uuid4()}</uuid>
  <metadata>{metadata}</metadata>
  <memory unit='MiB'>{memory}</memory>
  <vcpu>1</vcpu>
  <os><type arch='x86_64' machine='{machine}'>hvm</type>
    <kernel>{boots.kernel}</kernel><initrd>{boots.initrd}</initrd>
    <cmdline>console=ttyS0 quiet panic=1</cmdline></os>
  <features><acpi/></features>{cpu}
  <on_poweroff>destroy</on_poweroff><on_reboot>restart</on_reboot><on_crash>{crash}</on_crash>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <serial type='file'><source path='/var/log/libvirt/qemu/{name}-console.log'/></serial>
    <memballoon model='none'/>
    <panic model='isa'/>
    {devices}
  </devices>
</domain>"""

    def start(self, name: str, metadata: str = "", **more: Any) -> Machine:
        """Defines and starts a machine; raises libvirtError where that is refused."""
        domain = self.connection.defineXML(self.xml(name, metadata, **more))
        domain.create()
        return Machine(self, name)


def sized(compute: int = 20, memory: int = 1024) -> str:
    """A request in metadata."""
    return (
        "<gp:slice xmlns:gp='https://gpupool.example/xmlns/request/1' "
        f"compute='{compute}' memory='{memory}'/>"
    )


def named(name: str) -> str:
    """A request in metadata."""
    return f"<gp:slice xmlns:gp='https://gpupool.example/xmlns/request/1' name='{name}'/>"


class Machine:
    """A virtual machine of a host."""

    def __init__(self, host: Host, name: str) -> None:
        self.host = host
        self.name = name
        self._socket: socket.socket | None = None

    @property
    def domain(self) -> Any:
        """libvirt's object, on the connection of now."""
        return self.host.connection.lookupByName(self.name)

    @property
    def live_xml(self) -> str:
        return self.domain.XMLDesc()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def sh(self, command: str, seconds: float = PATIENCE) -> str:
        """What a shell command in the guest prints; waits until the guest is up."""
        self.close()  # whatever an earlier command left unread
        path = re.search(rf"path='([^']+/{SHELL_PORT})'", self.live_xml)
        assert path, self.live_xml
        mark = uuid.uuid4().hex[:8]
        connection = socket.socket(socket.AF_UNIX)
        self._socket = connection
        # The path inside the namespace may be too long for a socket's address.
        directory = os.open(self.host.inside(os.path.dirname(path[1])), os.O_PATH)
        try:
            connection.connect(f"/proc/self/fd/{directory}/{SHELL_PORT}")
        finally:
            os.close(directory)
        connection.settimeout(seconds)
        connection.sendall(f"{command.strip()}\necho {mark}'-end'\n".encode())
        data = b""
        while f"{mark}-end".encode() not in data:
            chunk = connection.recv(65536)
            assert chunk, data
            data += chunk
        return data.decode(errors="replace").rpartition(f"{mark}-end")[0].strip()

    def send(self, command: str) -> None:
        """A command that is not answered, since it ends the guest."""
        self.sh("true")
        assert self._socket is not None
        self._socket.sendall(f"{command}\n".encode())

    @property
    def pid(self) -> int:
        """Of QEMU."""
        return int(self.host.inside(f"/run/libvirt/qemu/{self.name}.pid").read_text())
