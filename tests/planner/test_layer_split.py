"""Where rows of layers are cut for several devices."""

from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hmt.contracts.machine import ComputeRates, DeviceRates, Machine
from hmt.planner.placement.layer_split import split_layers

SIZES = st.lists(st.integers(1, 50), min_size=3, max_size=8)
ROOMS = st.lists(st.integers(5, 200), min_size=2, max_size=3)


def room_of(sizes: list[int], room: int) -> Any:
    layers = [SimpleNamespace(core_bytes=1, wide_bytes=n, slot_bytes=n) for n in sizes]
    return SimpleNamespace(layers=layers, head=[SimpleNamespace(slot_bytes=20)], room=room)


def machine_of(links: list[int]) -> Machine:
    devices = [DeviceRates("one", 0, rate, ComputeRates(1000.0)) for rate in links]
    return Machine("some", 1, 1, 1.0, devices=tuple(devices))


def seconds(sizes: list[int], room: int, link: int, *, head: bool) -> float:
    nbytes = sum(sizes) + len(sizes) + (20 if head else 0)
    copied = nbytes - max(0, room - 2 * max(sizes)) if nbytes > room else 0
    return nbytes / 1000 + copied / link


@given(SIZES, ROOMS, st.lists(st.integers(1, 100), min_size=3, max_size=3))
def test_no_other_cut_has_a_faster_slowest_device(
    sizes: list[int], rooms: list[int], links: list[int]
) -> None:
    rows = split_layers([room_of(sizes, room) for room in rooms], machine_of(links))
    assert [n for row in rows for n in row] == list(range(len(sizes))) and all(rows)

    def slowest(cuts: tuple[int, ...]) -> float:
        return max(
            seconds(sizes[begin:end], room, link, head=end == len(sizes))
            for (begin, end), room, link in zip(pairwise(cuts), rooms, links, strict=False)
        )

    inner = combinations(range(1, len(sizes)), len(rooms) - 1)
    best = min(slowest((0, *cuts, len(sizes))) for cuts in inner)
    assert abs(slowest((0, *(row.stop for row in rows))) - best) < 1e-9


def test_what_fits_one_only_goes_there() -> None:
    rows = split_layers([room_of([10] * 8, 30), room_of([10] * 8, 200)], machine_of([1, 1]))
    assert [len(row) for row in rows] == [2, 6], "two of eleven bytes each fit thirty"
    alike = split_layers([room_of([10] * 8, 500)] * 2, Machine("unknown", 1, 1, 1.0))
    assert [len(row) for row in alike] == [5, 3], "the head counts as two"
