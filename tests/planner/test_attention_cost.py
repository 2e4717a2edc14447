"""What attention costs: prompts expand latents as the layer does."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hmt.contracts.machine import ComputeRates
from hmt.layers.latent.mla import LatentAttention
from hmt.planner.cost.attention_cost import (
    AttentionWork,
    attention_ops,
    attention_seconds,
    attention_work,
)
from hmt.planner.cost.workload import LayerWork, add_attention


def latent(heads: int = 4, kv_rank: int = 128, nope: int = 64, value: int = 64) -> LatentAttention:
    rotary: Any = SimpleNamespace()
    return LatentAttention(256, heads, None, kv_rank, nope, 32, value, rotary, 0.1, True)


def load_of(attention: LatentAttention) -> LayerWork:
    spec = SimpleNamespace(
        kv=(attention.kv,),
        kv_layers={0: attention.kv},
        state_layers={},
        attention_heads=attention.heads,
    )
    demand: Any = SimpleNamespace(spec=spec, kv_token_bytes=320)
    add_attention([load := LayerWork()], demand, {})
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


def test_state_is_read_and_written_in_every_step_and_multiplied_by_every_token() -> None:
    load = LayerWork(state_bytes=4000)
    for context in (10, 1000):
        work = attention_work(load, 32, 4, context, context)
        assert (work.nbytes, work.operations) == (4 * 2 * 4000, 32 * 6 * 1000)


def test_attention_takes_the_longer_of_reading_and_arithmetic() -> None:
    rates = ComputeRates(30e9, {"bf16@512": 1e12}, attention_read_rate=20e9, attention_ops=2e11)
    assert attention_seconds(rates, AttentionWork(2e9, 2e9), 30e9) == pytest.approx(0.1)
    assert attention_seconds(rates, AttentionWork(2e9, 4e11), 30e9) == pytest.approx(2)
    expanding = AttentionWork(2e9, 0, 1e12)
    assert attention_seconds(rates, expanding, 30e9) == pytest.approx(1.1)
    # What was not measured is as memory and products.
    unknown = replace(rates, attention_read_rate=0.0, attention_ops=0.0)
    assert attention_seconds(unknown, AttentionWork(3e9, 0), 30e9) == pytest.approx(0.1)
    assert attention_ops(unknown) == 1e12
    assert attention_seconds(ComputeRates(), AttentionWork(3e9, 5e9), 0.0) == 0
