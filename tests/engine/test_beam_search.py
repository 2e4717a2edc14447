"""Beam search against transformers, and against a search that computes every beam from scratch."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import MINI_DENSE, MINI_MOE, MODELS, transformers_model

import hmt
from hmt.base.errors import BudgetError, RequestError
from hmt.contracts.request import FinishReason
from hmt.engine import LoadedModel
from hmt.engine.beam_search import BeamSearch

pytestmark = pytest.mark.each_once

OPTIONS: dict[str, Any] = {
    "host_memory": "320MiB", "dtype": "float32", "max_batch": 4, "context": 1024,
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "near": {},
    "levels": {"kv_gpu_memory": "6MiB", "max_prefill_tokens": 32},
    "gpu": {"gpus": "fake", "gpu_memory": "96MiB"},
    "both": {"gpus": "fake", "gpu_memory": "12MiB"},
    "prefixes": {"prefix_cache": True},
}
QUESTIONS = ("What is 12 + 34?", "Repeat: apple book key", "Who took the ring?")


def prompt(model: LoadedModel, question: str) -> list[int]:
    return model.tokenizer.chat_prompt([{"role": "user", "content": question}])


def text(tokens: int) -> list[int]:
    rng = random.Random(tokens)
    return [rng.randrange(16, 500) for _ in range(tokens)]


def is_free(model: LoadedModel) -> bool:
    kv = model._core.memory.kv
    return model._loop.call(lambda: kv.allocator.free_tokens) == kv.allocator.capacity_tokens


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length_penalty", [1.0, 0.0])
def test_answers_are_those_of_transformers(name: str, length_penalty: float) -> None:
    oracle = transformers_model(name)
    with hmt.Engine(**OPTIONS) as engine:
        model = engine.load_model(MODELS[name])
        for question in QUESTIONS:
            ids = prompt(model, question)
            found = model.beam_search(hmt.Request(ids, 12), 3, length_penalty=length_penalty)
            wanted = oracle.generate(
                torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
                num_beams=3, num_return_sequences=3, max_new_tokens=12, do_sample=False,
                length_penalty=length_penalty, early_stopping=False, use_cache=True,
                eos_token_id=sorted(model.tokenizer.eos_ids), pad_token_id=0,
                return_dict_in_generate=True, output_scores=True,
            )  # fmt: skip
            for one, tokens, score in zip(
                found, wanted.sequences, wanted.sequences_scores, strict=True
            ):
                padded = tokens.tolist()[len(ids) :]
                assert [*one.token_ids] == padded[: len(one.token_ids)]
                assert {*padded[len(one.token_ids) :]} <= {0, *model.tokenizer.eos_ids}
                assert one.score == pytest.approx(float(score), abs=1e-3)
        assert is_free(model)


@cache
def from_scratch(path: Path) -> list[Any]:
    """Four beams of 10 tokens without ends, each step of each a text of its own: (sum, tokens).

    All near and on the CPU, whichever way is compared with it.
    """
    with hmt.Engine(**OPTIONS) as engine:
        return searched(engine.load_model(path), text(150), 4, 10)


def searched(model: LoadedModel, ids: list[int], beams: int, length: int) -> list[Any]:
    going: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(length):
        every = []
        for total, tokens in going:
            logits = model.logits([*ids, *tokens], [len(ids) + len(tokens) - 1])[0]
            best = logits.log_softmax(-1).topk(beams)
            every += [
                (total + float(log), [*tokens, int(token)])
                for log, token in zip(*best, strict=True)
            ]
        going = sorted(every, reverse=True)[:beams]
    return going


@pytest.mark.parametrize("path", [MINI_DENSE, MINI_MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("way", WAYS)
def test_beams_share_pages_and_do_not_disturb_each_other(way: str, path: Any) -> None:
    request = hmt.Request(text(150), 10, ignore_eos=True)
    with hmt.Engine(**WAYS[way], **OPTIONS) as engine:
        model = engine.load_model(path)
        wanted = from_scratch(path)
        before = model.summary().prompt.tokens
        found = model.beam_search(request, 4)
        assert model.summary().prompt.tokens - before == 150
        assert [[*one.token_ids] for one in found] == [tokens for _, tokens in wanted]
        for one, (total, _) in zip(found, wanted, strict=True):
            assert one.score == pytest.approx(total / 10, abs=1e-3)
            assert one.finish_reason is FinishReason.LENGTH
            assert one.text == model.tokenizer.decode(one.token_ids)
        assert is_free(model)


def test_one_beam_is_greedy_and_others_run_between() -> None:
    with hmt.Engine(**OPTIONS) as engine:
        model = engine.load_model(MINI_DENSE)
        ids = prompt(model, QUESTIONS[0])
        greedy = model.infer(hmt.Request(ids, 12))
        other = hmt.Request(text(300), 40, ignore_eos=True)
        wanted = model.infer(other).token_ids
        stream = model.stream(other)
        [found] = model.beam_search(hmt.Request(ids, 12), 1)
        assert (found.token_ids, found.text) == (greedy.token_ids, greedy.text)
        assert found.finish_reason is FinishReason.STOP
        assert tuple(event.token_id for event in stream) == wanted


def test_what_cannot_be_searched_is_told() -> None:
    with hmt.Engine(**OPTIONS | {"context": 256}) as engine:
        model = engine.load_model(MINI_DENSE)
        ids = text(100)
        for beams in (0, 5, 2.0):
            with pytest.raises(RequestError, match="max_batch allows 1 to 4"):
                model.beam_search(hmt.Request(ids, 8), beams)  # type: ignore[arg-type]
        for request in (
            hmt.Request(ids, 8, stop="x"),
            hmt.Request(ids, 8, sampling=hmt.Sampling(temperature=1.0)),
        ):
            with pytest.raises(RequestError, match="leave sampling and stop strings out"):
                model.beam_search(request, 2)
        with pytest.raises(RequestError, match="a request of its own"):
            model.beam_search(hmt.Request(ids, 8, prompt_logprobs=0), 2)
        with pytest.raises(BudgetError, match="3 beams of 90 tokens after a prompt of 100"):
            model.beam_search(hmt.Request(ids, 90), 3)
        assert is_free(model)


def test_a_step_that_fails_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with hmt.Engine(**OPTIONS) as engine:
        model = engine.load_model(MINI_DENSE)
        steps = iter(range(5))
        decode = BeamSearch._decode

        def fails(search: BeamSearch) -> torch.Tensor:
            if next(steps) == 4:
                raise MemoryError
            return decode(search)

        monkeypatch.setattr(BeamSearch, "_decode", fails)
        with pytest.raises(MemoryError):
            model.beam_search(hmt.Request(text(90), 20, ignore_eos=True), 4)
        assert is_free(model)
