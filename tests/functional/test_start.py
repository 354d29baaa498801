"""What gpupoold says when it cannot start: one sentence and the exit status of that kind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.functional.pool import Pool

CONFIGURATION, DRIVER, STATE, SOCKET = 2, 3, 4, 5


@pytest.fixture
def idle(simulated_driver: Path) -> Iterator[Pool]:
    """A pool that has not been started."""
    pool = Pool(driver_directory=simulated_driver, start_broker=False)
    pool.prepare()
    try:
        yield pool
    finally:
        pool.stop()


def one_sentence(output: str) -> str:
    """The last line, which must be the only one of its kind: no traceback."""
    assert "Traceback" not in output, output
    lines = [line for line in output.splitlines() if line.startswith("gpupoold: ")]
    assert len(lines) == 1, output
    return lines[0]


def test_driver_directory_without_a_driver(idle: Pool, tmp_path: Path) -> None:
    idle.driver_directory = str(tmp_path)
    idle.write_config()
    status, output = idle.daemon_once()
    assert status == DRIVER
    assert str(tmp_path) in one_sentence(output)


def test_driver_directory_that_does_not_exist(idle: Pool) -> None:
    idle.driver_directory = "/nonexistent/driver"
    idle.write_config()
    status, output = idle.daemon_once()
    assert status == DRIVER
    assert "/nonexistent/driver" in one_sentence(output)


def test_broken_driver(idle: Pool, tmp_path: Path) -> None:
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        (tmp_path / name).write_text("not a library")
    idle.driver_directory = str(tmp_path)
    idle.write_config()
    status, output = idle.daemon_once()
    assert status == DRIVER
    assert str(tmp_path) in one_sentence(output)


@pytest.mark.parametrize(
    ("group", "option", "value"),
    [
        ("DEFAULT", "run_dir", "relative/path"),
        ("DEFAULT", "run_dir", "/tmp/" + "x" * 120),
        ("DEFAULT", "event_limit", "many"),
        ("broker", "warm_workers", "-1"),
        ("broker", "tcp_listen", "0.0.0.0:4000"),
        ("broker", "worker_user", "no-such-user"),
        ("gpus", "placement_policy", "fastest"),
    ],
)
def test_wrong_configuration_value(idle: Pool, group: str, option: str, value: str) -> None:
    idle.options = {group: {option: value}}
    idle.write_config()
    status, output = idle.daemon_once()
    assert status == CONFIGURATION, output
    sentence = one_sentence(output)
    assert option in sentence and str(idle.config_file) in sentence


def test_configuration_that_is_not_one(idle: Pool) -> None:
    idle.config_file.write_text("this is no configuration\n")
    status, output = idle.daemon_once()
    assert status == CONFIGURATION
    assert str(idle.config_file) in one_sentence(output)


def test_configuration_that_is_missing(idle: Pool) -> None:
    idle.config_file.unlink()
    status, output = idle.daemon_once()
    assert status == CONFIGURATION
    assert str(idle.config_file) in one_sentence(output)


@contextlib.contextmanager
def small_file_system(directory: Path, kib: int) -> Iterator[None]:
    """A tmpfs of the given size on `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(directory)], check=True
    )
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def test_full_disk_at_the_start(idle: Pool, full_disks_possible: None) -> None:
    with small_file_system(idle.state_dir, 64):
        with contextlib.suppress(OSError), open(idle.state_dir / "ballast", "wb") as ballast:
            ballast.write(bytes(64 << 10))
        status, output = idle.daemon_once()
        assert status == STATE, output
        assert str(idle.state_dir) in one_sentence(output)


def test_disk_that_fills_up(idle: Pool, full_disks_possible: None) -> None:
    """A change that cannot be written is refused as a whole; what was there stays."""
    with small_file_system(idle.state_dir, 4096):
        idle.start_broker()
        idle.start_daemon()
        idle.slice("before", compute=10, memory=512)
        # Closing a file that could not be written entirely fails too.
        with contextlib.suppress(OSError), open(idle.state_dir / "ballast", "wb") as ballast:
            while True:
                ballast.write(bytes(4096))
                ballast.flush()
        refused = None
        for number in range(200):  # the database has some room of its own
            refused = idle.ctl(
                "slice", "create", "--name", f"more{number}", "--compute", "1", "--memory", "16"
            )
            if refused.returncode != 0:
                break
            idle.ctl("slice", "delete", f"more{number}")
        assert refused is not None and refused.returncode != 0, "the full disk was never noticed"
        assert "Traceback" not in refused.stderr
        assert refused.returncode == 1, refused.stderr
        (idle.state_dir / "ballast").unlink()
        if idle.daemon is not None and idle.daemon.poll() is not None:
            assert idle.daemon.returncode == STATE
            idle.start_daemon()
        assert "before" in [s["name"] for s in idle.ctl_json("slice", "list")]
        idle.slice("after", compute=10, memory=512)
        idle.end_daemon()


@pytest.fixture
def full_disks_possible() -> None:
    """These tests mount a small tmpfs, in a mount namespace if need be."""
    if os.geteuid() != 0:
        pytest.fail("needs root for a small file system; run the tests as root")
    if shutil.which("mount") is None:
        pytest.fail("needs mount(8)")


def test_socket_in_use(pool: Pool) -> None:
    status, output = pool.daemon_once()
    assert status == SOCKET
    assert "gpupoold.sock" in one_sentence(output)
    # The one that was there is not disturbed.
    assert [s["name"] for s in pool.ctl_json("slice", "list")] == ["main"]


def test_socket_that_a_killed_one_left_behind(pool: Pool) -> None:
    pool.end_daemon(signal.SIGKILL)
    assert (pool.run_dir / "gpupoold.sock").exists()
    pool.start_daemon()
    assert [s["name"] for s in pool.ctl_json("slice", "list")] == ["main"]


def test_host_without_any_gpu() -> None:
    """Runs, and says so. (Only where the system has no driver of its own.)"""
    with Pool(driver_directory="") as pool:
        shown = pool.ctl("gpu", "list", check=True)
        if pool.ctl_json("gpu", "list"):
            return  # this machine has a card: nothing to be seen here
        assert "no gpu" in (shown.stdout + shown.stderr).lower()
        refused = pool.ctl("slice", "create", "--name", "x", "--compute", "10", "--memory", "256")
        assert refused.returncode == 4, refused.stderr  # no capacity
        assert "without gpus" in pool.logs().lower()
