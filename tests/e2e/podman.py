"""podman with a store of its own, and an image made of this machine's own files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

#: a busy machine is some times slower than a quiet one
PATIENCE = 240.0
#: what every image with glibc has, whether its programs need it or not
GLIBC = ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1")
#: as Debian's images: /lib, /lib64 and /bin are links
MERGED = ("bin", "lib", "lib64")
#: where podman looks for devices
CDI = Path("/var/run/cdi")
#: explicit limits, since not every machine lets podman raise them; runc for any cgroup version
CONFIGURATION = """\
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""


def libraries(programs: Iterable[Path]) -> set[str]:
    """What the dynamic linker loads for them, by the names that it looks for."""
    found = set()
    for program in programs:
        output = subprocess.run(
            ["ldd", program], capture_output=True, text=True, check=False
        ).stdout
        found |= set(re.findall(r"(?:=> |^\s*)(/\S+) \(0x", output, re.MULTILINE))
    return found


def forget_devices(run_dir: Path) -> None:
    """Removes what a pool left in CDI: the directory is the machine's, and gpupoold leaves its
    files for its next start."""
    for file in CDI.glob("*.json"):
        if str(run_dir) in file.read_text():
            file.unlink()


#: becomes a user with user ids of his own to give away, whom the rest of the machine does not know
AS_USER = """\
cd /; cp /etc/passwd "$1/passwd"
echo "gp-test:x:$2:$2::$1:/bin/sh" >> "$1/passwd"; echo "gp-test:$3:65536" > "$1/subid"
mount --bind "$1/passwd" /etc/passwd
for file in /etc/subuid /etc/subgid; do mount --bind "$1/subid" $file; done
user=$2; shift 3
exec setpriv --reuid $user --regid $user --clear-groups -- "$@"
"""


class Podman:
    """A context manager; everything it made is gone afterwards. With `user`, without root."""

    def __init__(self, user: int | None = None) -> None:
        # Short: the path of a unix socket has at most 107 bytes.
        self.root = Path(tempfile.mkdtemp(prefix="gp-podman-", dir="/var/tmp"))
        self.user = user
        (self.root / "containers.conf").write_text(CONFIGURATION)
        (self.root / "runtime").mkdir(mode=0o700)
        if user is not None:
            for path in (self.root, self.root / "runtime"):
                os.chown(path, user, user)

    def __enter__(self) -> Podman:
        return self

    def __exit__(self, *_: object) -> None:
        self("rm", "--all", "--force", "--time", "0")
        self("rmi", "--all", "--force")
        if self.user is not None:
            # Files of the given user ids are the namespace's root's to remove.
            self("unshare", "rm", "-rf", str(self.root / "store"))
            self("system", "migrate")  # ends the process that keeps the user namespace
        shutil.rmtree(self.root, ignore_errors=True)

    def command(self, *arguments: str) -> list[str]:
        store = ["--root", str(self.root / "store"), "--runroot", str(self.root / "run")]
        if self.user is None:
            return ["podman", *store, *arguments]
        subordinate = str(self.user + 1000000)
        become = ["sh", "-ec", AS_USER, "sh", str(self.root), str(self.user), subordinate]
        rootless = ["podman", *store, "--storage-driver", "vfs", *arguments]
        return ["unshare", "--mount", *become, *rootless]

    @property
    def environment(self) -> dict[str, str]:
        result = {**os.environ, "CONTAINERS_CONF": str(self.root / "containers.conf")}
        if self.user is not None:
            result |= {"HOME": str(self.root), "XDG_RUNTIME_DIR": str(self.root / "runtime")}
        return result

    def __call__(self, *arguments: str, check: bool = False) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.command(*arguments),
            capture_output=True,
            text=True,
            env=self.environment,
            timeout=PATIENCE,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert not check or done.returncode == 0, f"podman {' '.join(arguments)}: {done.stderr}"
        return done

    def popen(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
        )

    def make_image(
        self, name: str, programs: Mapping[str, Path], changes: Sequence[str] = ()
    ) -> str:
        """An image with the programs in /bin, what they need, busybox, and nothing of gpupool."""
        busybox = Path(shutil.which("busybox") or "/bin/busybox")
        files = {f"usr/bin/{called}": path for called, path in programs.items()}
        files["usr/bin/busybox"] = busybox
        needed = {Path(library) for library in libraries([busybox, *programs.values()])}
        [libc] = [library for library in needed if library.name == "libc.so.6"]
        for place in needed | {libc.with_name(name) for name in GLIBC}:
            place = place.parent.resolve() / place.name  # not through the links of a merged /usr
            assert "libcuda" not in place.name
            files[str(place)[1:]] = place
        archive = self.root / f"{name}.tar"
        with tarfile.open(archive, "w") as tar:
            for link in MERGED:
                entry = tarfile.TarInfo(link)
                entry.type, entry.linkname = tarfile.SYMTYPE, f"usr/{link}"
                tar.addfile(entry)
            for place in ("usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/bin", "tmp", "run"):
                entry = tarfile.TarInfo(place)
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(entry)
            for place, source in sorted(files.items()):
                entry = tar.gettarinfo(source.resolve(), place)
                entry.uid = entry.gid = 0
                entry.mode = 0o755
                with source.open("rb") as stream:
                    tar.addfile(entry, stream)
        image = f"localhost/gpupool-test/{name}:1"
        options = [word for change in changes for word in ("--change", change)]
        self("import", *options, str(archive), image, check=True)
        archive.unlink()
        return image
