"""Times of products: what was measured, straight lines between, never less for more tokens."""

import pytest
from hmt.planner.products import Products, operations_rate, times_in_layers

RATES = {"w4a8": 1e9}
OPERATIONS = {"w4a8": 1e12, "w4a8@8": 4e11, "w4a8@32": 8e11, "bf16": 5e11}
NBYTES, NUMBERS = 1e6, 2e6


def test_times_pass_through_what_was_measured() -> None:
    products = Products(RATES, 5e8, OPERATIONS)

    def seconds(tokens: float) -> float:
        return products.seconds(NBYTES, NUMBERS, "w4a8", tokens)

    assert seconds(1) == pytest.approx(NBYTES / 1e9)
    for tokens, rate in ((8, 4e11), (32, 8e11)):
        assert seconds(tokens) == pytest.approx(max(1e-3, 2 * NUMBERS * tokens / rate))
    assert seconds(1000) == pytest.approx(2 * NUMBERS * 1000 / 1e12)
    heavy = [products.seconds(1e3, 1e9, "w4a8", tokens) for tokens in (8, 20, 32)]
    assert heavy[1] == pytest.approx((heavy[0] + heavy[2]) / 2)
    times = [products.seconds(1e3, 1e9, "w4a8", tokens / 2) for tokens in range(2, 300)]
    assert times == sorted(times)


def test_times_in_layers_lie_between_what_was_measured() -> None:
    known = {"w4a8": 0.8, "w4a8@8": 1.2, "w8a8": 0.6, "bf16": 0.9}
    tokens = (0.5, 1, 4.5, 8, 30)
    found = [times_in_layers(known, "w4a8", each) for each in tokens]
    assert found == pytest.approx([0.8, 0.8, 1.0, 1.2, 1.2])
    assert times_in_layers(known, "nvfp4a8", 3) == 0.6, "codes are multiplied as codes are"
    assert times_in_layers(known, "w4a16", 3) == 0.9
    assert times_in_layers({}, "w4a8", 3) == 1.0, "not known"


def test_what_was_not_measured_is_like_the_nearest() -> None:
    products = Products(RATES, 5e8, OPERATIONS)
    assert products.rate("w8a8") == 5e8, "memory's rate"
    assert operations_rate(OPERATIONS, "nvfp4a16") == 5e11, "floats compute as floats do"
    assert operations_rate({"w4a8": 1e12, "w4a8@8": 2e12}, "w8a8") == 1e12
    # Only the rate for many tokens: the longer of reading and computing.
    plain = Products({}, 1e9, {"bf16": 1e12})
    assert plain.seconds(NBYTES, NUMBERS, "bf16", 4) == pytest.approx(1e-3)
    assert plain.seconds(NBYTES, NUMBERS, "bf16", 1e4) == pytest.approx(4e-2)
    nothing = Products({}, 0.0, {})
    assert not nothing.known and nothing.seconds(NBYTES, NUMBERS, "bf16", 4) == 0


def test_rows_take_time_of_their_own_and_caches_shorten_what_is_read() -> None:
    rows = {"w4a8@1": 2e-8, "w4a8@8": 1e-8, "w4a8@32": 1e-8, "w4a8": 5e-9}
    plain, long = Products(RATES, 5e8, OPERATIONS), Products(RATES, 5e8, OPERATIONS, rows)

    def more_s(tokens: float, count: float = 1e6) -> float:
        given = NBYTES, NUMBERS, "w4a8", tokens
        return long.seconds(*given, count) - plain.seconds(*given)

    # One token's: 20 ns a row; with 8 and 32 tokens 10 ns each, with a thousand 5 ns each.
    assert more_s(1) == pytest.approx(0.02)
    assert more_s(32) == pytest.approx(32e6 * 1e-8, rel=0.01)
    assert more_s(1000) == pytest.approx(1000e6 * 5e-9)
    assert more_s(1, 0) == more_s(8, 0) == 0
    # Twice as fast at most, however much faster memory is.
    cached = Products(RATES, 5e8, OPERATIONS, faster=3.0, most={"w4a8": 2e9})
    assert cached.seconds(NBYTES, NUMBERS, "w4a8", 1) == pytest.approx(NBYTES / 2e9)
    assert cached.rate("bf16") == pytest.approx(3 * 5e8), "no most is known"
    for tokens in (2, 8, 20, 32):
        args = 1e6, 1e6, "w4a8", tokens
        saved = plain.seconds(*args) - cached.seconds(*args)
        assert 0 <= saved <= 1e6 / 1e9 - 1e6 / 2e9 + 1e-12, "arithmetic stays"
