"""Admission and placement; expected values are worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupoold.errors import Conflict, InvalidRequest, NoCapacity, NotFound, NotInThisRelease
from gpupoold.model import GpuMode, GpuState, Health, Slice, SliceKind, SliceMode
from gpupoold.slices import planning
from gpupoold.slices.identity import free_pci_address, parse_pci_address, pci_address
from gpupoold.slices.planning import Request, plan_slice

from .fakes import gpu


def state(index: int = 0, memory: int = 10000, reserve: int = 1000, **more) -> GpuState:
    return GpuState(gpu(index, memory), reserve_mib=reserve, **more)


def piece(index: int, compute: int, memory: int, number: int = 0) -> Slice:
    return Slice(
        id=f"s{index}-{number}",
        name=f"s{index}-{number}",
        kind=SliceKind.SHARED,
        gpu_uuid=gpu(index).uuid,
        compute_percent=compute,
        memory_mib=memory,
        mode=SliceMode.HARD,
        priority=5,
        virtual_uuid=f"GPU-{number}",
        pci_address=pci_address(number),
        owner_uid=0,
        temporary=False,
        created_at=0.0,
    )


def want(compute: int, memory: int, **more) -> Request:
    return Request(name="new", compute_percent=compute, memory_mib=memory, **more)


def test_the_reserve_is_not_given_away():
    assert plan_slice(want(100, 9000), [state()], []).gpu_uuid == gpu(0).uuid
    with pytest.raises(NoCapacity, match="9000 MiB left"):
        plan_slice(want(1, 9001), [state()], [])


def test_what_the_driver_reserves_is_not_given_away():
    reserved = GpuState(gpu(0, 10000, reserved_mib=500), reserve_mib=1000)
    plan_slice(want(1, 8500), [reserved], [])
    with pytest.raises(NoCapacity):
        plan_slice(want(1, 8501), [reserved], [])


def test_compute_of_a_card_is_never_promised_twice():
    taken = [piece(0, 60, 10, 0), piece(0, 15, 10, 1)]
    plan_slice(want(25, 10), [state()], taken)
    with pytest.raises(NoCapacity, match="25 % of its compute left"):
        plan_slice(want(26, 10), [state()], taken)


def test_pack_takes_the_fullest_card_that_has_room():
    cards = [state(0), state(1), state(2)]
    taken = [piece(1, 50, 1000, 0), piece(2, 80, 1000, 1)]
    assert plan_slice(want(10, 10), cards, taken, "pack").gpu_uuid == gpu(2).uuid
    assert plan_slice(want(30, 10), cards, taken, "pack").gpu_uuid == gpu(1).uuid
    assert plan_slice(want(60, 10), cards, taken, "pack").gpu_uuid == gpu(0).uuid


def test_spread_takes_the_emptiest_card_and_equal_ones_in_order():
    cards = [state(0), state(1), state(2)]
    assert plan_slice(want(10, 10), cards, [], "spread").gpu_uuid == gpu(0).uuid
    assert plan_slice(want(10, 10), cards, [piece(0, 1, 1)], "spread").gpu_uuid == gpu(1).uuid


def test_a_full_memory_makes_a_card_full_whatever_its_compute():
    cards = [state(0), state(1)]
    taken = [piece(0, 1, 8000, 0), piece(1, 40, 100, 1)]
    assert plan_slice(want(1, 100), cards, taken, "spread").gpu_uuid == gpu(1).uuid
    assert plan_slice(want(1, 100), cards, taken, "pack").gpu_uuid == gpu(0).uuid


@pytest.mark.parametrize(
    "more", [{"drained": True}, {"health": Health.FAILED}, {"health": Health.MISSING}]
)
def test_a_card_that_takes_none_is_passed_over(more):
    assert plan_slice(want(1, 1), [state(0, **more), state(1)], []).gpu_uuid == gpu(1).uuid
    with pytest.raises(NoCapacity):
        plan_slice(want(1, 1), [state(0, **more)], [])
    with pytest.raises(Conflict):
        plan_slice(
            want(1, 1, gpu="0" if not more.get("health") else gpu(0).uuid), [state(0, **more)], []
        )


def test_a_card_with_a_warning_still_takes_slices():
    plan_slice(want(1, 1), [state(0, health=Health.WARNING)], [])


def test_a_card_of_another_mode_takes_no_shared_slice():
    with pytest.raises(Conflict, match="mode whole"):
        plan_slice(want(1, 1, gpu=gpu(0).uuid), [state(0, mode=GpuMode.WHOLE)], [])


def test_a_named_card_that_is_full_is_no_capacity():
    with pytest.raises(NoCapacity):
        plan_slice(want(1, 9001, gpu=gpu(0).uuid), [state(0), state(1, memory=99999)], [])


def test_a_card_is_found_by_uuid_beginning_and_index():
    cards = [state(0), state(1)]
    assert planning.find_gpu(cards, gpu(1).uuid).gpu.index == 1
    assert planning.find_gpu(cards, "gpu-00000001").gpu.index == 1
    assert planning.find_gpu(cards, "1").gpu.index == 1
    for wrong in ("7", "GPU-0000", "GPU-9", ""):
        with pytest.raises(NotFound):
            planning.find_gpu(cards, wrong)


@pytest.mark.parametrize(
    ("compute", "memory"), [(0, 1), (101, 1), (-1, 1), (1, 0), (1, -5), (1, 1 << 40)]
)
def test_sizes_that_no_card_has(compute, memory):
    with pytest.raises(InvalidRequest):
        plan_slice(want(compute, memory), [state()], [])


@pytest.mark.parametrize(
    "name",
    [
        "",
        "-x",
        ".x",
        "a b",
        "a/b",
        "ä",
        "x" * 64,
        "a\n",
        "../x",
        "x;y",
        "a\0",
        "GPU-6f1c2a3b-0000-4000-8000-0123456789ab",
        "6f1c2a3b-0000-4000-8000-0123456789ab",
        "gpu-6F1C2A3B-0000-4000-8000-0123456789AB",
        "6f1c2a3b000040008000" + "0123456789ab",
        "MIG-6f1c2a3b-0000-4000-8000-0123456789ab",
    ],
)
def test_names_that_are_refused(name):
    with pytest.raises(InvalidRequest):
        planning.check_name(name)


@pytest.mark.parametrize(
    "name", ["a", "9", "web-1", "A.b_c-d", "x" * 63, "gpu-0", "GPU-a", "deadbeef"]
)
def test_names_that_are_taken(name):
    planning.check_name(name)


def test_kinds_of_later_releases_say_so():
    for kind in ("mig", "whole"):
        with pytest.raises(NotInThisRelease, match=kind):
            plan_slice(want(1, 1, kind=kind), [state()], [])
    with pytest.raises(InvalidRequest):
        plan_slice(want(1, 1, kind="half"), [state()], [])
    with pytest.raises(InvalidRequest):
        plan_slice(want(1, 1, mode="soft"), [state()], [])
    with pytest.raises(InvalidRequest):
        plan_slice(want(1, 1, priority=11), [state()], [])
    with pytest.raises(InvalidRequest):
        plan_slice(want(1, 1, profile="1g.10gb"), [state()], [])


def test_a_host_without_cards_has_no_capacity():
    with pytest.raises(NoCapacity, match="no GPU"):
        plan_slice(want(1, 1), [], [])


def test_resize_within_the_room_that_is_left_by_others():
    mine, other = piece(0, 20, 4000, 0), piece(0, 30, 2000, 1)
    planning.check_resize(mine, 70, 7000, state(), [mine, other], 0)
    with pytest.raises(NoCapacity):
        planning.check_resize(mine, 71, 7000, state(), [mine, other], 0)
    with pytest.raises(NoCapacity):
        planning.check_resize(mine, 20, 7001, state(), [mine, other], 0)


def test_resize_never_below_what_is_in_use():
    mine = piece(0, 20, 4000)
    planning.check_resize(mine, 20, 100, state(), [mine], 100 << 20)
    with pytest.raises(Conflict, match="uses 101 MiB"):
        planning.check_resize(mine, 20, 100, state(), [mine], (100 << 20) + 1)


def test_a_drained_card_lets_slices_shrink_but_not_grow():
    mine = piece(0, 20, 4000)
    planning.check_resize(mine, 10, 2000, state(drained=True), [mine], 0)
    with pytest.raises(Conflict):
        planning.check_resize(mine, 21, 4000, state(drained=True), [mine], 0)


@given(
    st.lists(st.tuples(st.integers(1, 100), st.integers(1, 9000)), max_size=30),
    st.sampled_from(["pack", "spread"]),
)
def test_whatever_is_asked_for_no_card_is_ever_promised_twice(requests, policy):
    cards = [state(0), state(1, memory=5000), state(2, memory=500)]
    slices: list[Slice] = []
    for number, (compute, memory) in enumerate(requests):
        try:
            plan = plan_slice(want(compute, memory), cards, slices, policy)
        except NoCapacity:
            # Refused only when indeed no card has room.
            for card in cards:
                mine = [p for p in slices if p.gpu_uuid == card.gpu.uuid]
                assert (
                    sum(p.memory_mib for p in mine) + memory > max(0, card.gpu.memory_mib - 1000)
                    or sum(p.compute_percent for p in mine) + compute > 100
                )
            continue
        index = next(c.gpu.index for c in cards if c.gpu.uuid == plan.gpu_uuid)
        slices.append(piece(index, compute, memory, number))
    for card in cards:
        mine = [p for p in slices if p.gpu_uuid == card.gpu.uuid]
        assert sum(p.compute_percent for p in mine) <= 100
        assert sum(p.memory_mib for p in mine) <= max(0, card.gpu.memory_mib - 1000)


def test_pci_addresses_are_distinct_and_parse():
    addresses = [pci_address(number) for number in range(5000)]
    assert len(set(addresses)) == 5000
    assert addresses[0] == "00004750:01:00.0"
    assert addresses[255] == "00004750:01:01.0"
    for address in addresses:
        domain, bus, device = parse_pci_address(address)
        assert 0x4750 <= domain <= 0xFFFF and 1 <= bus <= 255 and 0 <= device < 32


def test_a_freed_pci_address_is_given_out_again():
    taken = [pci_address(number) for number in range(10)]
    assert free_pci_address(taken) == pci_address(10)
    assert free_pci_address(taken[:3] + taken[4:]) == pci_address(3)
    assert free_pci_address([]) == pci_address(0)


def test_there_is_an_end_of_pci_addresses():
    with pytest.raises(ValueError):
        pci_address(255 * 32 * 0xB0)
