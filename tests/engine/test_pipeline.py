"""Stages of a pipeline: which layers each has, what returns to the first, and that they overlap."""

import itertools
import random
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from rank_threads import ranks_as_threads
from reference import MINI_DENSE

import hmt
from hmt.contracts.blocks import TRUNK, BlockId, BlockKind, BlockSpec, ParamSpec
from hmt.contracts.model import ModelSpec
from hmt.contracts.request import Completion, Pooling
from hmt.contracts.step import SchedulerOutput
from hmt.engine import EngineConfig, prepare
from hmt.engine.ranks import worker, workers
from hmt.models.sharding import stages_of

OPTIONS: dict[str, Any] = {
    "host_memory": "96MiB", "dtype": "float32", "context": 512, "max_prefill_tokens": 16,
    "max_batch": 4,
}  # fmt: skip
REPEATED = [17, 90, 33, 250, 41] * 12


def everything(model: hmt.LoadedModel) -> list[Completion]:
    """Answers that look at other rows than the last: of prompts, of drafts and of forks."""
    plain = hmt.Request(REPEATED, 12, ignore_eos=True)
    return [
        model.infer(plain),  # drafts, by prompt lookup
        model.infer(replace(plain, prompt_logprobs=2, max_new_tokens=0)),
        model.infer(replace(plain, embedding=Pooling.MEAN, max_new_tokens=0)),
        *model.infer_choices(replace(plain, sampling=hmt.Sampling(temperature=1, seed=3)), 3),
    ]


def test_all_rows_that_are_looked_at_return_to_the_first_stage() -> None:
    with hmt.Engine(**OPTIONS) as engine:
        wanted = everything(engine.load_model(MINI_DENSE))
    with ranks_as_threads(), hmt.Engine(**OPTIONS, pp=2) as engine:
        found = everything(engine.load_model(MINI_DENSE))
    for one, other in zip(found, wanted, strict=True):
        assert one.token_ids == other.token_ids
        assert one.prompt_logprobs == other.prompt_logprobs
        if one.embedding is None or other.embedding is None:
            assert one.embedding is other.embedding
        else:
            assert torch.equal(one.embedding, other.embedding)


def test_the_first_stage_begins_the_next_chunk_while_the_second_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here the second waits with the first chunk until it was sent another."""
    sent, computed = threading.Semaphore(0), list[bool]()
    send, step = workers.RankWorkers.send, worker._Worker.step

    def sends(ranks: workers.RankWorkers, output: SchedulerOutput, **how: Any) -> None:
        send(ranks, output, **how)
        sent.release()

    def computes(stage: worker._Worker, output: SchedulerOutput) -> None:
        if not computed:
            computed.append(all(sent.acquire(timeout=20) for _ in range(2)))
        step(stage, output)

    monkeypatch.setattr(workers.RankWorkers, "send", sends)
    monkeypatch.setattr(worker._Worker, "step", computes)
    with ranks_as_threads(), hmt.Engine(**OPTIONS, pp=2) as engine:
        engine.load_model(MINI_DENSE).infer(hmt.Request(REPEATED, 1))
    assert computed == [True]


def model_of(sizes: list[int], head: int) -> ModelSpec:
    """With as many numbers in each layer, and in the output layer."""

    def block(layer: int, kind: BlockKind, count: int) -> BlockSpec:
        return BlockSpec(BlockId(layer, kind), (ParamSpec("weight", (count, 1), ("w",)),))

    blocks = [block(layer, BlockKind.FFN, count) for layer, count in enumerate(sizes)]
    blocks.append(block(TRUNK, BlockKind.HEAD, head))
    kv = (None,) * len(sizes)
    return ModelSpec("one", len(sizes), 8, 8, 8, tuple(blocks), kv, 8)


def test_the_largest_stage_is_as_small_as_can_be() -> None:
    rng = random.Random(0)
    for _ in range(60):
        sizes = [rng.randrange(1, 20) for _ in range(rng.randrange(1, 8))]
        head, count = rng.randrange(30), rng.randrange(2, 5)
        if count > len(sizes):
            continue
        stages = [stage for stage in stages_of(model_of(sizes, head), count) if stage is not None]
        borders = [stage.first for stage in stages] + [len(sizes)]
        assert [stage.end for stage in stages] == borders[1:]
        assert all(stage.count for stage in stages) and not borders[0]
        ways = itertools.combinations(range(1, len(sizes)), count - 1)
        least = min(largest(sizes, head, [0, *way, len(sizes)]) for way in ways)
        assert largest(sizes, head, borders) == least


def largest(sizes: list[int], head: int, borders: list[int]) -> int:
    """Numbers in the largest stage."""
    parts = [sum(sizes[first:end]) for first, end in itertools.pairwise(borders)]
    return max(parts[0] + head, *parts[1:])


def test_each_stage_reads_its_layers_alone_and_keeps_the_same_positions() -> None:
    """Also where stages have room for different numbers of them."""
    options = {"host_memory": "24MiB", "tp": 2, "pp": 2}
    config = EngineConfig.resolve(**options)
    alone = prepare(MINI_DENSE, EngineConfig.resolve(host_memory="24MiB"))
    first = prepare(MINI_DENSE, config.of_rank(0))
    orders = workers.orders_of(MINI_DENSE, config, kv_tokens=first.plan.kv_tokens,
                               max_prefill_tokens=first.plan.max_prefill_tokens)  # fmt: skip
    assert [order["rank"] for order in orders] == [1, 2, 3]
    own = replace(config.of_rank(2), context=first.plan.kv_tokens)
    second = prepare(MINI_DENSE, own, rank=2)
    assert second.plan.kv_tokens == first.plan.kv_tokens
    assert second.layouts.keys().isdisjoint(first.layouts)
    assert second.layouts.keys() | first.layouts.keys() == alone.layouts.keys()
    assert not {BlockKind.EMBEDDING, BlockKind.HEAD} & {block.kind for block in second.layouts}
