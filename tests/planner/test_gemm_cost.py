"""Products between the numbers of tokens that were measured."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hmt.planner.cost.gemm_cost import GemmCost, arithmetic_rate, nearest

RATES = {"bf16@1": 40e9, "w4a8@1": 30e9, "w4a8@16": 4e11, "w4a8@512": 1e12, "bf16@512": 2e12}


def test_measured_numbers_of_tokens_take_what_was_measured() -> None:
    costs = GemmCost(RATES, 50e9)
    numbers, nbytes = 1e9, 5e8
    assert costs.seconds(nbytes, numbers, "w4a8", 1) == pytest.approx(nbytes / 30e9)
    assert costs.seconds(nbytes, numbers, "w4a8", 16) == pytest.approx(2 * 16 * numbers / 4e11)
    assert costs.seconds(nbytes, numbers, "w4a8", 512) == pytest.approx(2 * 512 * numbers / 1e12)
    assert costs.seconds(nbytes, numbers, "w4a8", 1024) == pytest.approx(2 * 1024 * numbers / 1e12)
    between = costs.seconds(nbytes, numbers, "w4a8", 264)
    middle = (2 * 16 / 4e11 + 2 * 512 / 1e12) / 2 * numbers
    assert between == pytest.approx(middle)
    few = GemmCost({"bf16@512": 2e12}, 50e9)
    assert few.seconds(nbytes, numbers, "bf16", 2) == pytest.approx(nbytes / 50e9), "a roofline"
    # One that was not measured is read as memory is, and computed as the nearest of its kind.
    assert costs.seconds(nbytes, numbers, "nvfp4a8", 1) == pytest.approx(nbytes / 50e9)
    assert nearest(RATES, "w4a16") == "bf16" and nearest({}, "bf16") == ""
    assert nearest({"w8a8@512": 1.0, "f32@512": 2.0}, "w4a8") == "w8a8"
    assert arithmetic_rate(RATES) == 2e12 and arithmetic_rate({"bf16@1": 3.0}) == 0
    assert costs.knows_prefill and not GemmCost({"bf16@1": 1.0}, 1.0).knows_prefill


@given(
    st.dictionaries(
        st.tuples(st.sampled_from(["bf16", "w4a8"]), st.sampled_from([1, 16, 512])).map(
            lambda pair: f"{pair[0]}@{pair[1]}"
        ),
        st.floats(1e6, 1e15),
    ),
    st.floats(0, 1e12),
    st.lists(st.floats(1, 4096), min_size=2, max_size=8),
)
def test_more_tokens_never_take_less(
    rates: dict[str, float], read_rate: float, tokens: list[float]
) -> None:
    costs = GemmCost(rates, read_rate)
    times = [costs.seconds(1e6, 2e6, "w4a8", count) for count in sorted(tokens)]
    assert all(after >= before * (1 - 1e-9) for before, after in pairwise(times))
