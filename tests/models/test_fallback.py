"""Models that HMT has no file for, through transformers' modules: equal to plain transformers."""

import random
import shutil
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from plain_memory import published, random_reference
from transformers import CONFIG_MAPPING

import hmt
from hmt.contracts.blocks import BlockKind
from hmt.engine import EngineConfig, prepare
from hmt.models import open_model
from hmt.planner import PlanOptions, smallest_budget

SHARE = 4  # of the weights, what may be in memory
PROMPT_TOKENS, TOKENS = 35, 40
OPTIONS = {"dtype": "float32", "context": 64, "prefill_chunk": 16, "max_batch": 3}
SIZES = {
    "vocab_size": 400, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "pad_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclass(frozen=True)
class Other:
    """A family.  `own` attention is the model's code, over what HMT's pages hold."""

    config: dict[str, Any] = field(default_factory=dict)
    own: bool = False
    experts: bool = False
    without: tuple[str, ...] = ()


OTHERS = {
    "bloom": Other({"n_head": 4, "n_layer": 6}, own=True, without=("num_key_value_heads",)),
    "cohere": Other({"logit_scale": 0.3, "use_qk_norm": True}),
    "falcon": Other({"alibi": True, "multi_query": True}, own=True),
    "gemma2": Other({"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16}),
    "glm4": Other({"head_dim": 16}),
    "gpt2": Other(without=("num_key_value_heads", "intermediate_size")),
    "gpt_neox": Other({"rotary_pct": 0.5}, without=("num_key_value_heads",)),
    "granite": Other({"logits_scaling": 2.0, "residual_multiplier": 0.7}),
    "granitemoe": Other({"num_local_experts": 8, "num_experts_per_tok": 2}, experts=True),
    "olmo2": Other({"tie_word_embeddings": True}),
    "olmoe": Other(EXPERTS, experts=True),
    "opt": Other({"ffn_dim": 96, "word_embed_proj_dim": 48}, without=("num_key_value_heads",)),
    "phi": Other({"partial_rotary_factor": 0.5}),
    "qwen2_moe": Other({**EXPERTS, "shared_expert_intermediate_size": 48}, experts=True),
    "stablelm": Other({"use_qkv_bias": True}),
    "starcoder2": Other({"sliding_window": 9, "use_bias": True}),
}


def config_of(kind: str, **changes: Any) -> Any:
    other = OTHERS[kind]
    sizes = {name: size for name, size in SIZES.items() if name not in other.without}
    return CONFIG_MAPPING[kind](**sizes | other.config | changes)


def publish(kind: str, folder: Path) -> Any:
    """A random model, written to `folder`."""
    reference = random_reference(config_of(kind), seed=len(kind))
    published(reference, folder)
    shutil.copy(str(files("hmt") / "embedded" / "mini-dense" / "tokenizer.json"), folder)
    return reference


def least_budget(folder: Path) -> int:
    """The least host memory in which it runs."""
    prepared = prepare(folder, EngineConfig.resolve(host_memory="256MiB", **OPTIONS))
    return smallest_budget(prepared.demand, PlanOptions(0, 64, 16))


@pytest.mark.parametrize("kind", OTHERS)
def test_logits_equal_transformers_in_a_quarter_of_the_memory(kind: str, tmp_path: Path) -> None:
    """In chunks and token by token, by both executors, alone and with others."""
    reference = publish(kind, tmp_path)
    rng = random.Random(len(kind))
    texts = [[rng.randrange(400) for _ in range(TOKENS - 9 * n)] for n in range(3)]
    with torch.inference_mode():
        wanted = [reference(torch.tensor([text])).logits[0] for text in texts]
        if reference._supports_sdpa:
            reference.set_attn_implementation("sdpa")
        other_way = reference(torch.tensor([texts[0]])).logits[0]
    found, answers, least = [], [], least_budget(tmp_path)
    for executor in ("plain", "overlapped"):
        with hmt.Engine(host_memory=least, executor=executor, **OPTIONS) as engine:
            model = engine.load_model(tmp_path)
            summary = model.summary()
            held = sum(model.plan.reserved[purpose] for purpose in ("resident", "slots"))
            assert held <= model.prepared.demand.weight_bytes // SHARE
            assert "transformers' modules" in summary.notes[0]
            found.append(model.logits(texts[0], range(TOKENS), prefill=PROMPT_TOKENS))
            requests = [
                hmt.Request(
                    input=text,
                    max_new_tokens=4,
                    ignore_eos=True,
                    sampling=hmt.Sampling(temperature=0),
                )
                for text in texts
            ]
            answers.append(model.infer_batch(requests))
    assert torch.equal(*found)
    assert [a.token_ids for a in answers[0]] == [a.token_ids for a in answers[1]]
    spread = float(wanted[0].std())
    differs = float((wanted[0] - other_way).abs().max())
    ours = float((found[0] - wanted[0]).abs().max())
    print(f"{kind}: sdpa {differs / spread:.1e}, ours {ours / spread:.1e}, spread {spread:.2g}")
    assert ours <= max(4 * differs, 2e-5 * spread)
    for logits, answer in zip(wanted, answers[0], strict=True):
        assert answer.token_ids[0] == int(logits[-1].argmax())


@pytest.mark.parametrize("kind", OTHERS)
def test_blocks_and_who_computes_attention(kind: str) -> None:
    config = config_of(kind)
    name = transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__
    model: Any = open_model(config.to_dict() | {"architectures": [name]}, Path(), torch.float32)
    kinds = {block.id.kind for block in model.spec.blocks if block.id.layer >= 0}
    experts = {BlockKind.ROUTER, BlockKind.EXPERT} if OTHERS[kind].experts else {BlockKind.FFN}
    assert kinds == {BlockKind.ATTENTION} | experts
    assert model._tree.own_attention == OTHERS[kind].own
    assert model.spec.host_only
