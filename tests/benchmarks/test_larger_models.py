"""Packs of large mixtures with few layers: experts share no bytes, and tokens choose them."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hmt
from hmt.contracts.blocks import BlockKind
from hmt.weights.pack import read_manifest
from hmt_bench import larger_models
from hmt_bench.larger_models import LARGE_MODELS, LargeModel, write_large_pack

TOKENS = 24
EXPERTS, CHOSEN, LAYERS = 40, 4, 4
SMALL: dict[str, dict[str, Any]] = {
    "flash-next": {
        "vocab_size": 640, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64, "hc_lowrank": 32, "ple_embed_dim": 256,
        "ngram_vocab_size_base": 300, "indexer_n_heads": 2, "indexer_head_dim": 32,
        "num_experts": EXPERTS, "num_experts_per_tok": CHOSEN,
    },
    "glm-flash": {
        "vocab_size": 640, "hidden_size": 256, "intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
        "v_head_dim": 32, "index_head_dim": 32, "index_n_heads": 2, "linear_num_heads": 4,
        "linear_head_dim": 32,
        "moe_intermediate_size": 64, "n_routed_experts": EXPERTS, "num_experts_per_tok": CHOSEN,
    },
}  # fmt: skip


def small(name: str) -> LargeModel:
    model = LARGE_MODELS[name]
    return replace(model, fields={**model.fields, **SMALL[name]}, layers=LAYERS)


@pytest.mark.parametrize("name", LARGE_MODELS)
def test_tokens_choose_experts_of_their_own(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(larger_models, "_WRITTEN", 16)
    pack = write_large_pack(tmp_path / "model", small(name), "w4a8:32")
    assert write_large_pack(tmp_path / "model", small(name), "w4a8:32") == pack  # as it is
    assert not (tmp_path / "model" / "checkpoint").exists()
    blocks = [b for b in read_manifest(pack).blocks if b.id.kind is BlockKind.EXPERT]
    assert len({block.id for block in blocks}) == len(blocks) == EXPERTS * LAYERS
    places = {(block.extent.file, block.extent.offset) for block in blocks if block.extent}
    assert len(places) == len(blocks)

    trace = tmp_path / "trace.jsonl"
    options: dict[str, Any] = {"host_memory": "64MiB", "context": 64, "max_batch": 1}
    with hmt.Engine(**options, expert_trace=trace) as engine:
        loaded = engine.load_model(pack)
        request = hmt.Request(input=[20, 21], max_new_tokens=TOKENS, ignore_eos=True)
        tokens = [event.token_id for event in loaded.stream_batch([request])[0]]
    assert tokens == list(range(22, 22 + TOKENS))
    chosen: dict[int, list[frozenset[int]]] = {}
    for line in trace.read_text().splitlines()[1:]:
        record = json.loads(line)
        chosen.setdefault(record["layer"], []).extend(map(frozenset, record["experts"]))
    assert len(chosen) == LAYERS
    for own in chosen.values():
        assert len(set(own)) > 0.8 * len(own)
        assert len(frozenset().union(*own)) > 0.6 * EXPERTS
    for one, other in itertools.combinations(chosen.values(), 2):
        assert sum(a == b for a, b in zip(one, other, strict=True)) < 0.2 * len(one)
