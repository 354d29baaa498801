"""Run inside a machine with KVM and vhost-vsock (nested.py): `nested_vsock.py KERNEL INITRD`.

libvirt, gpupoold, the broker and a virtual machine under KVM, whose programs reach the host by
vsock. The last line says whether all was as it should be.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ["GPUPOOL_E2E_VIRT"] = "kvm"

# Behind the installed packages.
sys.path.append(str(Path(__file__).resolve().parent.parent.parent))


def step(text: str) -> None:
    print(f"-- {text}", flush=True)


def main() -> None:
    from tests.e2e.guest import (
        NO_PORT,
        Loop,
        computes,
        its_session,
        run,
        sessions,
        wait_status,
    )
    from tests.e2e.host import Host, sized, until
    from tests.e2e.image import Image
    from tests.e2e.looks import guests

    image = Image(*map(Path, sys.argv[1:]))
    # Without regions the programs' calls go all the way through the socket.
    with Host(image, options={"broker": {"regions": "false"}}) as host:
        try:
            step("a machine with a lease gets a vsock device")
            machine = host.start("deep", sized(25, 1024), memory=256)
            [guest] = until(
                lambda: [g for g in guests(host) if "vsock" in g["devices"]], "the device"
            )
            assert {"channel", "vsock"} <= {*guest["devices"]}, guest
            assert "<alias name='ua-gpupool-vsock'/>" in machine.live_xml

            step("its service reaches the host by it, and a program computes")
            wait_status(machine, 0)
            assert '"carrier": "vsock"' in machine.sh("gpupool-guest status --json")
            computes(machine)
            loop = Loop(machine)
            session = its_session(host, guest)
            assert (session["carrier"], session["pid"]) == ("vsock", loop.pid), session

            step("the service ends: so does the session; started again, it works")
            machine.sh("killall -9 gpupool-guest")
            loop.fails()
            until(lambda: not sessions(host, guest), "the session's end")
            wait_status(machine, 0)
            computes(machine)

            step("the lease ends: so do its sessions, and the device goes")
            loop = Loop(machine)
            host.pool.ctl("guest", "detach", "deep", "--force", check=True)
            loop.fails()
            until(lambda: "<vsock" not in machine.live_xml, "the end of the device")
            wait_status(machine, NO_PORT)
            code, output = run(machine, "memory info")
            assert code != 0 and "CUDA_ERROR_NO_DEVICE" in output, output
            machine.domain.destroy()
        except BaseException:
            print(host.logs())
            raise
    print("nested vsock: ok")


if __name__ == "__main__":
    main()
