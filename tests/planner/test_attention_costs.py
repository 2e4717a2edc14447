"""What attention costs: prompts expand latents as the layer does; short pages are read slower."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hmt.base.units import KIB
from hmt.contracts.machine import Machine
from hmt.contracts.model import PAGE_TOKENS
from hmt.layers.mla import LatentAttention
from hmt.planner.attention_costs import (
    LONG_PAGE,
    SHORT_PAGE,
    AttentionWork,
    attention_work,
    cpu_seconds,
)
from hmt.planner.loads import LayerLoad, add_attention

MACHINE = Machine(
    "m", 2, 1 << 34, 30e9, 0.0, cpu_ops={"bf16": 1e12}, cpu_attention_ops=2e11,
    cpu_attention_rate=20e9, cpu_cached_attention_rate=40e9, cpu_attention_short_rate=10e9,
    cpu_cached_attention_short_rate=12e9,
)  # fmt: skip


def latent(heads: int = 4, kv_rank: int = 128, nope: int = 64, value: int = 64) -> LatentAttention:
    rotary: Any = SimpleNamespace()
    return LatentAttention(256, heads, None, kv_rank, nope, 32, value, rotary, 0.1, True)


def load_of(attention: LatentAttention) -> LayerLoad:
    spec = SimpleNamespace(kv=(attention.kv,), attention_heads=attention.heads)
    demand: Any = SimpleNamespace(spec=spec, kv_token_bytes=320)
    add_attention([load := LayerLoad()], demand, ())
    return load


@pytest.mark.parametrize(("rank", "nope", "value"), [(128, 64, 64), (512, 128, 128), (64, 64, 64)])
def test_prompts_expand_latents_where_the_layer_does(rank: int, nope: int, value: int) -> None:
    attention = latent(kv_rank=rank, nope=nope, value=value)
    load, longest = load_of(attention), attention._longest_absorbed
    most = min(longest, 1000.0)
    for tokens in (1, int(most), int(most) + 1):
        work = attention_work(load, 2 * tokens, 2, 3000, 3000)  # of two texts
        pairs = 2 * tokens * 3000 * 2 * attention.heads
        if tokens <= longest:
            assert work.operations == pairs * (2 * rank + 32) and not work.expanding
        else:
            assert work.operations == pairs * (nope + 32 + value)
            made = 2 * 3000 * 2 * attention.heads * rank * (nope + value)
            assert work.expanding == made
            assert work.operations + made < pairs * (2 * rank + 32)
        assert work.nbytes == 2 * 3000 * 320


def test_what_latents_read_and_compute_adds_up() -> None:
    work = AttentionWork(4e6, 2e6, 1e7)
    short = LayerLoad(kv_bytes=SHORT_PAGE / PAGE_TOKENS)
    assert cpu_seconds(MACHINE, short, work, 30e9, 1.0) == pytest.approx(4e-4 + 1e-5)
    summed = cpu_seconds(MACHINE, replace(short, latent=True), work, 30e9, 1.0)
    assert summed == pytest.approx(4e-4 + 1e-5 + 1e-5)


@pytest.mark.parametrize(
    ("page_kib", "faster", "rate"),
    [
        *((64, 1, 20e9), (8, 1, 10e9), (16, 1, 14e9), (32, 1, 17.5e9), (640, 1, 20e9)),
        *((64, 1.5, 30e9), (64, 9, 40e9), (8, 9, 12e9), (8, 1.1, 11e9)),
    ],
)
def test_short_pages_are_read_as_they_were_measured(
    page_kib: int, faster: float, rate: float
) -> None:
    load = LayerLoad(kv_bytes=page_kib * KIB / PAGE_TOKENS)
    taken = cpu_seconds(MACHINE, load, AttentionWork(1e9, 0), 30e9, faster)
    assert taken == pytest.approx(1e9 / rate)
    bare = replace(MACHINE, cpu_attention_short_rate=0, cpu_cached_attention_short_rate=0)
    assert cpu_seconds(bare, load, AttentionWork(1e9, 0), 30e9, 1) == pytest.approx(1 / 20)
    unknown = replace(bare, cpu_attention_rate=0, cpu_cached_attention_rate=0)
    assert cpu_seconds(unknown, load, AttentionWork(1e9, 0), 30e9, 1) == pytest.approx(1 / 30)


@pytest.mark.parametrize("short_rate", [5e9, 10e9, 19e9, 20e9, 30e9])
def test_a_page_takes_its_own_time_and_that_of_its_bytes(short_rate: float) -> None:
    machine = replace(MACHINE, cpu_attention_short_rate=short_rate)

    def page_s(kib: float) -> float:
        load = LayerLoad(kv_bytes=kib * KIB / PAGE_TOKENS)
        return cpu_seconds(machine, load, AttentionWork(kib * KIB, 0), 30e9, 1)

    times = [page_s(kib) for kib in (2, 4, 8, 16, 32, 64)]
    assert times == sorted(times)
    assert page_s(128) == pytest.approx(2 * page_s(64))
    more = [(page_s(after) - page_s(before)) / (after - before) for before, after in
            ((2, 8), (8, 24), (24, 64))]  # fmt: skip
    assert more == pytest.approx([more[0]] * 3)


@pytest.mark.parametrize(("faster", "share"), [(1.0, 1.0), (1.5, 1 / 3), (2.0, 0.0), (9.0, 0.0)])
def test_what_caches_do_not_hold_takes_longer_at_first(faster: float, share: float) -> None:
    machine = replace(MACHINE, cpu_attention_cold_s=1e-4)
    load, work = LayerLoad(kv_bytes=LONG_PAGE / PAGE_TOKENS), AttentionWork(1e6, 0)
    cold = cpu_seconds(machine, load, work, 30e9, faster)
    assert cold - cpu_seconds(MACHINE, load, work, 30e9, faster) == pytest.approx(share * 1e-4)
    assert cpu_seconds(machine, load, AttentionWork(0, 0), 30e9, faster) == 0
    bare = replace(machine, cpu_cached_attention_rate=0, cpu_cached_attention_short_rate=0)
    assert cpu_seconds(bare, load, work, 30e9, 1) == pytest.approx(1e6 / 20e9 + 1e-4)
