"""gpupoold as a service: it tells systemd, and of many that start at once one serves."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.functional.pool import Pool, wait_for


@pytest.fixture
def idle(simulated_driver: Path) -> Iterator[Pool]:
    """A pool that has not been started."""
    pool = Pool(driver_directory=simulated_driver, start_broker=False)
    pool.prepare()
    try:
        yield pool
    finally:
        pool.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_systemd_is_told(idle: Pool, number: int) -> None:
    address = str(idle.root / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        manager.settimeout(60)
        idle.extra_environment["NOTIFY_SOCKET"] = address
        idle.start_daemon(wait=False)
        assert manager.recv(100) == b"READY=1"
        assert idle.ctl("gpu", "list").returncode == 0  # ready is ready
        assert idle.end_daemon(number) == 0
        assert manager.recv(100) == b"STOPPING=1"
    assert not (idle.run_dir / "gpupoold.sock").exists()


def test_of_many_that_start_at_once_one_serves(idle: Pool) -> None:
    """Also where a killed one left its socket behind."""
    idle.start_daemon()
    idle.end_daemon(signal.SIGKILL)
    command = [sys.executable, "-m", "gpupoold.cmd.daemon", "--config-file", str(idle.config_file)]
    starters = [
        subprocess.Popen(command, env=idle.environment, stderr=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    try:
        wait_for("all but one to end", lambda: sum(s.poll() is not None for s in starters) >= 5, 60)
        wait_for("the one to serve", lambda: idle.ctl("gpu", "list").returncode == 0, 60)
        ended = [starter for starter in starters if starter.poll() is not None]
        assert len(ended) == 5
        for starter in ended:
            assert starter.returncode == 5
            assert "is in use" in starter.communicate()[1].splitlines()[-1]
    finally:
        for starter in starters:
            starter.terminate()
        for starter in starters:
            starter.communicate(timeout=30)
