"""The prefetch distance: the formula where layers are alike, its bounds, and what waits change."""

import math
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from hmt.contracts.blocks import BlockId, BlockKind
from hmt.engine.execution.prefetch import MARGIN, PrefetchDistance, ReadAhead

SIZES = st.integers(0, 9).map(lambda mib: mib << 20)


def learned(
    sizes: Sequence[int],
    compute_s: Sequence[float],
    rate: float,
    *,
    room: int = 1 << 40,
    first: int = 2,
    waits: Sequence[float] = (0.0,),
    tokens: int = 1,
) -> PrefetchDistance:
    distance = PrefetchDistance(sizes, sizes, room, first, rate)
    for waited_s in waits:
        for stage, seconds in enumerate(compute_s):
            distance.stage_took(stage, tokens, seconds, waited_s)
        distance.pass_ended(tokens)
    return distance


@given(layers=st.integers(2, 40), transfer_s=st.floats(1e-4, 0.5), compute_s=st.floats(1e-4, 0.5))
def test_layers_that_are_alike_follow_the_formula(
    layers: int, transfer_s: float, compute_s: float
) -> None:
    size = 1 << 20
    distance = learned([size] * layers, [compute_s] * layers, size / transfer_s)
    exact = transfer_s / compute_s * MARGIN
    allowed = {math.ceil(exact * (1 + e)) for e in (-1e-9, 0.0, 1e-9)}
    for stage in range(layers):
        assert distance.of(stage, 1) in {min(layers - 1, one) for one in allowed}


@settings(max_examples=200)
@given(
    sizes=st.lists(SIZES, min_size=1, max_size=12),
    seed=st.lists(st.floats(1e-4, 0.1), min_size=12, max_size=12),
    rate=st.sampled_from([0.0, 1e8, 3e9]),
    room=st.integers(0, 60 << 20),
    waits=st.lists(st.sampled_from([0.0, 0.5]), max_size=30),
)
def test_no_more_is_requested_than_there_is_room_for_and_never_nothing(
    sizes: list[int], seed: list[float], rate: float, room: int, waits: list[float]
) -> None:
    distance = learned(sizes, seed[: len(sizes)], rate, room=room, waits=waits)
    for stage in range(len(sizes)):
        around = [sizes[(stage + n) % len(sizes)] for n in range(1, len(sizes))]
        following = [size for size in around if size]
        ahead = distance.of(stage, 1)
        assert min(1, len(following)) <= ahead <= len(following)
        assert ahead <= 1 or sizes[stage] + sum(following[:ahead]) <= room


@given(
    sizes=st.lists(SIZES, min_size=2, max_size=12),
    compute=st.lists(st.floats(1e-4, 0.1), min_size=12, max_size=12),
    rate=st.floats(1e7, 1e10),
)
def test_the_nearest_stage_that_is_read_in_time_is_the_distance(
    sizes: list[int], compute: list[float], rate: float
) -> None:
    """By brute force: resident stages compute, too, but are not counted."""
    count = len(sizes)
    distance = learned(sizes, compute[:count], rate)
    for stage in range(count):
        following = [(stage + n) % count for n in range(1, count) if sizes[(stage + n) % count]]
        nearest = {_nearest(stage, following, compute[:count], sizes, rate, e) for e in (-1, 0, 1)}
        assert distance.of(stage, 1) in nearest


def _nearest(
    stage: int,
    following: list[int],
    compute: list[float],
    sizes: list[int],
    rate: float,
    rounding: int,
) -> int:
    for number, ahead in enumerate(following, 1):
        between = range((ahead - stage) % len(sizes))
        until = sum(compute[(stage + n) % len(sizes)] for n in between) * (1 + rounding * 1e-9)
        if until >= MARGIN * sizes[ahead] / rate:
            return number
    return len(following)


def test_before_anything_is_known_the_planner_decides() -> None:
    sizes = [1 << 20] * 8
    distance = PrefetchDistance(sizes, sizes, 1 << 30, first=3, rate=1e9)
    assert [distance.of(stage, 1) for stage in range(8)] == [3] * 8
    unmeasured = learned(sizes, [1e-3] * 8, rate=0.0, first=3)
    assert unmeasured.of(0, 1) == 3
    unmeasured.disk_gave(1 << 20, 1e-3)
    unmeasured.pass_ended(1)
    assert unmeasured.of(0, 1) == 2  # a millisecond each, and a margin
    unmeasured.disk_gave(0, 0.0)  # nothing was read: nothing is learned


def test_waits_add_stages_and_calm_takes_them_back() -> None:
    sizes, compute = [1 << 20] * 10, [1e-2] * 10
    distance = learned(sizes, compute, rate=1e9)
    calm = distance.of(0, 1)
    assert calm == 1

    def passes(count: int, waited_s: float) -> None:
        for _ in range(count):
            for stage, seconds in enumerate(compute):
                distance.stage_took(stage, 1, seconds, waited_s)
            distance.pass_ended(1)

    passes(3, 5e-3)
    assert distance.of(0, 1) == calm + 3
    passes(100, 5e-3)
    assert distance.of(0, 1) == 9, "all others"
    passes(1, 1e-5)  # too short to count
    passes(200, 0.0)
    assert distance.of(0, 1) == calm


def test_waits_for_other_things_than_this_do_not_count() -> None:
    sizes = [0, 1 << 20, 0, 1 << 20]
    distance = PrefetchDistance(sizes, sizes, 1 << 30, first=1, rate=1e9)
    for _ in range(10):
        for stage in range(4):
            distance.stage_took(stage, 1, 0.1, 0.0 if sizes[stage] else 0.1)
        distance.pass_ended(1)
    assert distance.of(0, 1) == 1


def test_steps_of_other_sizes_have_distances_of_their_own() -> None:
    sizes = [1 << 20] * 6
    distance = learned(sizes, [1e-3] * 6, rate=1e9, tokens=1)
    for stage in range(6):
        distance.stage_took(stage, 500, 1.0, 0.0)
    distance.pass_ended(500)
    assert distance.of(0, 1) == 2
    assert distance.of(0, 400) == distance.of(0, 500) == 1
    assert distance.of(0, 40) == 2, "not measured"


def test_a_change_of_pace_is_followed() -> None:
    sizes = [1 << 20] * 20
    distance = learned(sizes, [1e-2] * 20, rate=1e9)
    assert distance.of(0, 1) == 1
    for _ in range(20):
        distance.disk_gave(1 << 20, 2e-2)  # twenty times slower
        for stage in range(20):
            distance.stage_took(stage, 1, 1e-2, 0.0)
        distance.pass_ended(1)
    assert distance.of(0, 1) == 3


def test_the_blocks_ahead_are_those_of_the_next_streamed_stages() -> None:
    stages = [[BlockId(n, BlockKind.ATTENTION)] if n % 2 else [] for n in range(6)]
    ahead = ReadAhead(stages, 2)
    assert ahead.blocks(0) == [*stages[1], *stages[3]]
    assert ahead.blocks(3) == [*stages[3], *stages[5], *stages[1]], "around the end"
    assert ReadAhead(stages, 0).blocks(1) == stages[1]
    assert ReadAhead([[], []], 5).blocks(0) == []


def test_steps_that_need_most_experts_ask_for_them_a_layer_ahead() -> None:
    attention = [[BlockId(0, BlockKind.ATTENTION)], [], []]
    experts = [[BlockId(layer, BlockKind.EXPERT, n) for n in range(3)] for layer in range(2)]
    uses = [0]
    ahead = ReadAhead(attention, 1, experts=experts, used=lambda: uses[0])
    # What steps of about this size have used before says whether all are asked for.
    few, several, many = [(16, 6, False)] * 2, (64, 2, True), (64, 6, True)
    slowly_again = [(64, 6, False)] * 2 + [many]
    steps = [*few, (64, 6, False), many, several, *slowly_again, (128, 6, False)]
    for tokens, used, asks in steps:
        ahead.step_begins(tokens)
        assert ahead.asks_for_experts == asks, (tokens, used)
        own, following = (experts[0], experts[1]) if asks else ([], [])
        assert ahead.blocks(0) == [*attention[0], *own, *following]
        assert ahead.blocks(1) == [*following, *attention[0]], "none around the end"
        assert ahead.blocks(2) == attention[0], "of the head"
        uses[0] += used
        ahead.step_ends()
    assert not ReadAhead(attention, 1).asks_for_experts


def test_a_step_is_measured_stage_by_stage() -> None:
    """Waits are no computation, and what comes before the first layer counts with it."""
    sizes = [1 << 20] * 3
    distance = PrefetchDistance(sizes, sizes, 1 << 30, first=1)
    stages = [[BlockId(n, BlockKind.ATTENTION)] for n in range(3)]
    now, waits, drive = [0.0], [0.0], [(0, 0.0)]
    ahead = ReadAhead(
        stages,
        distance,
        waited_s=lambda: waits[0],
        disk=lambda: drive[0],
        clock=lambda: now[0],
    )
    for _ in range(2):
        now[0] += 100.0  # between steps
        ahead.step_begins(1)
        for stage in range(3):
            now[0] += 1.5
            waits[0] += 1.0
            ahead.stage_ends(stage)
        drive[0] = (drive[0][0] + (3 << 20), drive[0][1] + 1.5)
        ahead.step_ends()
    assert distance.rate == 2 << 20  # half a second for each
    # Half a second of computing for half a second of reading: with the margin, two stages.
    assert [len(ahead.blocks(stage)) for stage in range(3)] == [3, 3, 3]
