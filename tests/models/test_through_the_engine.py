"""Every family from published files through the engine, in the least memory that works."""

import random
from pathlib import Path

import pytest
import torch
from default_part import first_of_each
from given_steps import in_steps
from plain_memory import published, put_tokenizer, random_reference
from random_configs import PROMPT_TOKENS, Case, case_of, cases

import hmt
from hmt.engine import EngineConfig, prepare
from hmt.hardware import machine
from hmt.hardware.link_rates import LinkRates
from hmt.kernels.cpu import extension
from hmt.planner import PlanOptions, smallest_budget

TOLERANCE = 1e-4
OPTIONS = {"dtype": "float32", "context": 64, "max_prefill_tokens": 16, "max_batch": 1}
# Of these transformers computes recurrent state by chunks.
CHUNKED = ("qwen3_next", "qwen3_5", "mamba", "bamba", "granitemoehybrid", "falcon", "nemotron_h")
CHUNKED += ("kimi_linear", "bailing_hybrid", "olmo_hybrid", "minimax", "glm5_next")


@pytest.mark.parametrize("case", first_of_each(cases()), ids=lambda case: case.name)
def test_logits_equal_transformers_and_do_not_depend_on_the_budget(
    case: Case, tmp_path: Path
) -> None:
    reference = random_reference(case.config, case.seed)
    published(reference, tmp_path)
    put_tokenizer(tmp_path)
    rng = random.Random(case.seed)
    tokens = [rng.randrange(case.config.vocab_size) for _ in range(PROMPT_TOKENS + 11)]
    with torch.inference_mode():
        wanted = reference(torch.tensor([tokens]), **case.options).logits[0]
    config = EngineConfig.resolve(host_memory="64MiB", **OPTIONS)
    least = smallest_budget(prepare(tmp_path, config).demand, PlanOptions(0, 64, 16))
    found, kind = [], case.config.model_type
    chunked = kind != "minimax_m2" and any(name in kind for name in CHUNKED)
    in_one_call = any(name in kind for name in ("qwen3_next", "qwen3_5"))
    apart = (chunked and not in_one_call) or any(
        name in kind
        for name in ("axk2", "deepseek", "gemma4", "glm", "lfm2", "jamba", "minimax", "qwen4")
    )
    ways = [(1 << 26, "overlapped"), (least, "overlapped")]
    ways += [((1 << 26, least)[case.seed % 2], "plain")]  # a family has variants of both kinds
    for budget, executor in ways:
        with hmt.Engine(host_memory=budget, executor=executor, **OPTIONS) as engine:
            model = engine.load_model(tmp_path)
            assert (model.summary().streamed_bytes > 0) == (budget == least)
            if executor == "overlapped":
                together = bool(model._core.runner.executor._together)
                assert together == (budget > least and not apart and extension.load() is not None)
            found.append(model.logits(tokens, range(len(tokens)), prefill=PROMPT_TOKENS))
            if len(found) == 1 and extension.load() is not None:  # torch cuts products by rows
                together = in_steps(model, tokens, [16, PROMPT_TOKENS - 16, 4, 7], 11)
                assert torch.equal(together, found[0][PROMPT_TOKENS:]), "tokens share steps"
    # As in test_parity: of models with recurrent state, transformers computes chunks otherwise.
    atol = TOLERANCE * (max(1.0, float(wanted.std())) if chunked else 1)
    torch.testing.assert_close(found[0], wanted, atol=atol, rtol=0)
    for other in found[1:]:
        assert torch.equal(found[0], other)


@pytest.mark.parametrize("gpu", ["fake", pytest.param("0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["phi3-1", "llama-0"])
def test_captured_steps_turn_each_run_by_its_own_length(
    name: str, gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that may and may not get long, by turns: captures of one kind are not for the other."""
    names = ["a fake device"]
    names += [torch.cuda.get_device_name(0)] if torch.cuda.is_available() else []
    for device in names:
        monkeypatch.setitem(machine._links, device, LinkRates(40e9))
    case = case_of(name)
    case.config.max_position_embeddings = 256
    published(random_reference(case.config, case.seed), tmp_path)
    put_tokenizer(tmp_path)
    rng = random.Random(case.seed)
    prompts = [[rng.randrange(case.config.vocab_size) for _ in range(20)] for _ in range(4)]
    lengths = (8, 90, 12, 110)  # phi3-1 has other frequencies from 64 positions on
    requests = [
        hmt.Request(input=prompt, max_new_tokens=length, ignore_eos=True)
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    options = OPTIONS | {"context": 256, "host_memory": "64MiB"}
    with hmt.Engine(gpus=gpu, gpu_memory="2GiB", **options | {"max_batch": 2}) as engine:
        model = engine.load_model(tmp_path)
        answers = [model.infer(request).token_ids for request in requests]
        answers += [one.token_ids for one in model.infer_batch(requests)]
        captured = model._core.runner.executor.graphs
        assert captured is not None and captured.works
    with hmt.Engine(**options) as engine:
        model = engine.load_model(tmp_path)
        for prompt, answer in zip(prompts * 2, answers, strict=True):
            text = [*prompt, *answer[:-1]]
            rows = range(len(prompt) - 1, len(text))
            logits = model.logits(text, rows)
            gaps = logits.max(-1).values - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
            assert float(gaps.max()) < 1e-3, "none but near ties"
