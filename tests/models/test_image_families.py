"""Images of further families: logits of transformers, budgets, chunks, prefixes."""

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from vision_families import FAMILIES, MORE, family_logits, family_model, publish_family
from vision_models import BEGIN, IMAGE, picture

import hmt
from hmt.contracts.request import Completion, Request, Sampling

IMAGES = [picture(37, 21), picture(18, 50, 1)]
OPTIONS: dict[str, Any] = {"dtype": "float32", "context": 1024, "max_batch": 2}


def words(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(16, 4000) for _ in range(count)]


def mark(name: str) -> int:
    return BEGIN if name.startswith("gemma3") else IMAGE


def prompt(name: str) -> list[int]:
    return [*words(7, 1), mark(name), *words(5, 2), mark(name), *words(6, 3)]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def made(name: str) -> tuple[Any, Path]:
        folder = tmp_path_factory.mktemp(name)
        case = (FAMILIES | MORE)[name]
        model = family_model(case)
        publish_family(case, model, folder)
        return model, folder

    return made


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request: pytest.FixtureRequest, folder_of: Any) -> Iterator[tuple[str, Any]]:
    _, folder = folder_of(request.param)
    options = OPTIONS | {"max_prefill_tokens": 16, "prefix_cache": True}
    with hmt.Engine(host_memory="64MiB", **options) as engine:
        yield request.param, engine.load_model(folder)


def asked(prompt: list[int], images: Any = tuple(IMAGES), **more: Any) -> Request:
    given: dict[str, Any] = {
        "max_new_tokens": 4, "ignore_eos": True, "prompt_logprobs": 0,
        "sampling": Sampling(logprobs=0),
    }  # fmt: skip
    return Request(input=prompt, images=images, **(given | more))


def numbers(answer: Completion) -> list[float]:
    return [one.logprob for one in (*answer.prompt_logprobs, *answer.logprobs)]


def check_logits(name: str, model: hmt.LoadedModel, folder_of: Any) -> None:
    """Text before, between and behind two images; chunks of 16 tokens."""
    reference, folder = folder_of(name)
    request = asked(prompt(name))
    answer = model.infer(request)
    whole = model._input.process(request, None).state.tokens
    assert len(whole) == answer.prompt_tokens > 2 * 4 + 18
    tokens = [*whole, *answer.token_ids]
    wanted = family_logits(reference, folder, tokens, IMAGES).log_softmax(-1)
    expected = wanted[range(len(tokens) - 1), tokens[1:]]
    torch.testing.assert_close(torch.tensor(numbers(answer)), expected, atol=1e-4, rtol=0)


def test_logits_are_those_of_transformers(loaded: tuple[str, Any], folder_of: Any) -> None:
    check_logits(*loaded, folder_of)


@pytest.mark.parametrize("name", MORE)
def test_logits_of_further_sizes(name: str, folder_of: Any) -> None:
    _, folder = folder_of(name)
    with hmt.Engine(host_memory="64MiB", **OPTIONS, max_prefill_tokens=16) as engine:
        check_logits(name, engine.load_model(folder), folder_of)
