"""What a real worker may do: the confinement, seen from outside, on the simulated driver."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.functional import wire
from tests.functional.broker_host import MIB, BrokerHost, make_lease
from tests.functional.pool import wait_for

FIRST = ""  # the driver's first device


@pytest.fixture
def host(simulated_driver: Path) -> Iterator[BrokerHost]:
    # Where every user may read, so that workers can be another one.
    root = Path(tempfile.mkdtemp(prefix="gpupool-broker-"))
    root.chmod(0o755)
    shutil.copytree(simulated_driver, root / "driver")
    try:
        with BrokerHost(root, fake_worker=False) as own:
            own.gpus = [FIRST]
            own.settings.driver_directory = str(root / "driver")
            yield own
    finally:
        shutil.rmtree(root)


def worker_of(host: BrokerHost) -> int:
    """The process id of the only worker that has a session."""
    assert host.channel is not None
    [session] = host.channel.state().sessions
    [worker] = session.workers
    return worker.pid


def status_of(pid: int) -> dict[str, str]:
    """/proc/PID/status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def gone(pid: int) -> bool:
    """The process has ended (and may wait to be reaped by another than the broker)."""
    try:
        return status_of(pid)["State"].startswith("Z")
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_worker_is_confined(host: BrokerHost) -> None:
    if os.geteuid() == 0:
        host.settings.worker_user = "nobody"
    lease = make_lease(gpu=FIRST, memory=256 * MIB)
    host.push(lease)
    known = host.client_lease(lease)
    with wire.Connection(known).open() as control, wire.open_device(known, control.session):
        pid = worker_of(host)
        status = status_of(pid)
        if os.geteuid() == 0:
            assert status["Uid"].split() == [str(pwd.getpwnam("nobody").pw_uid)] * 4
            assert status["CapEff"] == "0" * 16
        assert status["NoNewPrivs"] == "1"
        assert status["Seccomp"] == "2"  # filter mode
        for task in Path(f"/proc/{pid}/task").iterdir():
            assert "\nSeccomp:\t2" in (task / "status").read_text()
        limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
        [core] = [line for line in limits if line.startswith("Max core file size")]
        assert core.split()[4:6] == ["0", "0"]

        # Nothing of the broker's is open in it: not the lock, the listeners, other clients.
        def targets() -> list[str]:
            return [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]

        def sockets() -> int:
            return sum(target.startswith("socket:") for target in targets())

        wait_for("channel and client", lambda: sockets() == 2)
        assert not [target for target in targets() if str(host.run_dir) in target]


def test_without_the_right_user_nothing_starts(host: BrokerHost) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root changes the user")
    host.settings.worker_user = "no-such-user-here"
    lease = make_lease(gpu=FIRST)
    host.push(lease)
    with pytest.raises(wire.Refused, match="no-such-user-here"):
        wire.Connection(host.client_lease(lease)).open()


def test_workers_die_with_the_broker(host: BrokerHost) -> None:
    lease = make_lease(gpu=FIRST, memory=256 * MIB)
    host.settings.warm_workers = 1
    host.push(lease)
    known = host.client_lease(lease)
    with wire.Connection(known).open() as control, wire.open_device(known, control.session) as data:
        assert host.process is not None
        tasks = Path(f"/proc/{host.process.pid}/task/{host.process.pid}/children")
        wait_for("a worker and a warm one", lambda: len(tasks.read_text().split()) == 2)
        children = [int(pid) for pid in tasks.read_text().split()]
        host.stop(signal.SIGKILL)
        with pytest.raises(wire.Closed):
            while True:
                data.receive_frame()
        wait_for("the workers' end", lambda: all(map(gone, children)))


def test_a_driver_directory_without_a_driver(host: BrokerHost) -> None:
    empty = host.root / "empty"
    empty.mkdir()
    host.settings.driver_directory = str(empty)
    lease = make_lease(gpu=FIRST)
    host.push(lease)
    with pytest.raises(wire.Refused, match=r"libcuda\.so\.1") as refused:
        wire.Connection(host.client_lease(lease)).open()
    assert refused.value.code == 5


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a cgroup")
def test_a_worker_has_a_cgroup_of_its_own(host: BrokerHost) -> None:
    mounts = [
        line.split()[1]
        for line in Path("/proc/mounts").read_text().splitlines()
        if line.split()[2] == "cgroup2"
    ]
    if not mounts or not os.access(mounts[0], os.W_OK):
        pytest.skip("no writable cgroup v2 here")
    parent = Path(mounts[0]) / f"gpupool-test-{os.getpid()}"
    parent.mkdir()
    try:
        stale = parent / "worker-1"
        stale.mkdir()  # as a broker leaves it that was killed
        host.settings.cgroup_parent = str(parent)
        lease = make_lease(gpu=FIRST, memory=256 * MIB)
        host.push(lease)
        assert not stale.exists()
        known = host.client_lease(lease)
        with wire.Connection(known).open() as control, wire.open_device(known, control.session):
            pid = worker_of(host)
            assert (parent / f"worker-{pid}" / "cgroup.procs").read_text().split() == [str(pid)]
        wait_for("the cgroup's end", lambda: not list(parent.glob("worker-*")))
    finally:
        host.stop()
        parent.rmdir()
