"""Several answers to one prompt: what separate requests answer, with the prompt computed once."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from reference import MINI_DENSE, MINI_MOE
from single_answers import SingleAnswers

import hmt
from hmt.base.errors import ContextLengthError, RequestError
from hmt.engine import LoadedModel
from hmt.kvcache import SplitKVCache

pytestmark = pytest.mark.each_once

OPTIONS: dict[str, Any] = {"host_memory": "320MiB", "dtype": "float32", "max_batch": 4}
WAYS: dict[str, dict[str, Any]] = {
    "near": {"context": 2048},
    "levels": {"context": 2048, "kv_gpu_memory": "7MiB", "max_prefill_tokens": 32},
    "gpu": {"context": 2048, "gpus": "fake", "gpu_memory": "96MiB"},
    "both": {"context": 2048, "gpus": "fake", "gpu_memory": "12MiB"},
    "prefixes": {"context": 2048, "prefix_cache": True},
    "levels and prefixes": {
        "context": 2048, "kv_gpu_memory": "7MiB", "max_prefill_tokens": 32, "prefix_cache": True,
    },
}  # fmt: skip


def request(tokens: int, seed: int | None = 7, new: int = 12) -> hmt.Request:
    rng = random.Random(tokens)
    ids = [rng.randrange(16, 500) for _ in range(tokens)]
    sampling = hmt.Sampling() if seed is None else hmt.Sampling(temperature=1.5, seed=seed)
    return hmt.Request(ids, new, sampling=sampling, ignore_eos=True)


@pytest.fixture(scope="module")
def alone() -> Iterator[dict[Any, SingleAnswers]]:
    """By model."""
    with (
        hmt.Engine(**WAYS["near"], **OPTIONS) as dense,
        hmt.Engine(**WAYS["near"], **OPTIONS) as moe,
    ):
        yield {
            MINI_DENSE: SingleAnswers(dense.load_model(MINI_DENSE)),
            MINI_MOE: SingleAnswers(moe.load_model(MINI_MOE)),
        }


def is_free(model: LoadedModel) -> bool:
    kv = model._core.memory.kv
    return model._loop.call(lambda: kv.allocator.free_tokens) == kv.allocator.capacity_tokens


@pytest.mark.parametrize("path", [MINI_DENSE, MINI_MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("way", WAYS)
def test_answers_are_those_of_separate_requests(
    way: str, path: Any, alone: dict[Any, SingleAnswers]
) -> None:
    with hmt.Engine(**WAYS[way], **OPTIONS) as engine:
        model = engine.load_model(path)
        assert isinstance(model._core.memory.kv, SplitKVCache) == (way == "both")
        for tokens in (151, 160):  # 16 tokens are a page
            apart = [alone[path](request(tokens, seed)) for seed in (7, 8, 9)]
            if "prefix_cache" in WAYS[way]:
                assert model.infer(request(tokens)).token_ids == apart[0]
            before = model.summary().prompt.tokens
            found = model.infer_choices(request(tokens), 3)
            assert [one.token_ids for one in found] == apart
            computed = model.summary().prompt.tokens - before
            assert computed == (
                tokens if "prefix_cache" not in WAYS[way] else (tokens - 1) % 16 + 1
            )
        assert len({tuple(one) for one in apart}) == 3
        alike = model.infer_choices(request(151, None), 2)
        assert alike[0] == alike[1] == model.infer(request(151, None))
        assert "prefix_cache" in WAYS[way] or is_free(model)


@pytest.mark.parametrize(
    "options", [{"context": 2048, "max_batch": 2}, {"context": 256}, {"context": 320}], ids=str
)
def test_answers_that_find_no_room_begin_with_the_prompt_later(
    options: dict[str, Any], alone: dict[Any, SingleAnswers]
) -> None:
    """256 positions hold one text of 163, 320 also what a second does not share."""
    with hmt.Engine(**OPTIONS | options) as engine:
        model = engine.load_model(MINI_DENSE)
        apart = [alone[MINI_DENSE](request(151, seed)) for seed in range(7, 12)]
        before = model.summary().prompt.tokens
        assert [one.token_ids for one in model.infer_choices(request(151), 5)] == apart
        assert model.summary().prompt.tokens - before == 151
        assert is_free(model)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_however_many_answers_the_prompt_is_computed_once(
    way: str, batch: int, alone: dict[Any, SingleAnswers]
) -> None:
    """Of which more wait than run; lengths differ, so that their places are free at odd times."""
    with hmt.Engine(**WAYS[way], **OPTIONS | {"max_batch": batch}) as engine:
        model = engine.load_model(MINI_DENSE)
        for tokens, new in ((151, 12), (160, 3), (200, 20)):
            apart = [alone[MINI_DENSE](request(tokens, seed, new)) for seed in range(7, 12)]
            if "prefix_cache" in WAYS[way]:
                assert model.infer(request(tokens, new=new)).token_ids == apart[0]
            before = model.summary().prompt.tokens
            answers = model.infer_choices(request(tokens, new=new), 5)
            assert [one.token_ids for one in answers] == apart
            computed = model.summary().prompt.tokens - before
            assert computed == (
                tokens if "prefix_cache" not in WAYS[way] else (tokens - 1) % 16 + 1
            )
        assert "prefix_cache" in WAYS[way] or is_free(model)


@pytest.mark.parametrize("way", WAYS)
def test_any_of_many_answers_can_end_early(way: str, alone: dict[Any, SingleAnswers]) -> None:
    """Cancelled before, while, or after it holds the prompt for others."""
    with hmt.Engine(**WAYS[way], **OPTIONS | {"max_batch": 2}) as engine:
        model = engine.load_model(MINI_DENSE)
        apart = [alone[MINI_DENSE](request(151, seed)) for seed in range(7, 13)]
        for seed in range(6):
            rng = random.Random(seed)
            gone = rng.sample(range(6), rng.randrange(1, 5))
            before = model.summary().prompt.tokens
            streams = model.stream_choices(request(151), 6)
            for number in gone:
                for _ in range(rng.choice([0, 0, 3]) if number < 2 else 0):
                    next(streams[number])
                streams[number].close()
            left = {number: streams[number] for number in range(6) if number not in gone}
            for number, stream in left.items():
                assert stream.completion().token_ids == apart[number]
            assert model.summary().prompt.tokens - before <= 2 * 151
            assert "prefix_cache" in WAYS[way] or is_free(model)


def test_a_prompt_kept_for_others_makes_way_for_a_request_that_needs_the_room() -> None:
    """The choices wait at a lower priority; what they hold is given up, and they answer later."""
    with hmt.Engine(context=512, **OPTIONS | {"max_batch": 1}) as engine:
        model = engine.load_model(MINI_DENSE)
        apart = [model.infer(request(300, seed)).token_ids for seed in range(7, 11)]
        large = replace(request(440, new=60), priority=1)
        alone = model.infer(large).token_ids
        choices = model.stream_choices(request(300), 4)
        next(choices[0])
        assert model.infer(large).token_ids == alone
        assert [stream.completion().token_ids for stream in choices[1:]] == apart[1:]
        assert is_free(model)


def test_other_requests_come_in_between() -> None:
    with hmt.Engine(**WAYS["near"], **OPTIONS) as engine:
        model = engine.load_model(MINI_DENSE)
        wanted = [model.infer(request(n)).token_ids for n in (40, 300, 90)]
        apart = [model.infer(request(200, seed)).token_ids for seed in (7, 8, 9)]
        first = model.stream(request(40))
        choices = model.stream_choices(request(200), 3)
        others = [model.stream(request(n)) for n in (300, 90)]
        assert [tuple(e.token_id for e in stream) for stream in (first, *others)] == wanted
        assert [tuple(e.token_id for e in stream) for stream in choices] == apart


@pytest.mark.parametrize("cancelled", [0, 1])
def test_one_answer_can_be_cancelled(cancelled: int) -> None:
    """Before anybody has computed the prompt; whoever is left does."""
    with hmt.Engine(**WAYS["near"], **OPTIONS) as engine:
        model = engine.load_model(MINI_DENSE)
        apart = [model.infer(request(1500, seed)).token_ids for seed in (7, 8)]
        streams = model.stream_choices(request(1500), 2)
        streams[cancelled].close()
        left = streams[1 - cancelled]
        assert tuple(event.token_id for event in left) == apart[1 - cancelled]
        assert is_free(model)


def test_answers_of_one_token_end_at_once() -> None:
    with hmt.Engine(**WAYS["levels"], **OPTIONS) as engine:
        model = engine.load_model(MINI_DENSE)
        found = model.infer_choices(request(151, new=1), 4)
        assert [one.token_ids for one in found] == [
            model.infer(request(151, seed, new=1)).token_ids for seed in range(7, 11)
        ]
        assert is_free(model)


def test_a_prompt_that_cannot_be_is_told_once() -> None:
    with hmt.Engine(context=256, **OPTIONS) as engine:
        model = engine.load_model(MINI_DENSE)
        with pytest.raises(ContextLengthError):
            model.infer_choices(request(300), 3)
        for wrong in (0, True, 1.0):
            with pytest.raises(RequestError, match="ask for one or more"):
                model.infer_choices(request(20), wrong)  # type: ignore[arg-type]
        assert model.infer_choices(request(20, None), 1) == [model.infer(request(20, None))]
