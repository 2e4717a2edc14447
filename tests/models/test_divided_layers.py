"""Families whose layers several processes divide: logits are transformers', whoever has what."""

import random
from pathlib import Path

import pytest
import torch
from default_part import first_of_each
from plain_memory import published, put_tokenizer, random_reference
from random_configs import PROMPT_TOKENS, Case, cases
from rank_threads import ranks_as_threads

import hmt

TOLERANCE = 1e-4
OPTIONS = {
    "dtype": "float32", "context": 64, "max_prefill_tokens": 16, "max_batch": 1,
    "host_memory": "64MiB",
}  # fmt: skip
DENSE = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3_text")
SPARSE = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe", "minimax_m2")


@pytest.mark.parametrize("case", first_of_each(cases(*DENSE, *SPARSE)), ids=lambda case: case.name)
def test_logits_equal_transformers(case: Case, tmp_path: Path) -> None:
    reference = random_reference(case.config, case.seed)
    published(reference, tmp_path)
    put_tokenizer(tmp_path)
    rng = random.Random(case.seed)
    tokens = [rng.randrange(case.config.vocab_size) for _ in range(PROMPT_TOKENS + 5)]
    with torch.inference_mode():
        wanted = reference(torch.tensor([tokens]), **case.options).logits[0]
    ways = [{"tp": 2}, {"ep": 2}] if case.name.rpartition("-")[0] in SPARSE else [{"tp": 2}]
    for way in ways:
        with ranks_as_threads(), hmt.Engine(**OPTIONS, **way) as engine:
            model = engine.load_model(tmp_path)
            found = model.logits(tokens, range(len(tokens)), prefill=PROMPT_TOKENS)
        torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)
