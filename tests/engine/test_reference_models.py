"""Both reference models against transformers, and against themselves at every budget."""

from pathlib import Path
from typing import Any

import pytest
import torch
from given_steps import in_steps
from reference import MODELS, transformers_model

import hmt
from hmt.engine import EngineConfig, prepare
from hmt.planner import PlanOptions, smallest_budget

pytestmark = pytest.mark.each_once

PROMPTS = [
    [{"role": "user", "content": "What is 12 + 30?"}],
    [
        {
            "role": "user",
            "content": "Make JSON: Vera is 31 years old, owns a kite and lives near the tower.",
        }
    ],
    "It was the best of times, it was the worst of times,",
    "The president rose and said: fellow citizens,",
    [{"role": "user", "content": "Kira took the red apple to the attic. Who took the apple?"}],
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", MODELS)
def test_200_greedy_tokens_equal_transformers(name: str) -> None:
    oracle = transformers_model(name)
    with hmt.Engine(dtype="float32", host_memory="256MiB", context=4096) as engine:
        model = engine.load_model(MODELS[name])
        requests = [hmt.Request(prompt, 200, ignore_eos=True) for prompt in PROMPTS]
        answers = model.infer_batch(requests)
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            chat = isinstance(prompt, list)
            ids = model.tokenizer.chat_prompt(prompt) if chat else model.tokenizer.encode(prompt)
            assert answer.prompt_tokens == len(ids)
            # Given the answer, what the oracle would have chosen at each of its places: where these
            # are the answer's tokens, it is what the oracle generates.
            with torch.inference_mode():
                logits = oracle(torch.tensor([[*ids, *answer.token_ids]])).logits[0]
            assert len(answer.token_ids) == 200
            assert list(answer.token_ids) == logits[len(ids) - 1 : -1].argmax(-1).tolist()


def smallest(path: Path, **options: object) -> int:
    config = EngineConfig.resolve(host_memory="1GiB", **options)
    prepared = prepare(path, config)
    return smallest_budget(prepared.demand, PlanOptions(0, config.context))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("quantization", ["none", "w4a8"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_bit_identical_at_every_budget(
    name: str, quantization: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HMT_POISON", "on")
    path, options = MODELS[name], {"quantization": quantization, "context": 256}
    least = smallest(path, **options)
    whole = prepare(path, EngineConfig.resolve(host_memory="1GiB", **options)).demand.weight_bytes
    # KV, activations and buffers, which `least` holds, come on top of the weights' share.
    budgets = [1 << 30, least + whole // 2, least + whole // 4, least]
    # Six steps of one token: what is streamed is read again in each.
    tokens = torch.randint(8, 4000, (136,), generator=torch.Generator().manual_seed(0)).tolist()
    ways = [(budget, "overlapped") for budget in budgets]
    ways += [(budget, "plain") for budget in (budgets[0], least)]
    if quantization != "none":  # each load converts all weights, which takes most of the time
        ways = [ways[0], ways[2], ways[5]]
    reference: torch.Tensor | None = None
    for budget, executor in ways:
        with hmt.Engine(
            host_memory=budget, executor=executor, spill_dir=tmp_path, **options
        ) as engine:
            model = engine.load_model(path)
            logits = model.logits(tokens, range(136), prefill=130)
            streamed = model.summary().streamed_bytes
        assert (streamed == 0) == (budget == budgets[0])
        if reference is None:
            reference = logits
        assert torch.equal(logits, reference), (budget, executor)


# Steps that cross 256 and 512 positions, of weights and pages in every kind of numbers.
@pytest.mark.parametrize(
    ("name", "before", "options"),
    [
        ("mini-dense", 504, {}),
        ("mini-dense", 250, {"dtype": "float32"}),
        ("mini-dense", 250, {"dtype": "float16", "kv_quant": "fp8"}),
        ("mini-dense", 250, {"quantization": "w4a8"}),
        ("mini-moe", 250, {}),
        ("mini-moe", 20, {"dtype": "float32"}),
        ("mini-moe", 504, {"dtype": "float16", "kv_quant": "fp8"}),
        ("mini-moe", 250, {"quantization": "w4a8"}),
    ],
)
def test_a_token_does_not_depend_on_the_size_of_its_step(
    name: str, before: int, options: dict[str, Any]
) -> None:
    tokens = torch.randint(
        8, 4000, (before + 16,), generator=torch.Generator().manual_seed(before)
    ).tolist()
    prompt = [512] * (before // 512) + [before % 512]
    with hmt.Engine(host_memory="1GiB", context=2112, max_prefill_tokens=512, **options) as engine:
        model = engine.load_model(MODELS[name])
        wanted = in_steps(model, tokens, [*prompt, *[1] * 16], 16)
        for sizes in ([2] * 8, [5, 5, 6], [13, 3], [16]):
            assert torch.equal(in_steps(model, tokens, [*prompt, *sizes], 16), wanted), sizes
