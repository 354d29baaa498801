"""Three hosts of a pool, each with its own gpupoold and broker, as network namespaces."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.certificates import Authority
from tests.functional.net import Network
from tests.functional.pool import Pool, wait_for
from tests.programs.catalog import RUNTIME_PROGRAMS
from tests.programs.toolchain import Compiler

API, RELAY = 26482, 26481
UNAVAILABLE = "error 46, again 46"
INTERRUPTION = 3  # seconds
#: longer than an interruption may be, and what a busy machine adds
PATIENCE = 25.0


class HostPool(Pool):
    """A host of the pool in its network namespace."""

    def __init__(self, name: str, network: Network, authority: Authority, **more: Any) -> None:
        self.name, self.network = name, network
        files = authority.host(name)
        options = {
            "DEFAULT": {"host": name},
            "api": {"tcp_listen": f"{network.address(name)}:{API}"},
            "relay": {
                "certificate_file": files.certificate,
                "key_file": files.key,
                "ca_file": files.authority,
                "listen": f"{network.address(name)}:{RELAY}",
                "interruption": INTERRUPTION,
            },
        }
        super().__init__(options=options, **more)
        self.peers: list[str] = []

    def knows(self, host: str, limits: str = "slices=4") -> None:
        """The other host is a peer of this one."""
        self.peers.append(f"{host} {self.network.address(host)}:{API} {limits}")

    def write_config(self) -> None:
        super().write_config()
        text = self.config_file.read_text()
        lines = "\n".join(f"peer = {peer}" for peer in self.peers)
        self.config_file.write_text(text.replace("[relay]\n", f"[relay]\n{lines}\n"))

    def _spawn(self, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        return super()._spawn([*self.network.enter(self.name), *command], log)

    def card(self) -> dict[str, Any]:
        [card] = self.ctl_json("gpu", "list")
        return dict(card)

    def clean(self) -> bool:
        """Nothing of other hosts' sessions is left here."""
        return not self.ctl_json("session", "list") and not self.worker_busy()

    def worker_busy(self) -> bool:
        return any(session["worker_pids"] for session in self.ctl_json("session", "list"))


class Hosts:
    """A context manager: `a` has no GPU, `b` and `c` have one each."""

    def __init__(self, root: Path) -> None:
        self.network = Network(["host-a", "host-b", "host-c"])
        self.authority = Authority(root)
        machines = {}
        for host, digit in (("host-b", "b"), ("host-c", "c")):
            machines[host] = root / f"{host}.toml"
            uuid = f"GPU-{digit * 8}-0000-4000-8000-000000000000"
            machines[host].write_text(f'[[gpu]]\nuuid = "{uuid}"\n')
        root.chmod(0o755)
        self.a = HostPool("host-a", self.network, self.authority, driver_directory="")
        self.b = HostPool("host-b", self.network, self.authority, machine=machines["host-b"])
        self.c = HostPool("host-c", self.network, self.authority, machine=machines["host-c"])
        self.all = (self.a, self.b, self.c)

    def __enter__(self) -> Hosts:
        self.network.__enter__()
        try:
            for host in self.all:
                for other in self.all:
                    if other is not host:
                        host.knows(other.name)
                host.start()
            for host in self.all:
                wait_for("the peers", lambda h=host: not self.problems(h))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.all:
            host.stop()
        self.network.__exit__()

    @staticmethod
    def problems(host: HostPool) -> str:
        """What `gpu list --all-hosts` says of hosts that do not answer."""
        return host.ctl("gpu", "list", "--all-hosts", check=True).stderr


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if os.geteuid() != 0:
        pytest.skip("namespaces need root")
    with Hosts(tmp_path_factory.mktemp("hosts")) as own:
        yield own


@pytest.fixture
def remote(hosts: Hosts) -> Iterator[str]:
    """A slice on host-a that is on host-b; nothing may be left of it."""
    size = ("--compute", "25", "--memory", "4096")
    hosts.a.ctl("slice", "create", "--name", "far", "--host", "host-b", *size, check=True)
    yield "far"
    hosts.a.ctl("slice", "delete", "--force", "far", check=True)
    wait_for("it is given back", lambda: not hosts.b.ctl_json("slice", "list"))
    wait_for("the end of all", hosts.b.clean)


def ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "ready\n", line


def ends_with_error(process: subprocess.Popen[str]) -> None:
    output, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, UNAVAILABLE in output) == (9, True), output + errors


def test_all_hosts_are_shown(hosts: Hosts) -> None:
    cards = hosts.a.ctl_json("gpu", "list", "--all-hosts")
    assert {card["host"] for card in cards} == {"host-b", "host-c"}
    assert {card["uuid"] for card in cards} == {hosts.b.card()["uuid"], hosts.c.card()["uuid"]}
    assert hosts.a.ctl_json("gpu", "list") == []


@pytest.mark.parametrize("name", ["matmul", "fft_shared"])
def test_programs_run_on_another_hosts_gpu(
    hosts: Hosts, remote: str, compiler: Compiler, name: str
) -> None:
    program = next(entry for entry in RUNTIME_PROGRAMS if entry.name == name)
    done = hosts.a.run(remote, program.command(compiler, "static13"))
    assert program.problem(done.returncode, done.stdout) is None, done.stderr
    [piece] = hosts.a.ctl_json("slice", "list")
    assert (piece["host"], piece["gpu_uuid"]) == ("host-b", hosts.b.card()["uuid"])
    [lease] = hosts.b.ctl_json("lease", "list")
    assert (lease["kind"], lease["peer"]) == ("peer", "host-a")


def test_its_memory_is_the_far_slices(hosts: Hosts, remote: str, compiler: Compiler) -> None:
    done = hosts.a.run(remote, [str(compiler.driver("memory")), "info", "alloc", "5000"])
    assert "total 4294967296" in done.stdout
    assert "alloc 5000: 2\n" in done.stdout, done.stdout + done.stderr


def test_a_run_takes_the_nearest_card(hosts: Hosts, compiler: Compiler) -> None:
    """Here first, then where there is room."""
    loop = str(compiler.driver("loop"))
    size = ["run", "--compute", "60", "--memory", "1024", "--", loop]
    places = []
    processes = [hosts.b.popen(*size), hosts.b.popen(*size)]
    for process in processes:
        ready(process)
    places = sorted(piece["host"] for piece in hosts.b.ctl_json("slice", "list"))
    # The second finds no room on host-b's own card.
    assert places == ["host-b", "host-c"]
    for process in processes:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    for host in (hosts.b, hosts.c):
        wait_for("the slices go", lambda h=host: not h.ctl_json("slice", "list"))


def test_no_room_anywhere_says_why(hosts: Hosts) -> None:
    done = hosts.a.ctl("run", "--compute", "10", "--memory", "99999999", "--", "true")
    assert done.returncode == 4
    assert "this host has no GPU" in done.stderr and "host-b" in done.stderr


def test_limits_of_a_peer(hosts: Hosts) -> None:
    size = ("--compute", "1", "--memory", "16")
    for number in range(4):
        name = f"many-{number}"
        hosts.a.ctl("slice", "create", "--name", name, "--host", "host-c", *size, check=True)
    done = hosts.a.ctl("slice", "create", "--name", "many-4", "--host", "host-c", *size)
    assert done.returncode == 4 and "may have 4" in done.stderr
    assert len(hosts.c.ctl_json("slice", "list")) == 4
    for number in range(4):
        hosts.a.ctl("slice", "delete", f"many-{number}", check=True)
    wait_for("they are given back", lambda: not hosts.c.ctl_json("slice", "list"))


def test_unknown_hosts_and_names(hosts: Hosts, remote: str) -> None:
    size = ("--compute", "1", "--memory", "16")
    done = hosts.a.ctl("slice", "create", "--name", "x", "--host", "nobody", *size)
    assert done.returncode == 3 and "nobody" in done.stderr
    done = hosts.a.ctl("slice", "create", "--name", remote, "--host", "host-b", *size)
    assert done.returncode == 5
    done = hosts.b.ctl("slice", "delete", hosts.b.ctl_json("slice", "list")[0]["name"])
    assert done.returncode == 5 and "lent to another host" in done.stderr
    done = hosts.a.ctl("slice", "resize", remote, "--memory", "16")
    assert done.returncode == 5 and "host-b" in done.stderr


# ---- Faults -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["loop", "copies"])
@pytest.mark.parametrize("fault", ["link", "packets", "reset"])
def test_a_short_fault_is_survived(
    hosts: Hosts, remote: str, compiler: Compiler, name: str, fault: str
) -> None:
    with hosts.a.started(remote, [str(compiler.driver(name))]) as process:
        ready(process)
        fault_begins(hosts.network, fault)
        time.sleep(INTERRUPTION / 3)
        fault_ends(hosts.network, fault)
        time.sleep(INTERRUPTION)
        assert process.poll() is None, process.communicate()


@pytest.mark.parametrize("name", ["loop", "copies"])
@pytest.mark.parametrize("fault", ["link", "packets", "reset"])
def test_a_long_fault_ends_in_an_error(
    hosts: Hosts, remote: str, compiler: Compiler, name: str, fault: str
) -> None:
    with hosts.a.started(remote, [str(compiler.driver(name))]) as process:
        ready(process)
        fault_begins(hosts.network, fault)
        try:
            ends_with_error(process)
            wait_for("the end of all there", hosts.b.clean, PATIENCE)
        finally:
            fault_ends(hosts.network, fault)
    wait_for("the peers", lambda: not hosts.problems(hosts.a))
    done = hosts.a.run(remote, [str(compiler.driver("loop")), "3"])
    assert done.returncode == 0, done.stderr


def fault_begins(network: Network, fault: str) -> None:
    if fault == "link":
        network.link("host-b", "down")
    elif fault == "packets":
        network.drop_packets("host-b")
    else:
        network.reset_connections("host-b", RELAY)


def fault_ends(network: Network, fault: str) -> None:
    if fault == "link":
        network.link("host-b", "up")
    else:
        network.take_packets("host-b")


@pytest.mark.parametrize("side", ["a", "b"])
def test_gpupoold_is_killed(hosts: Hosts, remote: str, compiler: Compiler, side: str) -> None:
    host: HostPool = getattr(hosts, side)
    with hosts.a.started(remote, [str(compiler.driver("loop"))]) as process:
        ready(process)
        host.daemon_ends()
        time.sleep(1)
        assert process.poll() is None, process.communicate()
        host.start_daemon()
        wait_for("the peers", lambda: not hosts.problems(hosts.a) and not hosts.problems(hosts.b))
        time.sleep(1)
        assert process.poll() is None, process.communicate()
    done = hosts.a.run(remote, [str(compiler.driver("loop")), "3"])
    assert done.returncode == 0, done.stderr


def test_a_host_that_forgot_its_loans(hosts: Hosts, compiler: Compiler) -> None:
    size = ("--compute", "25", "--memory", "1024")
    hosts.a.ctl("slice", "create", "--name", "lost", "--host", "host-c", *size, check=True)
    with hosts.a.started("lost", [str(compiler.driver("loop"))]) as process:
        ready(process)
        [piece] = hosts.c.ctl_json("slice", "list")
        hosts.c.ctl("slice", "delete", "--force", piece["name"], check=True)
        ends_with_error(process)
    wait_for(
        "it is known as lost",
        lambda: hosts.a.ctl_json("slice", "list")[0]["gpu_health"] == "missing",
    )
    done = hosts.a.run("lost", ["true"])
    assert done.returncode == 5 and "does not know of it any more" in done.stderr
    hosts.a.ctl("slice", "delete", "lost", check=True)


def test_a_loan_that_nobody_names_ends(hosts: Hosts) -> None:
    """host-a asks, and is killed before it has stored the answer: as if it never was."""
    size = ("--compute", "1", "--memory", "16")
    hosts.a.ctl("slice", "create", "--name", "gone", "--host", "host-b", *size, check=True)
    hosts.a.daemon_ends()
    import sqlite3

    with sqlite3.connect(hosts.a.state_dir / "gpupoold.sqlite3") as state:
        state.execute("UPDATE borrowed SET state = 'asking', lease_id = ''")
        state.execute("DELETE FROM lease_slices")
        state.execute("DELETE FROM leases")
    hosts.a.start_daemon()
    assert hosts.a.ctl_json("slice", "list") == []
    wait_for("host-b takes it back", lambda: not hosts.b.ctl_json("slice", "list"), 120)
