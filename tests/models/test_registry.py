"""Opening models from configurations: what is refused, and what the model says about itself."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_configs import cases

from hmt.base.errors import CheckpointError, UnknownArchitectureError
from hmt.contracts.blocks import TRUNK, BlockId, BlockKind, Role
from hmt.contracts.model import KVKind, Model
from hmt.models import open_model, supported_architectures, with_architecture
from hmt.models.decoder import head_chunk_rows

PATH = Path("some/where")
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 300,
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_hidden_layers": 4,
    "n_routed_experts": 16,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1,
}


def open_as(config: dict[str, Any], **changes: Any) -> Model:
    return open_model(config | changes, PATH, torch.bfloat16)


@pytest.mark.parametrize("names", [["NobodyForCausalLM"], [], None])
def test_unknown_architecture_says_what_runs(names: list[str] | None) -> None:
    with pytest.raises(UnknownArchitectureError) as caught:
        open_as(LLAMA, architectures=names)
    assert str(PATH) in str(caught.value)
    assert all(name in str(caught.value) for name in (names or []))
    assert all(name in str(caught.value) for name in supported_architectures())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "relu6"}, ["hidden_act 'relu6'", "silu, swish, gelu"]),
        ({"rope_scaling": {"rope_type": "spiral"}}, ["rope_type 'spiral'", "llama3, yarn"]),
        ({"rope_scaling": {"rope_type": "yarn"}}, ["llama", "factor"]),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": "x"}},
            ["rope_parameters", "TypeError"],
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": "x"}}, ["rope_parameters"]),
        ({"hidden_size": "64"}, ["hidden_size"]),
        ({"hidden_size": 0}, ["hidden_size is 0"]),
        ({"num_hidden_layers": -1}, ["num_hidden_layers is -1"]),
        ({"num_key_value_heads": 3}, ["4 query heads", "3"]),
    ],
)
def test_bad_configurations_are_named(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_as(LLAMA, **changes)
    assert str(caught.value).startswith(f"{PATH}/config.json: ")
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Gemma3ForCausalLM", {"hidden_activation": "mish"}, "hidden_activation 'mish'"),
        ("Gemma3ForCausalLM", {"layer_types": ["full_attention"]}, "layer_types"),
        ("Qwen3ForCausalLM", {"layer_types": ["chunked_attention"] * 32}, "layer_types"),
        ("Qwen2ForCausalLM", {"layer_types": ["sliding_attention"] * 32}, "sliding_window"),
        ("MixtralForCausalLM", {"num_experts_per_tok": 9}, "9 experts per token"),
        ("Qwen3MoeForCausalLM", {"num_experts": 4}, "8 experts per token"),
        ("DeepseekV2ForCausalLM", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        ("DeepseekV2ForCausalLM", {"norm_topk_prob": True}, "norm_topk_prob is True"),
        ("DeepseekV2ForCausalLM", {"topk_method": "group_limited_greedy"}, "of None groups"),
        ("DeepseekV3ForCausalLM", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("DeepseekV3ForCausalLM", {"n_group": 7}, "7 groups of 256 experts"),
        ("DeepseekV3ForCausalLM", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ("KimiLinearForCausalLM", {"mla_use_nope": False}, "mla_use_nope is False"),
        ("KimiLinearForCausalLM", {"num_expert_group": 7}, "7 groups of 256 experts"),
        ("BailingHybridForCausalLM", {"kda_lower_bound": 2.0}, "kda_lower_bound is 2.0"),
        ("BailingHybridForCausalLM", {"no_kda_lora": False}, "no_kda_lora is False"),
        ("MiniMaxForCausalLM", {"sliding_window": 64}, "sliding_window is 64"),
    ],
)
def test_what_a_family_does_not_compute_is_refused(
    architecture: str, changes: dict[str, Any], words: str
) -> None:
    tiny = {"architectures": [architecture], "vocab_size": 64, "num_experts_per_tok": 8}
    with pytest.raises(CheckpointError, match=re.escape(words)):
        open_as(tiny, **changes)


def test_the_configuration_is_not_changed() -> None:
    config = DEEPSEEK_V3 | {"rope_scaling": dict(DEEPSEEK_V3["rope_scaling"])}
    before = {**config, "rope_scaling": dict(config["rope_scaling"])}
    open_as(config)
    assert config == before


def test_published_deepseek_sizes() -> None:
    spec = open_as(DEEPSEEK_V3).spec
    assert all(
        (kv.kind, kv.heads, kv.key_dim, kv.value_dim) == (KVKind.LATENT, 1, 576, 512)
        for kv in spec.kv_layers.values()
    )
    assert (spec.layers, spec.experts_per_token, spec.max_context) == (4, 8, 4096)
    kinds = [block.id.kind for block in spec.blocks if block.id.layer == 3]
    assert kinds == [BlockKind.ATTENTION, BlockKind.ROUTER] + [BlockKind.EXPERT] * 16
    ignored = [re.compile(pattern) for pattern in spec.ignored]
    known = ("model.layers.4.eh_proj.weight", "model.layers.0.self_attn.rotary_emb.inv_freq")
    assert all(any(pattern.search(name) for pattern in ignored) for name in known)
    needed = [source for b in spec.blocks for param in b.params for source in param.sources]
    assert not any(pattern.search(name) for pattern in ignored for name in needed)


def test_published_ling() -> None:
    """inclusionAI/Ling-3.0-Flash, whose class has another name in transformers."""
    ling = {
        "architectures": ["BailingMoeV3ForCausalLM"], "model_type": "bailing_hybrid",
        "num_hidden_layers": 12, "head_dim": 128, "layer_group_size": 6, "num_experts": 16,
        "no_kda_lora": True, "gated_attention_proj_granularity_type": "head_wise",
    }  # fmt: skip
    spec = open_as(dict(with_architecture(ling))).spec
    assert list(spec.kv_layers) == [5, 11]
    assert spec.state_bytes == 10 * 4 * (32 * 128 * 128 + 3 * 3 * 4096)
    names = {source for b in spec.blocks for param in b.params for source in param.sources}
    assert {
        "model.word_embeddings.weight", "model.layers.0.attention.f_proj.weight",
        "model.layers.5.attention.dense.weight", "model.layers.5.attention.g_proj.weight",
        "model.layers.2.mlp.gate.expert_bias", "model.layers.2.mlp.experts.15.up_proj.weight",
    } <= names  # fmt: skip


def test_published_kimi_linear() -> None:
    """Fields and names of moonshotai/Kimi-Linear-48B-A3B-Instruct."""
    kimi = {
        "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "head_dim": 72,
        "num_hidden_layers": 8, "num_experts": 4, "num_experts_per_token": 2, "topk_group": 1,
        "num_expert_group": 1, "first_k_dense_replace": 1, "mla_use_nope": True,
        "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid", "use_grouped_topk": True,
        "rope_theta": 10000.0, "rope_scaling": None, "q_lora_rank": None,
        "linear_attn_config": {
            "full_attn_layers": [4, 8], "kda_layers": [1, 2, 3, 5, 6, 7], "head_dim": 128,
            "num_heads": 32, "short_conv_kernel_size": 4,
        },
    }  # fmt: skip
    spec = open_as(kimi).spec
    assert list(spec.kv_layers) == [3, 7] and list(spec.state_layers) == [0, 1, 2, 4, 5, 6]
    assert spec.state_bytes == 6 * 4 * (32 * 128 * 128 + 3 * 3 * 4096)
    names = {source for b in spec.blocks for param in b.params for source in param.sources}
    attention, moe = "model.layers.1.self_attn.", "model.layers.1.block_sparse_moe."
    assert {
        "model.layers.0.mlp.gate_proj.weight", "model.layers.3.self_attn.kv_b_proj.weight",
        f"{attention}A_log", f"{attention}dt_bias", f"{attention}conv1d.weight",
        f"{attention}f_b_proj.weight", f"{attention}g_a_proj.weight", f"{attention}o_norm.weight",
        f"{moe}gate.e_score_correction_bias", f"{moe}shared_experts.up_proj.weight",
        f"{moe}experts.3.w2.weight",
    } <= names  # fmt: skip


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_spec_is_whole(case: Any) -> None:
    config = case.config.to_dict() | {"architectures": [_architecture(case.config.model_type)]}
    model = open_model(config, PATH, torch.float32)
    spec = model.spec
    ids = [block.id for block in spec.blocks]
    assert len(ids) == len(set(ids))
    assert ids[0] == BlockId(TRUNK, BlockKind.EMBEDDING)
    assert ids[-1].kind is BlockKind.HEAD
    assert len(spec.kv) == spec.layers
    heads = [block for block in spec.blocks if block.id.kind is BlockKind.HEAD]
    ranges = [block.params[-1].rows for block in heads]
    assert [rows[0] for rows in ranges] == [0] + [rows[1] for rows in ranges[:-1]]
    assert ranges[-1][1] == spec.vocab_size
    for block in spec.blocks:
        names = [param.name for param in block.params]
        assert len(names) == len(set(names))
        for param in block.params:
            assert (param.role is Role.LINEAR) <= (len(param.shape) == 2)
    dense = [b for b in ids if b.layer >= 0 and b.kind is not BlockKind.EXPERT]
    assert [b for index in range(spec.layers) for b in model.layer_blocks(index)] == dense


def _architecture(model_type: str) -> str:
    wanted = model_type.replace("_text", "").replace("_", "")
    known = supported_architectures()
    found = [a for a in known if a.lower().replace("_", "") == f"{wanted}forcausallm"]
    return found[0]


def test_every_architecture_has_parity_cases() -> None:
    """But for the one that transformers lacks: see test_mixture_of_recursions.py."""
    ours = {"MixtureOfRecursionsForCausalLM"}
    assert {_architecture(case.config.model_type) for case in cases()} | ours == set(
        supported_architectures()
    )


@given(st.integers(1, 300_000), st.integers(1, 20_000))
def test_head_chunks_are_small_and_whole_tiles(vocab_size: int, hidden_size: int) -> None:
    rows = head_chunk_rows(vocab_size, hidden_size)
    assert rows % 128 == 0
    assert 2 * (rows - 127) * hidden_size <= max(16 * 2**20, 2 * hidden_size)
    assert rows - 127 <= -(-vocab_size // 4)
