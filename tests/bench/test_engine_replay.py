"""A replay reads what the engine read."""

from pathlib import Path
from typing import Any

import pytest

import hmt
from hmt.bench.replay import Cache, replay
from hmt.contracts.blocks import BlockId, BlockKind
from hmt.engine.experts.trace import TraceFile
from hmt.weights.eviction import POLICIES

MINI_MOE = Path(__file__).parents[2] / "assets" / "mini-moe"
EXPERT_IDS = {BlockId(la, BlockKind.EXPERT, e) for la in range(1, 5) for e in range(32)}


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_replay_reads_what_the_engine_read(tmp_path: Path, policy: str) -> None:
    file = tmp_path / "trace.jsonl"
    tokens = list(range(200, 290))
    options: dict[str, Any] = {
        "context": 256,
        "expert_cache_policy": policy,
        "expert_prefetch": False,
    }
    with hmt.Engine(host_memory="12.5MiB", expert_trace=file, **options) as engine:
        model = engine.load_model(MINI_MOE)
        model.logits(tokens, [], prefill=0)
        phase = model.summary().generation
        slots = model.plan.reserved["slots"]
        layouts = model.prepared.layouts
    sizes = {b: layout.read_bytes for b, layout in layouts.items()}
    assert all(layout.slot_bytes == sizes[b] for b, layout in layouts.items() if b in EXPERT_IDS)

    expected = replay(list(TraceFile(file)), Cache(POLICIES[policy](), sizes, slots))
    others = phase.disk_bytes - expected.missed_bytes
    rows = len(tokens) * 2 * 4096  # of the embedding, at most two pages for each token
    assert 0 <= others <= rows, "every read of an expert was predicted"
