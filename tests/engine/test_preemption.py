"""Requests that give way to others answer what they answer alone."""

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from reference import MINI_DENSE

import hmt
from hmt.base.errors import HMTError
from hmt.contracts.request import TokenEvent
from hmt.contracts.step import Step
from hmt.engine import LoadedModel
from hmt.engine.execution.graphs.runner import CapturedGraph, GraphRunner
from hmt.kvcache import PagedKV

OPTIONS: dict[str, Any] = {
    "host_memory": "320MiB", "dtype": "float32", "max_prefill_tokens": 64, "max_batch": 4,
    "context": 544, "speculate": "off",
}  # fmt: skip
LEVELS = {"kv_gpu_memory": "4608KiB", "max_prefill_tokens": 32, "context": 640}
WAYS: dict[str, dict[str, Any]] = {
    "prefixes": {"prefix_cache": True},
    "speculation": {"prefix_cache": True, "speculate": "auto"},
    "levels and prefixes": {**LEVELS, "prefix_cache": True},
    "gpu": {"gpus": "fake", "gpu_memory": "96MiB"},
    "both": {"gpus": "fake", "gpu_memory": "12MiB"},
}
SEEDS = (9,)
NEVER = "no model writes this"


def traffic(seed: int) -> list[list[hmt.Request]]:
    """Groups of requests, greedy and drawn, that come one after the other."""
    rng = random.Random(seed)

    def request() -> hmt.Request:
        ids = [rng.randrange(16, 500) for _ in range(rng.choice([5, 33, 100, 260]))]
        sampling = rng.choice([hmt.Sampling(), hmt.Sampling(temperature=1.2, top_k=4, seed=seed)])
        # A stop string, so that nobody can know how long the answer becomes.
        return hmt.Request(
            ids, rng.choice([20, 60, 160]), sampling=sampling, ignore_eos=True, stop=NEVER,
            priority=rng.choice([-1, 0, 0, 1]), owner=rng.choice("ab"),
        )  # fmt: skip

    return [[request() for _ in range(rng.randint(2, 4))] for _ in range(3)]


@pytest.fixture(scope="module")
def alone() -> Iterator[dict[int, list[list[tuple[int, ...]]]]]:
    with hmt.Engine(**OPTIONS | {"context": 1024}) as engine:
        model = engine.load_model(MINI_DENSE)
        yield {
            seed: [[model.infer(one).token_ids for one in group] for group in traffic(seed)]
            for seed in SEEDS
        }


def expect_little(model: LoadedModel) -> None:
    """As after answers of one token."""
    for _ in range(8):
        model._core.scheduler._forecast.note("", 1, whole=True)


def watch_guesses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fail where a step that is begun early appends to a page that it was not told of, or has not.

    The list grows by the positions of those that are begun.
    """
    told: dict[int, list[int]] = {}
    seen: list[int] = []
    steps: list[Step] = []  # the last one that may have a next one begun
    send, begin = GraphRunner._send, GraphRunner._begin_next
    may_run_ahead = GraphRunner._may_run_ahead

    def pages(graphs: GraphRunner, sequence: int) -> list[int]:
        kv = graphs._kv
        assert isinstance(kv, PagedKV)
        return list(kv.allocator.sequences[sequence].pages)

    def sent(self: GraphRunner, captured: CapturedGraph, step: Step) -> None:
        told.update({run.sequence: pages(self, run.sequence) for run in step.segments})
        send(self, captured, step)

    def asked(self: GraphRunner, captured: CapturedGraph, step: Step) -> bool:
        steps[:] = [step]
        return may_run_ahead(self, captured, step)

    def begun(self: GraphRunner, captured: CapturedGraph) -> Any:
        for run in steps[0].segments:
            page = run.context // 16  # of the next token
            assert told[run.sequence][page] == pages(self, run.sequence)[page]
            seen.append(run.context)
        return begin(self, captured)

    monkeypatch.setattr(GraphRunner, "_send", sent)
    monkeypatch.setattr(GraphRunner, "_may_run_ahead", asked)
    monkeypatch.setattr(GraphRunner, "_begin_next", begun)
    return seen


class Arrivals:
    """Groups of requests, each of which comes with the sixth token of the one before.

    On the engine's thread, so that who shares a step with whom is the same in every run.
    """

    def __init__(self, model: LoadedModel, groups: list[list[hmt.Request]]) -> None:
        self.model, self.left = model, groups
        self.answers: list[list[tuple[int, ...]]] = []
        self.running = 0
        self.ended = threading.Event()

    def run(self) -> list[list[tuple[int, ...]]]:
        self.model._loop.call(self.begin)
        assert self.ended.wait(120)
        return self.answers

    def begin(self) -> None:
        group = self.left.pop(0)
        self.answers.append([()] * len(group))
        self.running += len(group)
        for place, request in enumerate(group):
            self.model.begin(request, [Answer(self, len(self.answers) - 1, place)])


class Answer:
    """One of them."""

    def __init__(self, arrivals: Arrivals, group: int, place: int) -> None:
        self.arrivals, self.group, self.place = arrivals, group, place

    def put(self, event: TokenEvent | HMTError | None) -> None:
        arrivals = self.arrivals
        if isinstance(event, TokenEvent):
            tokens = arrivals.answers[self.group]
            tokens[self.place] = (*tokens[self.place], event.token_id)
            if self.place == 0 and len(tokens[0]) == 6 and arrivals.left:
                arrivals.begin()
        if not isinstance(event, TokenEvent) or event.finish_reason is not None:
            arrivals.running -= 1
            if not arrivals.running and not arrivals.left:
                arrivals.ended.set()


@pytest.mark.parametrize("way", WAYS)
def test_who_gives_way_answers_the_same(
    way: str, alone: dict[int, list[list[tuple[int, ...]]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    guesses = watch_guesses(monkeypatch)
    with hmt.Engine(**OPTIONS | WAYS[way]) as engine:
        model = engine.load_model(MINI_DENSE)
        expect_little(model)
        for seed, wanted in alone.items():
            assert Arrivals(model, traffic(seed)).run() == wanted
        model.summary()  # once the last step has ended
        assert bool(guesses) == (way == "gpu")
        load, kv = model.load, model._core.memory.kv
        assert load.dropped and load.parked, load
        assert (load.waiting, load.running) == (0, 0)
        assert kv.allocator.free_tokens == kv.allocator.capacity_tokens == load.free_tokens
