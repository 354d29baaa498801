"""Slices in containers, with real podman: unmodified images that get `--device`, nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpupoold.guests.containers import client_libraries
from tests.e2e.podman import CDI, Podman, forget_devices
from tests.functional.pool import Pool, wait_for
from tests.programs.catalog import RUNTIME_PROGRAMS
from tests.programs.toolchain import Compiler

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="podman's store and /var/run/cdi are root's"),
    pytest.mark.skipif(shutil.which("podman") is None, reason="podman is not installed"),
]
OUT_OF_MEMORY = 2
USER = 31234
MATMUL = next(program for program in RUNTIME_PROGRAMS if program.name == "matmul")


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler()


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    with Podman() as own:
        yield own


@pytest.fixture(scope="module")
def programs(compiler: Compiler) -> dict[str, Path]:
    """matmul has a static CUDA runtime, which opens libcuda.so.1; memory is linked with it."""
    return {
        "matmul": Path(MATMUL.command(compiler, "static13")[0]),
        "memory": compiler.driver("memory"),
    }


@pytest.fixture(scope="module")
def image(podman: Podman, programs: dict[str, Path]) -> str:
    return podman.make_image("plain", programs)


@dataclass
class Box:
    """A pool with one slice, and containers."""

    pool: Pool
    podman: Podman
    image: str
    slice: str
    memory_program: Path

    @property
    def device(self) -> str:
        return f"gpupool/slice={self.slice}"

    def options(self, *more: str, device: str | None = None) -> list[str]:
        wanted = self.device if device is None else device
        return ["run", "--rm", "--network=none", *(["--device", wanted] if wanted else []), *more]

    def run(
        self, *words: str, options: tuple[str, ...] = (), device: str | None = None, image: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program of the image to its end."""
        return self.podman(*self.options(*options, device=device), image or self.image, *words)

    @contextlib.contextmanager
    def waiting(
        self, *words: str, then: tuple[str, ...] = ()
    ) -> Iterator[tuple[str, subprocess.Popen[str]]]:
        """The name of a container in which `memory` did its words and waits, and the program."""
        name = f"gp-{uuid.uuid4().hex[:8]}"
        process = self.podman.popen(
            *self.options("--interactive", "--name", name),
            *(self.image, "memory", *words, "wait", *then),
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line == "waiting\n":
                    break
            else:
                assert process.stderr is not None
                raise AssertionError(process.stderr.read() + self.pool.logs())
            yield name, process
        finally:
            self.podman("rm", "--force", "--time", "0", name)
            process.kill()
            process.communicate()

    def specs(self) -> list[Path]:
        return [file for file in CDI.glob("*.json") if f'"{self.slice}"' in file.read_text()]


@pytest.fixture
def box(podman: Podman, image: str, programs: dict[str, Path]) -> Iterator[Box]:
    pool = Pool(options={"containers": {"cdi_dir": str(CDI)}})
    try:
        with pool:
            name = f"e2e-{uuid.uuid4().hex[:8]}"
            pool.slice(name, compute=25, memory=4096)
            yield Box(pool, podman, image, name, programs["memory"])
    finally:
        forget_devices(pool.run_dir)


def test_an_unmodified_image_computes(box: Box) -> None:
    done = box.run("matmul", *MATMUL.arguments)
    assert MATMUL.problem(done.returncode, done.stdout) is None, done.stderr + box.pool.logs()
    [view] = box.pool.ctl_json("slice", "list")
    assert box.run("matmul", device=f"gpupool/slice={view['uuid']}").returncode == 0
    # The control: without the device, the same image has no GPU and no way to one.
    assert box.run("matmul", device="").returncode != 0
    assert box.run("busybox", "ls", "/run/gpupool", device="").returncode != 0


def test_the_image_is_not_changed_but_for_what_is_mounted(box: Box) -> None:
    inside = box.run("busybox", "env").stdout + box.run("busybox", "cat", "/proc/mounts").stdout
    assert "LD_LIBRARY_PATH" not in inside and "GPUPOOL" not in inside
    for directory in ("/usr/lib/x86_64-linux-gnu", "/usr/lib64"):
        assert f"{directory}/libcuda.so.1 " in inside
    assert box.run("busybox", "touch", "/run/gpupool/slice/x").returncode != 0  # read-only
    assert box.run("busybox", "find", "/run/gpupool").stdout.split() == [
        "/run/gpupool",
        "/run/gpupool/slice",
        "/run/gpupool/slice/session.sock",
    ]


def test_an_image_with_a_user_and_without_rights(box: Box, programs: dict[str, Path]) -> None:
    image = box.podman.make_image("user", programs, ["USER 65532:65532"])
    done = box.run(
        "matmul",
        image=image,
        options=("--read-only", "--cap-drop=all", "--security-opt=no-new-privileges"),
    )
    assert MATMUL.problem(done.returncode, done.stdout) is None, done.stderr + box.pool.logs()


def test_a_container_is_a_session(box: Box) -> None:
    with box.waiting("alloc", "64") as (name, process):
        [session] = box.pool.sessions()
        pid = int(box.podman("inspect", "--format", "{{.State.Pid}}", name, check=True).stdout)
        assert (session["pid"], session["program"], session["uid"]) == (pid, "memory", 0)
        assert box.slice in json.dumps(session)
        process.communicate("\n")
        assert process.returncode == 0
    wait_for("the session's end", lambda: not box.pool.sessions())


def test_container_and_process_share_the_quota(box: Box) -> None:
    memory = str(box.memory_program)
    with box.waiting("alloc", "3000") as (_name, process):
        assert box.pool.used_mib(box.slice) >= 3000
        done = box.pool.run(box.slice, [memory, "alloc", "2000", "alloc", "500"])
        assert done.stdout.splitlines()[:2] == [f"alloc 2000: {OUT_OF_MEMORY}", "alloc 500: 0"]
        process.communicate("\n")
    with box.pool.started(box.slice, [memory, "alloc", "3000", "wait"]) as running:
        assert running.stdout is not None
        assert "waiting\n" in iter(running.stdout.readline, "")
        done = box.run("memory", "info", "alloc", "2000", "alloc", "500")
        info, first, second = done.stdout.splitlines()[:3]
        free, total = int(info.split()[1]), int(info.split()[3])
        assert total == 4096 << 20 and free <= (4096 - 3000) << 20
        assert (first, second) == (f"alloc 2000: {OUT_OF_MEMORY}", "alloc 500: 0")


def test_the_session_ends_with_the_container(box: Box) -> None:
    with box.waiting("alloc", "1000") as (name, process):
        assert len(box.pool.sessions()) == 1
        workers = set(box.pool.worker_pids())
        box.podman("kill", "--signal", "KILL", name, check=True)
        process.wait(60)
        wait_for("the session's end", lambda: not box.pool.sessions())
        wait_for("its memory", lambda: box.pool.used_mib(box.slice) == 0)
        wait_for("its worker's end", lambda: workers - set(box.pool.worker_pids()))


def test_the_specification_goes_with_the_slice(box: Box) -> None:
    assert len(box.specs()) == 1
    with box.waiting("alloc", "100", then=("touch",)) as (_name, process):
        assert box.pool.ctl("slice", "delete", box.slice).returncode != 0  # in use
        assert len(box.specs()) == 1
        box.pool.ctl("slice", "delete", "--force", box.slice, check=True)
        assert box.specs() == []
        process.communicate("\n")
        assert process.returncode != 0  # its device is gone
    done = box.run("matmul")
    assert done.returncode != 0 and box.slice in done.stderr
    assert not list((box.pool.run_dir / "slices").iterdir())


def test_containers_start_while_gpupoold_is_down(box: Box) -> None:
    box.pool.end_daemon(signal.SIGKILL)
    done = box.run("matmul")
    assert MATMUL.problem(done.returncode, done.stdout) is None, done.stderr
    assert len(box.specs()) == 1
    box.pool.start_daemon()
    assert box.run("matmul").returncode == 0


def test_a_container_that_runs_finds_the_next_broker(box: Box) -> None:
    name = f"gp-{uuid.uuid4().hex[:8]}"
    options = box.options("--detach", "--name", name)
    box.podman(*options, box.image, "busybox", "sleep", "3600", check=True)
    try:
        assert box.podman("exec", name, "memory", "alloc", "10").stdout.startswith("alloc 10: 0\n")
        for number in (signal.SIGTERM, signal.SIGKILL):
            box.pool.end_broker(number)
            without = box.podman("exec", name, "memory", "alloc", "10")
            assert without.returncode != 0
            assert "session.sock" in without.stderr  # why, without being asked
            box.pool.start_broker()
            box.pool.wait_healthy()
            again = box.podman("exec", name, "memory", "alloc", "10")
            assert again.stdout.startswith("alloc 10: 0\n"), again.stderr + box.pool.logs()
    finally:
        box.podman("rm", "--force", "--time", "0", name)


@pytest.mark.skipif(shutil.which("newuidmap") is None, reason="uidmap is not installed")
def test_a_user_without_root_has_his_own_slices_only(box: Box, programs: dict[str, Path]) -> None:
    """Whatever user an image runs as: on the host that is the user, or one of his own ids."""
    library = client_libraries()[0][0]
    as_user = ["setpriv", "--reuid", str(USER), "--regid", str(USER), "--clear-groups", "--"]
    if subprocess.run([*as_user, "test", "-r", library], check=False).returncode != 0:
        pytest.skip("other users cannot read what is tested")
    mine = f"e2e-{uuid.uuid4().hex[:8]}"
    create = box.pool.ctl_command("slice", "create", "--name", mine, "--compute", "10")
    subprocess.run(
        [*as_user, *create, "--memory", "1024"],
        env={**box.pool.environment, "HOME": "/"},
        check=True,
        capture_output=True,
        cwd="/",
    )
    with Podman(USER) as rootless:
        image = rootless.make_image("plain", programs)
        own = Box(box.pool, rootless, image, mine, box.memory_program)
        for inside in ("0", "1234"):
            done = own.run("memory", "alloc", "2000", "alloc", "10", options=("--user", inside))
            assert done.stdout.splitlines()[:2] == [
                f"alloc 2000: {OUT_OF_MEMORY}",
                "alloc 10: 0",
            ], done.stderr + box.pool.logs()
        with own.waiting("alloc", "10") as (_name, process):
            [session] = box.pool.sessions()
            assert session["uid"] == USER
            process.communicate("\n")
        done = own.run("memory", "alloc", "10", device=box.device)
        assert done.returncode != 0 and "permission denied" in done.stderr.lower()
        assert not box.pool.sessions()
