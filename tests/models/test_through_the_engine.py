"""Every family from published files through the engine, in the least memory that works."""

import random
import shutil
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from plain_memory import published, random_reference
from random_configs import PROMPT_TOKENS, Case, cases

import hmt
from hmt.engine import EngineConfig, prepare
from hmt.kernels.cpu import extension
from hmt.planner import PlanOptions, smallest_budget

TOLERANCE = 1e-4
OPTIONS = {"dtype": "float32", "context": 64, "prefill_chunk": 16, "max_batch": 1}


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_logits_equal_transformers_and_do_not_depend_on_the_budget(
    case: Case, tmp_path: Path
) -> None:
    reference = random_reference(case.config, case.seed)
    published(reference, tmp_path)
    shutil.copy(str(files("hmt") / "embedded" / "mini-dense" / "tokenizer.json"), tmp_path)
    rng = random.Random(case.seed)
    tokens = [rng.randrange(case.config.vocab_size) for _ in range(PROMPT_TOKENS + 11)]
    with torch.inference_mode():
        wanted = reference(torch.tensor([tokens]), **case.options).logits[0]
    config = EngineConfig.resolve(host_memory="64MiB", **OPTIONS)
    least = smallest_budget(prepare(tmp_path, config).demand, PlanOptions(0, 64, 16))
    found = []
    ways = [(b, executor) for b in (1 << 26, least) for executor in ("plain", "overlapped")]
    for budget, executor in ways:
        with hmt.Engine(host_memory=budget, executor=executor, **OPTIONS) as engine:
            model = engine.load_model(tmp_path)
            assert (model.summary().streamed_bytes > 0) == (budget == least)
            if executor == "overlapped":
                together = model._core._executor._together is not None
                latent = "deepseek" in case.config.model_type
                assert together == (budget > least and not latent and extension.load() is not None)
            found.append(model.logits(tokens, range(len(tokens)), prefill=PROMPT_TOKENS))
    torch.testing.assert_close(found[0], wanted, atol=TOLERANCE, rtol=0)
    for other in found[1:]:
        assert torch.equal(found[0], other)
