"""Two virtual machines on one card: each has its own lease, region and quota."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.host import named
from tests.e2e.looks import gone, grant, leases, region_in_guest, whole
from tests.e2e.tenant import OUT_OF_MEMORY, Program


def test_two_machines_share_one_card(host, name):
    card = host.pool.ctl_json("gpu", "list")[0]["uuid"]
    machines = []
    for slice_name, memory in (("one", 1024), ("two", 3072)):
        size = ("--gpu", card, "--compute", "25", "--memory", str(memory))
        host.pool.ctl("slice", "create", "--name", slice_name, *size, check=True)
        machines.append(host.start(f"{name}-{slice_name}", named(slice_name)))
    first, second = machines
    one, two = whole(host, first), whole(host, second)
    assert one["lease"] != two["lease"] and one["region"] != two["region"]
    assert {lease["id"]: lease["slices"] for lease in leases(host)} == {
        one["lease"]: ["one"],
        two["lease"]: ["two"],
    }
    pieces = host.pool.ctl_json("slice", "list")
    assert {piece["gpu_uuid"] for piece in pieces} == {card}
    assert len({piece["uuid"] for piece in pieces}) == 2
    assert grant(first) == one["lease"] and grant(second) == two["lease"]
    # Each guest maps its own region.
    assert region_in_guest(first) == (1, one["lease"])
    assert region_in_guest(second) == (1, two["lease"])
    with Path(one["region"]).open("r+b") as region:
        region.seek(8192)
        region.write(b"of one's own")
    with Path(two["region"]).open("rb") as region:
        region.seek(8192)
        assert region.read(12) == bytes(12)
    with Program(host, one["lease"]) as mine, Program(host, two["lease"]) as yours:
        assert (mine.memory_mib, yours.memory_mib) == (1024, 3072)
        assert mine.allocate(2048) == OUT_OF_MEMORY
        assert yours.allocate(2048) == 0
        assert yours.allocate(2048) == OUT_OF_MEMORY
        assert mine.allocate(512) == 0
        # The end of one is nothing to the other.
        first.domain.destroy()
        gone(host, first.name, one["region"], mine)
        assert yours.allocate(512) == 0
        assert whole(host, second)["lease"] == two["lease"]
        assert region_in_guest(second) == (1, two["lease"])
        second.domain.destroy()
        gone(host, second.name, two["region"], yours)
