"""gpupoolctl topology in a network namespace of the test's making, beside what `ip` says there."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpupoold.testing.sandbox import DIE_WITH_PARENT
from tests.functional.pool import Pool, wait_for

PEERS = {
    "near": "192.0.2.7:7000",
    "far": "198.51.100.7:7000",
    "six": "[2001:db8:1::7]:7000",
    "hole": "203.0.113.7:7000",
    "none": "240.0.0.7:7000",
    "self": "192.0.2.5:7000",
    "name": "gpupool-peer.invalid:7000",
}
#: veth, since every kernel that runs containers has it. What the other end has no address for is
#: hidden, as a guest's.
NETWORK = """
ip link set lo up
ip link add gptest0 mtu 8900 type veth peer name gptest1
ip link set gptest1 up
ip address add 192.0.2.5/24 dev gptest0
ip address add 2001:db8::5/64 dev gptest0 nodad
ip link set gptest0 up
ip route add 198.51.100.0/24 via 192.0.2.1 mtu 1400
ip route add 2001:db8:1::/64 via 2001:db8::1
ip route add blackhole 203.0.113.0/24
"""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="makes a network namespace")


class Elsewhere(Pool):
    """A pool whose gpupoold is in the namespaces of another process."""

    holder = 0

    def inside(self, *command: str) -> list[str]:
        """The command line that runs a command there."""
        return ["nsenter", "--target", str(self.holder), "--net", "--mount", *command]

    def _spawn(self, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        if "gpupoold.cmd.daemon" in command:
            command = self.inside(*command)
        return super()._spawn(command, log)

    def ip(self, *arguments: str) -> list[dict[str, Any]]:
        """What `ip` says there."""
        command = self.inside("ip", "-j", *arguments)
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return [entry for entry in json.loads(done.stdout) if entry]


@pytest.fixture
def elsewhere(simulated_driver: Path, tmp_path: Path) -> Iterator[Elsewhere]:
    """It has a network of its own, with a sysfs that shows it, and peers."""
    script = f"set -e\n{NETWORK}\nmount -t sysfs sysfs /sys\necho ready\nexec sleep infinity"
    holder = subprocess.Popen(
        [*DIE_WITH_PARENT, "unshare", "--net", "--mount", "sh", "-c", script],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n", "no such network here"
        key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
        command = (
            f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
            f"-subj /CN=sandbox -addext subjectAltName=DNS:sandbox -keyout {key} -out {certificate}"
        )
        subprocess.run(command.split(), check=True, capture_output=True)
        peers = "\npeer = ".join(f"{name} {address}" for name, address in PEERS.items())
        relay = {
            "certificate_file": certificate,
            "key_file": key,
            "ca_file": certificate,
            "peer": peers,
        }
        pool = Elsewhere(driver_directory=simulated_driver, options={"relay": relay})
        pool.holder = holder.pid
        with pool:
            yield pool
    finally:
        holder.kill()
        holder.wait()


def test_routes_are_those_that_ip_tells(elsewhere: Elsewhere) -> None:
    wait_for("the address", lambda: "tentative" not in str(elsewhere.ip("address")), 10)
    found = elsewhere.ctl_json("topology")
    assert found["problem"] == ""
    links = {link["ifname"]: link for link in elsewhere.ip("address")}
    assert set(links) == {"lo", "gptest0", "gptest1"}
    assert [entry["name"] for entry in found["interfaces"]] == ["gptest0"]
    shown, told = found["interfaces"][0], links["gptest0"]
    assert (shown["mtu"], shown["state"]) == (told["mtu"], told["operstate"].lower())
    addresses = [f"{entry['local']}/{entry['prefixlen']}" for entry in told["addr_info"]]
    assert sorted(shown["addresses"]) == sorted(addresses)
    speed = elsewhere.inside("cat", "/sys/class/net/gptest0/speed")
    assert shown["speed_mbps"] == int(subprocess.check_output(speed))
    assert (shown["driver"], shown["pci_address"], shown["numa_node"]) == ("veth", "", None)

    peers = {entry["name"]: entry for entry in found["peers"]}
    assert list(peers) == list(PEERS)
    for name in ("near", "far", "six", "self"):
        peer = peers[name]
        address = PEERS[name].rpartition(":")[0].strip("[]")
        (route,) = elsewhere.ip("route", "get", address)
        metrics = {key: value for entry in route.get("metrics", []) for key, value in entry.items()}
        assert (peer["resolved"], peer["interface"]) == (address, route["dev"]), peer
        assert (peer["gateway"], peer["source"]) == (route.get("gateway", ""), route["prefsrc"])
        assert peer["mtu"] == metrics.get("mtu", links[route["dev"]]["mtu"]), peer
        assert peer["problem"] == ""
        cards = [card["uuid"] for card in found["gpus"]]
        assert [path["gpu_uuid"] for path in peer["paths"]] == cards and cards
        assert {path["interface"] for path in peer["paths"]} == {route["dev"]}
    # What the comparison above is worth.
    assert (peers["far"]["gateway"], peers["far"]["mtu"]) == ("192.0.2.1", 1400)
    assert peers["six"]["gateway"] == "2001:db8::1"
    assert "no RDMA device belongs to it, so TCP" in peers["far"]["paths"][0]["why"]
    assert "this host's own" in peers["self"]["paths"][0]["why"]
    for name, words in (
        ("hole", "there is no route to 203.0.113.7: the routing table drops"),
        ("none", "there is no route to 240.0.0.7: "),
        ("name", "the name gpupool-peer.invalid "),
    ):
        assert peers[name]["problem"].startswith(words), peers[name]
        assert peers[name]["interface"] == "" and peers[name]["mtu"] is None
        assert elsewhere.ctl("topology").stdout.count(peers[name]["problem"]) == 1

    # Nothing is remembered: a route that goes is gone at once.
    subprocess.run(elsewhere.inside("ip", "route", "delete", "198.51.100.0/24"), check=True)
    again = {entry["name"]: entry for entry in elsewhere.ctl_json("topology")["peers"]}
    assert (
        again["far"]["problem"] == ("there is no route to 198.51.100.7: Network is unreachable")
        and again["near"] == peers["near"]
    )


def test_every_user_may_see_it(pool: Pool) -> None:
    """On this machine as it is."""
    command = pool.ctl_command("--json", "topology")
    done = subprocess.run(
        command, user=65534, group=65534, extra_groups=[], env=pool.environment, cwd="/",
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    mine = json.loads(done.stdout)
    assert mine == pool.ctl_json("topology")
    assert [card["pci_address"] for card in mine["gpus"]] and mine["peers"] == []
