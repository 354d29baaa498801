"""What a container gets, without a container runtime: the mounts that the CDI specification of a
slice says, in a mount namespace of the program's own, and no lease file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.functional.pool import Pool, wait_for
from tests.programs.catalog import RUNTIME_PROGRAMS
from tests.programs.toolchain import Compiler

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
VECTOR_ADD = next(program for program in RUNTIME_PROGRAMS if program.name == "vector_add")
#: $1: where the client library lies, $2: the slice's directory, $3: whom to become
ENTER = """\
mount -t tmpfs none /run && mkdir -p "/run/gpupool/slice" && mount --bind "$2" /run/gpupool/slice
export LD_LIBRARY_PATH="$1"; user=$3; shift 3
exec setpriv --reuid "$user" --regid "$user" --clear-groups -- "$@"
"""


@pytest.fixture
def own(simulated_driver: Path) -> Iterator[Pool]:
    with tempfile.TemporaryDirectory(prefix="gp-") as directory:
        options = {"containers": {"cdi_dir": f"{directory}/cdi"}}
        with Pool(driver_directory=simulated_driver, options=options) as pool:
            pool.slice("main", compute=25, memory=4096)
            yield pool


def specs(pool: Pool) -> dict[str, dict]:
    """The device of each slice by name."""
    found = {}
    for file in Path(pool.options["containers"]["cdi_dir"]).glob("*.json"):
        for device in json.loads(file.read_text())["devices"]:
            found[device["name"]] = device["containerEdits"]
    return found


def inside(pool: Pool, *command: str, user: int = 0) -> list[str]:
    """The command line that runs a program with what the device `main` mounts."""
    mounts = {m["containerPath"]: m["hostPath"] for m in specs(pool)["main"]["mounts"]}
    library = Path(mounts["/usr/lib/x86_64-linux-gnu/libcuda.so.1"]).parent
    directory = mounts["/run/gpupool/slice"]
    return [
        *("unshare", "--mount", "sh", "-ec", ENTER, "sh"),
        *(str(library), directory, str(user), *command),
    ]


def run(pool: Pool, *command: str, user: int = 0, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        inside(pool, *command, user=user),
        capture_output=True,
        text=True,
        env={**pool.environment, **more},
        timeout=300,
        stdin=subprocess.DEVNULL,
        check=False,
    )


@pytest.mark.parametrize("user", [0, 30003], ids=["root", "another"])
def test_a_program_finds_its_slice(own: Pool, compiler: Compiler, user: int) -> None:
    command = VECTOR_ADD.command(compiler, "static13")
    readable = ["setpriv", "--reuid", str(user), "--clear-groups", "--regid", str(user), "test"]
    for path in (command[0], specs(own)["main"]["mounts"][0]["hostPath"]):
        if subprocess.run([*readable, "-r", path], check=False).returncode != 0:
            pytest.skip("other users cannot read what is tested")
    done = run(own, *command, user=user)
    assert VECTOR_ADD.problem(done.returncode, done.stdout) is None, done.stderr + own.logs()
    # On the host itself, there is nothing to be found.
    outside = own.direct(
        command,
        environment={
            "LD_LIBRARY_PATH": str(Path(specs(own)["main"]["mounts"][0]["hostPath"]).parent)
        },
    )
    assert outside.returncode != 0


def test_nvml_shows_the_slice(own: Pool) -> None:
    mounted = {mount["containerPath"] for mount in specs(own)["main"]["mounts"]}
    assert "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1" in mounted
    program = Path(__file__).with_name("nvml_program.py")
    apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    done = run(own, *apart, sys.executable, str(program), "50")
    assert done.returncode == 0, done.stderr + own.logs()
    [device] = json.loads(done.stdout)["devices"]
    assert device["total"] == 4096 << 20
    assert device["processes"] == [[1, device["used"]]]
    # On the host itself, there is nothing to be found.
    library = Path(specs(own)["main"]["mounts"][0]["hostPath"]).parent
    outside = own.direct(
        [sys.executable, str(program)], environment={"LD_LIBRARY_PATH": str(library)}
    )
    assert "DriverNotLoaded" in outside.stderr


def test_why_not_is_said_without_being_asked(own: Pool, compiler: Compiler) -> None:
    memory = str(compiler.driver("memory"))
    wrong = run(own, memory, "info", GPUPOOL_CARRIER="tcp")
    assert wrong.returncode != 0 and "no carrier of the kind tcp" in wrong.stderr
    own.end_broker(signal.SIGKILL)
    without = run(own, memory, "info")
    assert without.returncode != 0
    assert "/run/gpupool/slice/session.sock: Connection refused" in without.stderr
    own.start_broker()
    own.wait_healthy()
    assert run(own, memory, "info").returncode == 0


def test_the_session_ends_with_the_process_and_the_quota_is_one(
    own: Pool, compiler: Compiler
) -> None:
    memory = str(compiler.driver("memory"))
    process = subprocess.Popen(
        inside(own, memory, "alloc", "3000", "wait"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=own.environment,
    )
    assert process.stdout is not None and process.stdin is not None
    assert [process.stdout.readline() for _ in range(2)] == ["alloc 3000: 0\n", "waiting\n"]
    [session] = own.sessions()
    assert (session["pid"], session["program"]) == (process.pid, Path(memory).name)
    assert own.run("main", [memory, "alloc", "2000"]).stdout.startswith("alloc 2000: 2\n")
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()
    wait_for("the session's end", lambda: not own.sessions())
    wait_for("the memory", lambda: own.used_mib("main") == 0)


def test_the_device_goes_with_the_slice(own: Pool) -> None:
    [name, virtual] = specs(own)
    assert name == "main" and virtual == own.ctl_json("slice", "show", "main")["uuid"]
    directory = own.run_dir / "slices" / virtual
    assert (directory / "socket" / "session.sock").is_socket()
    own.slice("other", compute=10, memory=1024)
    own.ctl("slice", "delete", "main", check=True)
    assert "main" not in specs(own) and "other" in specs(own)
    assert not directory.exists()
    # What changed while nobody looked is put in order at the next start.
    own.end_daemon(signal.SIGKILL)
    cdi = Path(own.options["containers"]["cdi_dir"])
    [file] = cdi.iterdir()
    text = file.read_text()
    file.write_text("{}")
    stale = file.with_name(file.name[:-41] + "00000000-0000-0000-0000-000000000000.json")
    stale.write_text(text)
    (cdi / "vendor.json").write_text("{}")
    own.start_daemon()
    assert file.read_text() == text
    assert sorted(path.name for path in cdi.iterdir()) == sorted([file.name, "vendor.json"])
