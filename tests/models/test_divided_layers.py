"""Families that several processes divide: logits are transformers', whatever the cuts."""

import random
import re
from pathlib import Path

import pytest
import torch
from default_part import first_of_each
from plain_memory import published, put_tokenizer, random_reference
from random_configs import PROMPT_TOKENS, Case, case_of, cases
from rank_threads import ranks_as_threads

import hmt
from hmt.base.errors import ConfigError
from hmt.contracts.blocks import BlockId, BlockKind
from hmt.contracts.sharding import RankShare
from hmt.distributed import RankGroup
from hmt.models import open_model, with_architecture
from hmt.models.sharding import (
    Units,
    check_divisible,
    divided_parts,
    open_share,
    shares_of,
    text_config,
)
from hmt.weights.sharding import cut_of

TOLERANCE = 1e-4
OPTIONS = {
    "dtype": "float32", "context": 64, "max_prefill_tokens": 16, "max_batch": 1,
    "host_memory": "64MiB",
}  # fmt: skip
STYLES = {"colwise": 0, "rowwise": 1}  # axes that transformers' plans cut
DENSE = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3_text")
SPARSE = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe", "minimax_m2")


WHOLE_LAYERS = ("qwen3_next", "mamba")
OTHER_HYBRIDS = ("jamba", "kimi_linear", "nemotron_h", "lfm2", "falcon_h1", "minimax")


@pytest.mark.parametrize(
    "case",
    [
        *first_of_each(cases(*DENSE, *SPARSE, *WHOLE_LAYERS)),
        *(pytest.param(case_of(f"{name}-0"), marks=pytest.mark.whole) for name in OTHER_HYBRIDS),
    ],
    ids=lambda case: case.name,
)
def test_logits_equal_transformers(case: Case, tmp_path: Path) -> None:
    reference = random_reference(case.config, case.seed)
    published(reference, tmp_path)
    put_tokenizer(tmp_path)
    rng = random.Random(case.seed)
    tokens = [rng.randrange(case.config.vocab_size) for _ in range(PROMPT_TOKENS + 5)]
    with torch.inference_mode():
        wanted = reference(torch.tensor([tokens]), **case.options).logits[0]
    family = case.name.rpartition("-")[0]
    ways = [{"tp": 2}, {"ep": 2}] if family in SPARSE else [{"tp": 2}]
    ways = [{"pp": 2}] if family in (*WHOLE_LAYERS, *OTHER_HYBRIDS) else ways
    for way in ways:
        with ranks_as_threads(), hmt.Engine(**OPTIONS, **way) as engine:
            model = engine.load_model(tmp_path)
            found = model.logits(tokens, range(len(tokens)), prefill=PROMPT_TOKENS)
        torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", [*DENSE, *SPARSE])
def test_parameters_are_cut_as_transformers_plans_to(family: str, tmp_path: Path) -> None:
    """Where it has a plan for a parameter, along the axis of that; norms stay whole."""
    case = cases(family)[0]
    config = case.config.to_dict() | {"num_attention_heads": 4, "num_key_value_heads": 2}
    described = type(case.config)(**config)
    given = with_architecture(described.to_dict())
    whole = open_model(given, tmp_path, torch.float32)
    shares, remarks = shares_of(
        text_config(given, tmp_path), divided_parts(whole), Units(), RankGroup(0, 2), tp=2, ep=1
    )
    own = open_share(given, tmp_path, torch.float32, shares[1])
    assert not remarks
    plan, compared = described.base_model_tp_plan or {}, 0
    blocks = {block.id: block for block in whole.spec.blocks}
    for block in own.spec.blocks:
        for param, part in zip(blocks[block.id].params, block.params, strict=True):
            cut = cut_of(param, part, block.id, shares[1])
            name = re.sub(r"^model\.|\.(weight|bias)$", "", param.sources[0])
            style = plan.get(re.sub(r"\.\d+\.", ".*.", name), "").partition("_")[0]
            if style in STYLES and divided(block.id, shares[1]):
                compared += 1
                one_axis = len(param.shape) == 1 and style == "rowwise"  # a bias, added to the sum
                assert cut is None if one_axis else cut is not None and cut.axis == STYLES[style]
            elif "norm" in name:
                assert cut is None
    assert compared or family in ("gpt_oss", "deepseek_v2", "deepseek_v3", "minimax_m2")


def divided(block: BlockId, share: RankShare) -> bool:
    """Whether ranks divide what is in a block."""
    spans = {BlockKind.ATTENTION: share.heads, BlockKind.FFN: share.width}
    return spans.get(block.kind) is not None


@pytest.mark.parametrize("family", ["gemma4_text", "deepseek_v32"])
def test_layers_that_share_more_than_hidden_states_stay_in_one_process(
    family: str, tmp_path: Path
) -> None:
    config = with_architecture(case_of(f"{family}-0").config.to_dict())
    whole = open_model(config, tmp_path, torch.float32)
    with pytest.raises(ConfigError, match="leave pp out"):
        check_divisible(whole, tp=1, ep=1, pp=2)
