"""Requests that give way to others answer what they answer alone."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
from reference import MINI_DENSE

import hmt
from hmt.engine import LoadedModel
from hmt.engine.streams import completions

OPTIONS: dict[str, Any] = {
    "host_memory": "320MiB", "dtype": "float32", "prefill_chunk": 64, "max_batch": 4,
}  # fmt: skip
LEVELS = {"kv_device_memory": "4MiB", "prefill_chunk": 32}
WAYS: dict[str, dict[str, Any]] = {
    "prefixes": {"prefix_cache": True},
    "levels and prefixes": {**LEVELS, "prefix_cache": True},
    "gpu": {"gpu_id": "pretended", "gpu_memory": "96MiB"},
    "both": {"gpu_id": "pretended", "gpu_memory": "12MiB"},
}
SEEDS = (1,)
NEVER = "no model writes this"


def traffic(seed: int) -> list[list[hmt.Request]]:
    """Groups of requests, greedy and drawn, that come one after the other."""
    rng = random.Random(seed)

    def request() -> hmt.Request:
        ids = [rng.randrange(16, 500) for _ in range(rng.choice([5, 33, 100, 260]))]
        sampling = rng.choice([hmt.Sampling(), hmt.Sampling(temperature=1.2, seed=seed)])
        # A stop string, so that nobody can know how long the answer becomes.
        return hmt.Request(
            ids, rng.choice([20, 60, 160]), sampling=sampling, ignore_eos=True, stop=NEVER,
            priority=rng.choice([-1, 0, 0, 1]), owner=rng.choice("ab"),
        )  # fmt: skip

    return [[request() for _ in range(rng.randint(2, 4))] for _ in range(3)]


@pytest.fixture(scope="module")
def alone() -> Iterator[dict[int, list[list[tuple[int, ...]]]]]:
    with hmt.Engine(context=1024, **OPTIONS) as engine:
        model = engine.load_model(MINI_DENSE)
        yield {
            seed: [[model.infer(one).token_ids for one in group] for group in traffic(seed)]
            for seed in SEEDS
        }


def expect_little(model: LoadedModel) -> None:
    """As after answers of one token."""
    for _ in range(8):
        model._core.scheduler._forecast.note("", 1, whole=True)


@pytest.mark.parametrize("way", WAYS)
def test_who_gives_way_answers_the_same(
    way: str, alone: dict[int, list[list[tuple[int, ...]]]]
) -> None:
    with hmt.Engine(context=544, **OPTIONS | WAYS[way]) as engine:
        model = engine.load_model(MINI_DENSE)
        expect_little(model)
        for seed, wanted in alone.items():
            streams, begun = [], []
            for group in traffic(seed):
                streams.append(model.stream_batch(group))
                begun.append(tuple(next(streams[-1][0]).token_id for _ in range(6)))
            for group, first, answers in zip(streams, begun, wanted, strict=True):
                found = [one.token_ids for one in completions(group)]
                assert [first + found[0], *found[1:]] == answers
        model.summary()  # once the last step has ended
        load, kv = model.load, model._core.memory.kv
        assert load.dropped and load.parked, load
        assert (load.waiting, load.running) == (0, 0)
        assert kv.free_tokens == kv.capacity_tokens == load.free_tokens
