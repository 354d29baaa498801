"""Distances, hardware, routes and paths on a machine of files (machine.py)."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace

import pytest

from gpupoold.api import service
from gpupoold.conf.load import PeerSettings
from gpupoold.gpus.topology import Distance, Surveyor
from gpupoold.gpus.topology import names as names_module
from gpupoold.gpus.topology.distances import chain_of, distance, farthest, sysfs_address
from gpupoold.gpus.topology.model import Place
from gpupoold.gpus.topology.names import Resolver
from gpupoold.gpus.topology.netlink import Link, NetworkError, Route
from gpupoold.gpus.topology.survey import host_of
from gpupoold.gpus.topology.sysfs import Sysfs

from . import test_pool
from .fakes import gpu
from .machine import DEVICES, GPU0, GPU1, LINKS, Kernel, Tree, machine
from .served import Served

CERTIFICATES = {
    "relay_certificate_file": "/c.pem",
    "relay_key_file": "/k.pem",
    "relay_ca_file": "/ca.pem",
}


def peer(name: str, address: str) -> PeerSettings:
    return PeerSettings(name, address, 0, 0, 0)


def place(name: str) -> Place:
    chain = DEVICES[name]
    return Place(chain_of(chain.split("/")), int("0000:80" in chain))


# ---- distances ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "to_gpu0", "to_gpu1"),
    [
        # nvidia-smi's words: PIX "at most a single PCIe bridge": the switch that both are on.
        ("eth1", "PIX", "SYS"),
        # PXB "multiple PCIe bridges (without traversing the PCIe Host Bridge)": two switches.
        ("ib0", "PXB", "SYS"),
        # PHB "a PCIe Host Bridge (typically the CPU)": two root ports of one host bridge.
        ("eth0", "PHB", "SYS"),
        # NODE "the interconnect between PCIe Host Bridges within a NUMA node".
        ("eth2", "NODE", "SYS"),
        # SYS "the SMP interconnect between NUMA nodes"; from the other card a host bridge.
        ("eth3", "SYS", "PHB"),
    ],
)
def test_distances_on_a_machine_with_switches_and_nodes(device, to_gpu0, to_gpu1):
    for card, expected in (("gpu0", to_gpu0), ("gpu1", to_gpu1)):
        assert distance(place(device), place(card)) == expected
        assert distance(place(card), place(device)) == expected


def test_distances_at_the_edges():
    function0 = Place(("pci0000:00", "0000:00:01.0", "0000:01:00.0"), 0)
    function1 = Place(("pci0000:00", "0000:00:01.0", "0000:01:00.1"), 0)
    assert distance(function0, function1) == Distance.PIX  # of one adapter
    on_root = Place(("pci0000:00", "0000:00:05.0"), 0)
    assert distance(on_root, Place(("pci0000:00", "0000:00:06.0"), 0)) == Distance.PHB  # in a VM
    # The one below a second switch of the other's: two switches.
    behind = Place((*function0.chain, "0000:02:00.0", "0000:03:00.0"), 0)
    assert distance(behind, function1) == Distance.PXB
    # Without a place: the nodes tell, where they are known.
    assert distance(Place((), 0), on_root) == Distance.NODE
    assert distance(Place((), 1), on_root) == Distance.SYS
    assert distance(Place((), -1), on_root) == Distance.UNKNOWN
    elsewhere = Place(("pci0000:80", "0000:80:05.0"), -1)
    assert distance(on_root, elsewhere) == Distance.UNKNOWN
    assert farthest([Distance.PIX, Distance.SYS, Distance.PHB]) == Distance.SYS
    assert farthest([]) == Distance.UNKNOWN


def test_places_out_of_paths():
    virtio = "/sys/devices/pci0000:00/0000:00:03.0/virtio2/net/eth0"
    assert chain_of(virtio.split("/")) == ("pci0000:00", "0000:00:03.0")
    # Intel VMD: a host bridge behind a device of another one, with a domain of five digits.
    vmd = "/sys/devices/pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:06.0/10000:e1:00.0"
    assert chain_of(vmd.split("/"))[-1] == "10000:e1:00.0"
    hyperv = "/sys/devices/LNXSYSTM:00/VMBUS:00/47505500-0001/pci0001:00/0001:00:00.0"
    assert chain_of(hyperv.split("/")) == ("pci0001:00", "0001:00:00.0")
    assert chain_of(["", "sys", "devices", "virtual", "net", "bond0"]) == ()
    assert sysfs_address("00000000:3B:00.0") == "0000:3b:00.0"
    assert sysfs_address("00010000:E1:00.0") == "10000:e1:00.0"
    assert sysfs_address("nonsense") == "nonsense"


# ---- hardware -----------------------------------------------------------------------------------


def test_cards(root):
    tree = machine(root)
    sysfs = Sysfs(root)
    assert sysfs.card("00000000:03:00.0") == place("gpu0")
    assert sysfs.card("00000000:83:00.0", 1) == place("gpu1")
    # A simulated card has no place, and its node may be known.
    assert sysfs.card("00000000:99:00.0") == Place()
    assert sysfs.card("00000000:99:00.0", 1) == Place((), 1)
    # Not even where another device happens to have its address.
    assert sysfs.card("00000000:08:00.0", 1) == Place((), 1)
    assert Sysfs(root / "not there").card("00000000:03:00.0") == Place()
    # Where there is one node, everything is on it, though the kernel says -1.
    tree.pci("pci0000:c0/0000:c0:01.0", -1)
    assert Sysfs(root).card("0000:c0:01.0") == Place()  # no card
    alone = Tree(root / "alone", nodes="0")
    alone.pci("pci0000:00/0000:00:05.0", -1, "0x030000")
    assert Sysfs(alone.root).card("0000:00:05.0").numa_node == 0


def test_interfaces_hardware(root):
    tree = machine(root)
    found = Sysfs(root).interface("eth1")
    assert found.place == place("eth1") and found.driver == "mlx5_core"
    assert (found.physical, found.speed_mbps) == (True, 100000)
    assert Sysfs(root).interface("eth2").speed_mbps is None  # -1: it is down
    bond = Sysfs(root).interface("bond0")
    assert (bond.place, bond.driver, bond.physical) == (Place(), "", False)
    tree.interface("eth5", "", 4294967295)
    assert Sysfs(root).interface("eth5").speed_mbps is None
    # A port of the adapter's own switch is a guest's, though it has the adapter's device.
    tree.interface("eth1_0", f"devices/{DEVICES['eth1']}", phys_port_name="pf0vf0", dev_port=0)
    assert not Sysfs(root).interface("eth1_0").physical
    assert Sysfs(root).rdma_devices()[0].ports[0].interfaces == ("eth1", "eth1.7")


def test_rdma_devices(root):
    tree = machine(root)
    devices = {device.name: device for device in Sysfs(root).rdma_devices()}
    assert list(devices) == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_bond_0"]
    port = devices["mlx5_0"].ports[0]
    assert (port.number, port.state, port.rate_gbps) == (1, "ACTIVE", 100.0)
    assert (port.link_layer, port.interfaces) == ("Ethernet", ("eth1", "eth1.7"))
    assert devices["mlx5_0"].place == place("eth1")
    # InfiniBand has no interfaces in its address table: those of the same PCI function.
    port = devices["mlx5_1"].ports[0]
    assert (port.link_layer, port.interfaces) == ("InfiniBand", ("ib0",))
    assert devices["mlx5_2"].ports[0].state == "DOWN"
    # Two ports on one PCI function: the interface's dev_port tells which.
    device = tree.pci("pci0000:00/0000:00:09.0", 0)
    tree.interface("ib1", device, dev_port=0)
    tree.interface("ib2", device, dev_port=1)
    two = tree.rdma("mlx4_0", device)
    tree.port(two, 1, "4: ACTIVE", "2.5 Gb/sec (1X SDR)", "InfiniBand")
    tree.port(two, 2, "2: INIT", "nonsense", "InfiniBand")
    # In software, on an interface.
    soft = tree.rdma("rxe0", "")
    tree.write(f"{soft}/parent", "eth0")
    tree.port(soft, 1, "4: ACTIVE", "10 Gb/sec (1X QDR)", "Ethernet")
    devices = {device.name: device for device in Sysfs(root).rdma_devices()}
    ports = devices["mlx4_0"].ports
    assert [(p.number, p.state, p.rate_gbps, p.interfaces) for p in ports] == [
        (1, "ACTIVE", 2.5, ("ib1",)),
        (2, "INIT", 0.0, ("ib2",)),
    ]
    assert devices["rxe0"].place == Place() and devices["rxe0"].ports[0].interfaces == ("eth0",)
    assert Sysfs(root / "not there").rdma_devices() == []


# ---- names --------------------------------------------------------------------------------------


def test_names_are_asked_for_in_a_bounded_time(monkeypatch):
    monkeypatch.setattr(names_module, "WAIT_SECONDS", 0.3)
    go, asked = threading.Event(), []

    def look_up(name: str) -> list[str]:
        asked.append(name)
        if name.startswith("slow"):
            go.wait(30)
        if name == "none":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return ["192.0.2.7", "2001:db8::7"] if name != "empty" else []

    resolver = Resolver(look_up)
    wanted = ["192.0.2.1", "2001:db8::1", "good", "none", "empty", "slow1", "slow2"]
    begin = time.monotonic()
    answers = resolver.resolve(wanted)
    took = time.monotonic() - begin
    assert 0.3 <= took < 5  # all together; the upper limit is for a busy machine
    assert answers["192.0.2.1"] == (["192.0.2.1"], "")
    assert answers["2001:db8::1"] == (["2001:db8::1"], "")
    assert answers["good"] == (["192.0.2.7", "2001:db8::7"], "")
    assert answers["none"][1] == "the name none cannot be resolved: Name or service not known"
    assert answers["empty"][1] == "the name empty has no address"
    assert answers["slow1"] == ([], "the name slow1 was not resolved within 0.3 s")
    # Nobody waits for the same question again, and nobody asks it a second time.
    begin = time.monotonic()
    assert resolver.resolve(["slow1", "good"])["slow1"][1]
    assert time.monotonic() - begin < 0.3
    assert asked.count("slow1") == asked.count("good") == 1
    go.set()
    test_pool.until(lambda: resolver.resolve(["slow1"])["slow1"][0])
    assert asked.count("slow1") == 1
    monkeypatch.setattr(names_module, "KEEP_SECONDS", 0.0)
    resolver.resolve(["good"])
    assert asked.count("good") == 2


def test_a_name_that_no_resolver_takes():
    assert "cannot be resolved" in Resolver().resolve(["a" * 70])["a" * 70][1]


def test_hosts_of_addresses():
    assert host_of("gpu7.example.org:7000") == "gpu7.example.org"
    assert host_of("192.0.2.7:7000") == "192.0.2.7"
    assert host_of("[2001:db8::7]:7000") == "2001:db8::7"


# ---- the whole ----------------------------------------------------------------------------------

ROUTES = {
    "198.51.100.7": Route(3, "", "198.51.100.5", 0, False),
    "198.18.0.7": Route(9, "198.51.100.1", "198.51.100.5", 1400, False),
    "203.0.113.7": Route(4, "", "203.0.113.5", 0, False),
    "192.0.2.7": Route(2, "", "192.0.2.5", 0, False),
    "10.0.0.7": Route(5, "", "10.0.0.5", 0, False),
    "2001:db8::7": Route(8, "", "2001:db8::5", 0, False),
    "192.168.122.7": Route(10, "", "192.168.122.1", 0, False),
    "192.0.2.5": Route(1, "", "192.0.2.5", 0, True),
    "172.16.0.7": Route(99, "", "172.16.0.5", 0, False),
    "169.254.0.7": Route(13, "", "", 0, False),
}


def survey(root, *peers: PeerSettings, gpus=(GPU0, GPU1), kernel=None, look_up=None):
    kernel = kernel or Kernel(ROUTES)
    resolver = Resolver(look_up) if look_up else None
    found = Surveyor(peers, Sysfs(root), kernel, resolver).look(gpus)
    assert kernel.opened == kernel.closed
    return found


def test_interfaces_that_are_shown(root):
    machine(root)
    found = {entry.name: entry for entry in survey(root).interfaces}
    # Hardware, and what has an address; not lo, and nothing that leads to guests.
    assert list(found) == ["eth0", "eth1", "ib0", "eth2", "eth3", "eth4", "bond0", "virbr0"]
    eth1 = found["eth1"]
    assert (eth1.state, eth1.mtu, eth1.speed_mbps) == ("up", 9000, 100000)
    assert (eth1.place, eth1.driver) == (place("eth1"), "mlx5_core")
    assert eth1.addresses == ("198.51.100.5/24",)
    assert eth1.distances == {GPU0.uuid: "PIX", GPU1.uuid: "SYS"}
    assert (found["eth2"].state, found["eth2"].speed_mbps) == ("down", None)
    bond = found["bond0"]
    assert (bond.driver, bond.place.pci_address, bond.speed_mbps) == ("bond", "", 50000)
    assert bond.distances == {GPU0.uuid: "SYS", GPU1.uuid: "PHB"}  # its parts'
    assert found["virbr0"].distances == {GPU0.uuid: "UNKNOWN", GPU1.uuid: "UNKNOWN"}
    # A guest's interface that a route uses is shown all the same.
    found = survey(root, peer("b", "169.254.0.7:1"))
    assert "veth2" in [entry.name for entry in found.interfaces]
    # A bond without address has hardware.
    links = [replace(link, addresses=()) for link in LINKS]
    found = survey(root, kernel=Kernel(links=links))
    assert [entry.name for entry in found.interfaces][-1] == "bond0"


def test_a_bond_is_as_far_as_its_farthest_part(root):
    machine(root)
    links = [Link(3, "eth1", master=8), Link(5, "eth2", master=8), Link(8, "bond0", "bond")]
    found = survey(root, kernel=Kernel(links=links)).interfaces
    assert [entry.distances[GPU0.uuid] for entry in found] == ["PIX", "NODE", "NODE"]


def test_routes_and_paths(root):
    tree = machine(root)
    soft = tree.rdma("rxe0", "")
    tree.port(soft, 1, "4: ACTIVE", "10 Gb/sec (1X QDR)", "Ethernet", "eth0")
    found = survey(
        root,
        peer("roce", "198.51.100.7:7000"),
        peer("vlan", "198.18.0.7:7000"),
        peer("ib", "203.0.113.7:7000"),
        peer("soft", "192.0.2.7:7000"),
        peer("down", "10.0.0.7:7000"),
        peer("bonded", "[2001:db8::7]:7000"),
        peer("bridged", "192.168.122.7:7000"),
        peer("self", "192.0.2.5:7000"),
        peer("gone", "172.16.0.7:7000"),
        peer("none", "240.0.0.7:7000"),
    )
    peers = {entry.name: entry for entry in found.peers}
    roce = peers["roce"]
    assert (roce.address, roce.resolved) == ("198.51.100.7:7000", "198.51.100.7")
    assert (roce.interface, roce.gateway) == ("eth1", "")
    assert (roce.source, roce.mtu) == ("198.51.100.5", 9000)
    assert (peers["vlan"].gateway, peers["vlan"].mtu) == ("198.51.100.1", 1400)
    assert "eth1.7" in [entry.name for entry in found.interfaces]

    def path(name: str, card=GPU0):
        return next(path for path in peers[name].paths if path.gpu_uuid == card.uuid)

    def short(name: str, card=GPU0):
        chosen = path(name, card)
        return chosen.interface, chosen.rdma_device, chosen.rdma_port, chosen.distance.value

    assert short("roce") == ("eth1", "mlx5_0", 1, "PIX")
    assert short("roce", GPU1) == ("eth1", "mlx5_0", 1, "SYS")
    assert path("roce").why == (
        "the route leaves by eth1; port 1 of RDMA device mlx5_0 belongs to it and is active"
    )
    assert short("vlan") == ("eth1.7", "mlx5_0", 1, "PIX")
    assert short("ib") == ("ib0", "mlx5_1", 1, "PXB")
    assert short("soft") == ("eth0", "rxe0", 1, "PHB")  # where its interface is
    assert short("down") == ("eth2", "", 0, "NODE")
    assert path("down").why == (
        "the route leaves by eth2; its port 1 of RDMA device mlx5_2 is DOWN, so TCP"
    )
    assert short("bonded", GPU1) == ("bond0", "mlx5_bond_0", 1, "PHB")
    assert peers["bonded"].resolved == "2001:db8::7"
    assert short("bridged") == ("virbr0", "", 0, "UNKNOWN")
    assert path("bridged").why == (
        "the route leaves by virbr0; no RDMA device belongs to it, so TCP"
    )
    assert short("self") == ("lo", "", 0, "UNKNOWN") and "this host's own" in path("self").why
    assert short("gone") == ("interface 99", "", 0, "UNKNOWN") and peers["gone"].mtu == 0
    none = peers["none"]
    assert none.problem == "there is no route to 240.0.0.7: Network is unreachable"
    assert (none.resolved, none.interface, none.mtu) == ("", "", 0)
    assert short("none") == ("", "", 0, "UNKNOWN") and path("none").why == none.problem


def test_of_several_rdma_devices_the_nearest_that_is_active(root):
    tree = machine(root)
    links = [
        Link(3, "eth1", master=8),  # PIX from GPU 0
        Link(2, "eth0", master=8),  # PHB
        Link(6, "eth3", master=8),  # SYS, and PHB from GPU 1
        Link(8, "bond0", "bond"),
    ]
    for name, interface in (("mlx5_5", "eth0"), ("mlx5_6", "eth3")):
        rdma = tree.rdma(name, f"devices/{DEVICES[interface]}")
        tree.port(rdma, 1, "4: ACTIVE", "100 Gb/sec (4X EDR)", "Ethernet")

    def chosen(kernel: Kernel) -> list[str]:
        (found,) = survey(root, peer("b", "2001:db8::7:1"), kernel=kernel).peers
        return [path.rdma_device for path in found.paths]

    kernel = Kernel({"2001:db8::7": Route(8, "", "", 0, False)}, links)
    assert chosen(kernel) == ["mlx5_0", "mlx5_6"]
    state = tree.root / f"devices/{DEVICES['eth1']}/infiniband/mlx5_0/ports/1/state"
    state.write_text("1: DOWN\n")
    # eth3 has mlx5_bond_0 on its PCI function, too: as near, and later by its name.
    assert chosen(kernel) == ["mlx5_5", "mlx5_6"]
    # A bridge's address is not known to the RDMA devices of its parts.
    kernel = Kernel(kernel.routes, [*links[:3], Link(8, "br0", "bridge")])
    assert chosen(kernel) == ["", ""]


def test_the_address_that_has_a_route(root):
    machine(root)
    addresses = {"both": ["2001:db8:1::7", "192.0.2.7"], "no": ["2001:db8:1::7", "240.0.0.1"]}
    found = survey(root, peer("a", "both:1"), peer("b", "no:1"), look_up=addresses.__getitem__)
    assert found.peers[0].resolved == "192.0.2.7" and found.peers[0].problem == ""
    assert found.peers[1].problem == "there is no route to 2001:db8:1::7: Network is unreachable"


def test_a_simulated_card_has_its_node(root):
    machine(root)
    simulated = replace(gpu(0), pci_address="00000000:f1:00.0", numa_node=0)
    unknown = replace(gpu(1), pci_address="00000000:f2:00.0", numa_node=-1)
    found = survey(root, peer("b", "198.51.100.7:1"), gpus=(simulated, unknown))
    eth1 = next(entry for entry in found.interfaces if entry.name == "eth1")
    assert eth1.distances == {simulated.uuid: "NODE", unknown.uuid: "UNKNOWN"}
    assert [path.distance.value for path in found.peers[0].paths] == ["NODE", "UNKNOWN"]


def test_a_kernel_that_does_not_answer(root):
    class Silent(Kernel):
        def links(self):
            raise NetworkError("the kernel does not list its interfaces: no memory")

    machine(root)
    found = survey(root, peer("b", "192.0.2.7:1"), kernel=Silent())
    assert found.problem == "the kernel does not list its interfaces: no memory"
    assert found.interfaces == [] and len(found.rdma_devices) == 4
    assert found.peers[0].problem == found.problem


# ---- the interface and gpupoolctl ---------------------------------------------------------------


@pytest.fixture
def served(root, monkeypatch):
    """A host with two peers on the machine of files."""
    (root / "sys").mkdir()
    machine(root / "sys")

    def surveyor(peers):
        return Surveyor(peers, Sysfs(root / "sys"), Kernel(ROUTES))

    monkeypatch.setattr(service, "Surveyor", surveyor)
    text = "near 198.51.100.7:7000 slices=1\npeer = far 240.0.0.7:7000"
    monkeypatch.setattr(test_pool, "gpu", lambda index: (GPU0, GPU1)[index])
    made = Served(root, **CERTIFICATES, relay_peer=text)
    yield made
    made.stop()
    made.broker.close()


def test_topology_as_json(served):
    found = served.json("topology")
    assert list(found) == ["gpus", "interfaces", "rdma_devices", "peers", "problem"]
    assert found["gpus"][0] == {
        "index": 0,
        "uuid": GPU0.uuid,
        "name": "Test GPU",
        "pci_address": "00000000:03:00.0",
        "numa_node": 0,
        "cpu_affinity": "0-1",
    }
    interfaces = {entry["name"]: entry for entry in found["interfaces"]}
    assert interfaces["eth1"] == {
        "name": "eth1",
        "state": "up",
        "mtu": 9000,
        "speed_mbps": 100000,
        "pci_address": "0000:04:00.0",
        "numa_node": 0,
        "driver": "mlx5_core",
        "addresses": ["198.51.100.5/24"],
        "distances": {GPU0.uuid: "PIX", GPU1.uuid: "SYS"},
    }
    assert interfaces["bond0"]["numa_node"] is None and interfaces["bond0"]["pci_address"] == ""
    assert interfaces["eth2"]["speed_mbps"] is None
    assert found["rdma_devices"][1] == {
        "name": "mlx5_1",
        "pci_address": "0000:07:00.0",
        "numa_node": 0,
        "ports": [
            {
                "number": 1,
                "state": "ACTIVE",
                "rate_gbps": 200.0,
                "link_layer": "InfiniBand",
                "interfaces": ["ib0"],
            }
        ],
        "distances": {GPU0.uuid: "PXB", GPU1.uuid: "SYS"},
    }
    near, far = found["peers"]
    assert {key: value for key, value in near.items() if key != "paths"} == {
        "name": "near",
        "address": "198.51.100.7:7000",
        "resolved": "198.51.100.7",
        "interface": "eth1",
        "gateway": "",
        "source": "198.51.100.5",
        "mtu": 9000,
        "problem": "",
    }
    assert near["paths"][0] == {
        "gpu_uuid": GPU0.uuid,
        "interface": "eth1",
        "rdma_device": "mlx5_0",
        "rdma_port": 1,
        "distance": "PIX",
        "why": "the route leaves by eth1; port 1 of RDMA device mlx5_0 belongs to it and is active",
    }
    assert (far["problem"], far["mtu"]) == (
        "there is no route to 240.0.0.7: Network is unreachable",
        None,
    )
    assert far["paths"][0]["rdma_port"] is None and found["problem"] == ""


def test_topology_for_people(served):
    done = served.ctl("topology")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    eth1 = ["eth1", "up", "9000", "100000", "0000:04:00.0", "0", "mlx5_core", "198.51.100.5/24"]
    assert eth1 in rows
    assert ["mlx5_1", "1", "ACTIVE", "200", "InfiniBand", "ib0", "0000:07:00.0", "0"] in rows
    assert ["DISTANCE", "GPU0", "GPU1"] in rows
    assert ["eth1", "PIX", "SYS"] in rows and ["mlx5_1", "PXB", "SYS"] in rows
    near = ["near", "198.51.100.7:7000", "198.51.100.7", "eth1", "-", "198.51.100.5", "9000", "-"]
    assert near in rows
    assert ["near", "GPU1", "eth1", "mlx5_0", "1", "SYS", "the", "route"] in [r[:8] for r in rows]
    assert "there is no route to 240.0.0.7: Network is unreachable" in done.stdout
    assert "PIX   at most one PCIe switch" in done.stdout
