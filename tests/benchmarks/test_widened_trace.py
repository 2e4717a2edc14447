"""Recorded routing for larger models: its counts, its popularity, and what cannot be widened."""

from collections import Counter
from pathlib import Path

import pytest

from hmt.base.errors import ConfigError
from hmt.engine.experts.trace import TraceFile
from hmt.profiling.random_model import Shape
from hmt_bench.widened_trace import widened_trace

TRACES = sorted((Path(__file__).parents[2] / "benchmarks" / "traces").glob("*.gz"))
SHAPE = Shape(6, 2048, 768, 32, 4, 128, experts=128, experts_per_token=8)


def test_experts_stay_as_popular_as_they_were() -> None:
    trace = widened_trace(TRACES, SHAPE)
    assert [(r.step, r.layer) for r in trace[:12]] == [(s, n) for s in range(2) for n in range(6)]
    for record in trace:
        (chosen,) = record.experts
        assert len(set(chosen)) == 8
        assert sorted(expert // 32 for expert in chosen) == [0, 0, 1, 1, 2, 2, 3, 3]
    # Layer 0 begins with the first file's first layer: the two likeliest of its four.
    wanted: Counter[int] = Counter()
    for record in TraceFile(TRACES[0]):
        if record.layer == TraceFile(TRACES[0]).header.layers[0]:
            ranked = sorted(zip(record.scales[0], record.experts[0], strict=True), reverse=True)
            wanted.update(expert for _, expert in ranked[:2])
    found = Counter(e for r in trace if r.layer == 0 for e in r.experts[0] if e < 32)
    assert found == wanted


@pytest.mark.parametrize(("experts", "top_k"), [(100, 8), (128, 6), (128, 32), (16, 4)])
def test_what_does_not_divide_is_refused(experts: int, top_k: int) -> None:
    shape = Shape(2, 64, 32, 4, 2, experts=experts, experts_per_token=top_k)
    with pytest.raises(ConfigError, match="cannot be put together"):
        widened_trace(TRACES[:1], shape)
