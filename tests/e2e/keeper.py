"""The parent of a private libvirtd, in a mount namespace of its own: `keeper.py ROOT POOL`.

Lays ROOT/etc, ROOT/var, ROOT/log over libvirt's directories, then starts what its standard input
asks for (a JSON list of words per line) and answers with the process id. QEMU processes, which
libvirtd leaves to the nearest reaper, are its children too: libvirt waits until an ended one is
reaped, and not every machine's first process does that soon. At the end of its input, also where
the test was killed, it ends all of them and removes what they and the pool in POOL made.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from gpupoold.guests.region import Regions

PR_SET_CHILD_SUBREAPER = 36
PLACES = {
    "run": "/run/libvirt",
    "etc": "/etc/libvirt",
    "var": "/var/lib/libvirt",
    "log": "/var/log/libvirt",
}


def children() -> list[int]:
    found: list[int] = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/children") as stream:
            found += map(int, stream.read().split())
    return found


def reap() -> None:
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            time.sleep(0.05)


def main() -> None:
    root, pool = sys.argv[1:]
    test = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    commands = [
        ["mount", "--make-rprivate", "/"],
        *(["mount", "--bind", f"{root}/{name}", place] for name, place in PLACES.items()),
    ]
    if os.path.exists("/dev/kvm") and os.environ.get("GPUPOOL_E2E_VIRT") != "kvm":
        # The tests' machines are emulated. Where /dev/kvm is and does not work, libvirt would ask
        # QEMU for its capabilities at every start, in vain.
        hidden = f"{root}/no-kvm"
        os.close(os.open(hidden, os.O_CREAT, 0o000))
        commands.append(["mount", "--bind", hidden, "/dev/kvm"])
    for command in commands:
        subprocess.run(command, check=True)
    threading.Thread(target=reap, daemon=True).start()
    print(os.getpid(), flush=True)
    with open(f"{root}/daemons.log", "ab") as log:
        nothing = os.open("/dev/null", os.O_RDONLY)
        for line in sys.stdin:
            words = json.loads(line)
            actions = [
                (os.POSIX_SPAWN_DUP2, nothing, 0),
                (os.POSIX_SPAWN_DUP2, log.fileno(), 1),
                (os.POSIX_SPAWN_DUP2, log.fileno(), 2),
            ]
            pid = os.posix_spawnp(words[0], words, os.environ, file_actions=actions)
            print(pid, flush=True)
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + 10
        while (left := children()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(0.2)
    if os.getppid() != test:  # it was killed, and the pool with it
        shutil.rmtree(pool, ignore_errors=True)
    Regions(str(Path(pool) / "run"), 1, "").remove_strangers(set())
    shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
