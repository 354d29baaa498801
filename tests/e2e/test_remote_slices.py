"""A slice of another host, in a container and in a virtual machine of this one."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.certificates import Authority
from tests.e2e.guest import Loop, computes, guest_programs, run, sessions, wait_status
from tests.e2e.host import Host, free_port, until
from tests.e2e.image import Image
from tests.e2e.looks import whole
from tests.e2e.podman import CDI, Podman, forget_devices
from tests.functional.pool import Pool
from tests.programs.catalog import RUNTIME_PROGRAMS

MATMUL = next(program for program in RUNTIME_PROGRAMS if program.name == "matmul")


@dataclass(frozen=True)
class Pair:
    near: Host
    far: Pool
    slice: str  # on the near host, and of the far one


@pytest.fixture(scope="module")
def pair(guest_image: Image, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two hosts on loopback; the near one's slice is on the far one."""
    authority = Authority(tmp_path_factory.mktemp("certificates"))
    ports = {"near": free_port(), "far": free_port()}

    def options(name: str, other: str) -> dict[str, dict[str, object]]:
        files = authority.host(name)
        return {
            "DEFAULT": {"host": name, "debug": "true"},
            "api": {"tcp_listen": f"127.0.0.1:{ports[name]}"},
            "relay": {
                "certificate_file": files.certificate,
                "key_file": files.key,
                "ca_file": files.authority,
                "listen": "127.0.0.1:0",
                "peer": f"{other} 127.0.0.1:{ports[other]} slices=8",
            },
        }

    own = f"e2e-{uuid.uuid4().hex[:8]}"
    more = {**options("near", "far"), "containers": {"cdi_dir": str(CDI)}}
    near = Host(guest_image, options=more)
    with Pool(options=options("far", "near")) as far:
        try:
            with near:

                def made() -> bool:
                    size = ("--compute", "25", "--memory", "1024")
                    done = near.pool.ctl("slice", "create", "--name", own, "--host", "far", *size)
                    return done.returncode == 0

                until(made, "the slice of the other host", 30)
                yield Pair(near, far, own)
        finally:
            forget_devices(near.pool.run_dir)


def far_carriers(pair: Pair) -> list[str]:
    return [session["carrier"] for session in pair.far.ctl_json("session", "list")]


@pytest.mark.skipif(shutil.which("podman") is None, reason="podman is not installed")
def test_a_container_computes_on_another_hosts_gpu(pair: Pair) -> None:
    with Podman() as podman:
        box = podman.make_image("plain", guest_programs())
        device = f"gpupool/slice={pair.slice}"
        words = ("run", "--rm", "--network=none", "--device", device, box, "matmul")
        process = podman.popen(*words)
        output, errors = process.communicate(timeout=120)
        assert MATMUL.problem(process.returncode, output) is None, errors
    until(lambda: far_carriers(pair) == [], "the end of its session there")


def test_a_virtual_machine_computes_on_another_hosts_gpu(pair: Pair) -> None:
    near = pair.near
    machine = near.start("distant", image=near.image)
    guest = near.pool.ctl_json("guest", "attach", "distant", "--slice", pair.slice)
    assert guest["problem"] == ""
    assert wait_status(machine, 0) == f"GPU: slice {pair.slice}, 1024 MiB, 25 % of a GPU"
    computes(machine)
    loop = Loop(machine)
    [session] = until(lambda: sessions(near, guest), "its session")
    assert session["carrier"] == "ivshmem"
    assert far_carriers(pair) == ["relay"]
    assert whole(near, machine)["sessions"] == 1
    near.pool.ctl("guest", "detach", "distant", "--force", check=True)
    loop.fails()
    until(lambda: far_carriers(pair) == [], "the end of its session there")
    code, output = run(machine, "memory info")
    assert code != 0, output
    machine.domain.destroy()


def test_the_far_host_is_told_that_the_slice_is_not_needed(pair: Pair) -> None:
    pair.near.pool.ctl("slice", "delete", "--force", pair.slice, check=True)
    until(lambda: pair.far.ctl_json("slice", "list") == [], "it is given back")
