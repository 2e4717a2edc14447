"""`python -m hmt_bench pages`: waste by the size of pages, against what arithmetic says."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hmt_bench.commands import pages as bench_pages
from hmt_bench.pages import Lengths, page_cost, run, waste_svg


@pytest.mark.parametrize("tokens", [1, 8, 16, 64])
def test_waste_is_what_texts_leave_of_their_last_pages(tokens: int) -> None:
    lengths, chance = Lengths(), random.Random(3)
    cost = page_cost(tokens, lengths, 500, 1 << 18, random.Random(3))
    drawn = [lengths.draw(chance) for _ in range(500)]  # the same: nobody had to leave
    taken = sum(-(-length // tokens) * tokens for length in drawn)
    assert cost.wasted == pytest.approx(1 - sum(drawn) / taken)
    assert cost.wasted <= cost.wasted_growing < 2 * cost.wasted + 1e-9
    assert cost.runs == 1, "there was room for all of them in one piece"
    assert cost.unusable == 0


def test_texts_leave_when_there_is_no_room() -> None:
    cost = page_cost(16, Lengths(), 2000, 1 << 13, random.Random(1))
    assert 0 <= cost.unusable < 0.06, "less than one text"
    assert cost.runs > 1


@given(st.integers(1, 300), st.integers(1, 40))
def test_texts_that_grow_take_whole_pages(length: int, tokens: int) -> None:
    lengths = Lengths(mean=length, deviation=0)
    cost = page_cost(tokens, lengths, 3, 4096, random.Random(0))
    taken = [-(-n // tokens) * tokens for n in range(1, length + 1)]
    assert cost.wasted_growing == pytest.approx(1 - length * (length + 1) / 2 / sum(taken))
    assert cost.wasted == pytest.approx(1 - length / taken[-1])


def test_the_command_writes_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg, json = tmp_path / "a" / "waste.svg", tmp_path / "b" / "pages.json"
    bench_pages.pages(texts=20, svg=svg, json=json)
    assert "wasted" in capsys.readouterr().out
    assert json.exists() and svg.read_text().startswith("<svg")
    content = run(Lengths(), texts=50, sizes=[16])
    assert content["results"][0]["tokens"] == 16
    assert waste_svg(content).count("<circle") == 2, "a size of each kind"
