"""The same in a container: an image without anything of CUDA's driver gets a slice by its name.

Needs root and podman; image and podman's store are the demo's own, and are removed at the end.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from demo import ROOT, ctl, demo_as_root, expect, listed, show

# Behind the installed packages.
sys.path.append(str(ROOT))

if TYPE_CHECKING:
    from tests.e2e.podman import Podman

SLICE = "demo-box"
OPTIONS = ("run", "--rm", "--network=none")


@contextlib.contextmanager
def looping(podman: Podman, image: str, device: str) -> Iterator[None]:
    """While a container's program uses the slice; the container is removed at the end."""
    name = f"gpupool-demo-{os.getpid()}"
    program = podman.popen(*OPTIONS, "--name", name, "--device", device, image, "loop", "0")
    try:
        assert program.stdout is not None
        expect(program.stdout.readline() == "ready\n", "the looping container did not start")
        yield
    finally:
        podman("rm", "--force", "--time", "0", name)
        program.kill()
        program.communicate()


def steps(podman: Podman, image: str) -> None:
    from tests.functional.pool import wait_for

    def run(title: str, *words: str, device: str, status: int = 0) -> str:
        options = [*OPTIONS, *(["--device", device] if device else [])]
        shown = " ".join(["podman", *options, "IMAGE", *words])
        command = podman.command(*options, image, *words)
        return show(title, command, shown=shown, status=status)

    show(
        "a slice for a container: a quarter of a card",
        ctl("slice", "create", "--name", SLICE, "--compute", "25", "--memory", "1024"),
    )
    device = f"gpupool/slice={SLICE}"
    output = run("a program made by nvcc, static cudart", "matmul", device=device)
    expect(output.splitlines()[-1:] == ["ok"], "matmul did not end with 'ok'")
    words = ("memory", "alloc", "1025", "alloc", "1000")
    output = run("1025 MiB are refused (2: CUDA_ERROR_OUT_OF_MEMORY)", *words, device=device)
    expect("alloc 1025: 2\nalloc 1000: 0\n" in output, "the quota did not hold")
    with looping(podman, image, device):
        show("the session of a program inside, while it runs", ctl("session", "list"))
        expect([s["slice"] for s in listed("session")] == [SLICE], "not one session is listed")
    wait_for("the end of the session", lambda: not listed("session"), 20)
    print("(the container was removed while its program ran; its session is gone)")
    show("the slice is removed", ctl("slice", "delete", SLICE))
    unknown = podman(*OPTIONS, "--device", device, image, "matmul")
    expect(unknown.returncode != 0, "podman still knows the slice")
    print(f"\n-- podman knows it no more\n{unknown.stderr.strip()}")


def job(programs: dict[str, Path]) -> None:
    from tests.e2e.podman import CDI, Podman, forget_devices
    from tests.functional.pool import Pool

    pool = Pool(options={"containers": {"cdi_dir": str(CDI)}})
    try:
        with pool, Podman() as podman:
            os.environ.update(pool.environment)
            os.environ.update(podman.environment)
            steps(podman, podman.make_image("demo", programs))
    finally:
        forget_devices(pool.run_dir)


if __name__ == "__main__":
    sys.exit(demo_as_root("in a container", job))
