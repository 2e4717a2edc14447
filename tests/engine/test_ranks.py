"""Several processes that compute a model together answer as one does."""

import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from gguf_files import bytes_vocabulary
from rank_threads import ranks_as_threads
from real_models import real_model
from reference import MINI_DENSE, MINI_MOE
from test_gguf_models import random_model

import hmt
from hmt.base.errors import BudgetError, ConfigError, RankError
from hmt.engine import EngineConfig, prepare
from hmt.engine.execution.executor import OverlappedExecutor
from hmt.engine.execution.graphs.runner import GraphRunner
from hmt.engine.loading.packs import convert
from hmt.engine.ranks import workers
from hmt.hardware import machine
from hmt.hardware.link_rates import LinkRates
from hmt.sandbox.frames import receive, send

OPTIONS: dict[str, Any] = {
    "host_memory": "320MiB", "dtype": "float32", "activations": "exact", "context": 256,
    "max_prefill_tokens": 48, "max_batch": 3,
}  # fmt: skip
TOKENS = torch.randint(8, 4000, (70,), generator=torch.Generator().manual_seed(0)).tolist()
REQUESTS = [hmt.Request(TOKENS[first : first + 30], 12, ignore_eos=True) for first in (0, 9, 30)]
Answers = tuple[torch.Tensor, list[tuple[int, ...]]]
whole = pytest.mark.whole
TWO_GPUS = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def answers(path: Path, **options: Any) -> Answers:
    """Logits of a prompt and of tokens behind it, and greedy answers to requests at once."""
    with hmt.Engine(**OPTIONS | options) as engine:
        model = engine.load_model(path)
        logits = model.logits(TOKENS, range(70), prefill=60)
        return logits, [answer.token_ids for answer in model.infer_batch(REQUESTS)]


def assert_same(found: Answers, wanted: Answers, *, exactly: bool = False) -> None:
    """Within 1e-5 of the largest logit, which is what another order of sums may change in f32.

    Stages of whole layers change no bit.
    """
    assert found[1] == wanted[1]
    assert torch.equal(found[0], wanted[0]) or not exactly
    error = (found[0] - wanted[0]).abs().max() / wanted[0].abs().max()
    assert error <= 1e-5


@pytest.fixture(scope="module")
def alone() -> Callable[..., Answers]:
    """Answers of one process, each computed once."""
    known: dict[str, Answers] = {}

    def computed(path: Path, **options: Any) -> Answers:
        key = f"{path} {options}"
        if key not in known:
            known[key] = answers(path, **options)
        return known[key]

    return computed


@pytest.mark.parametrize(
    ("path", "ranks"),
    [
        (MINI_DENSE, {"tp": 3}),  # two KV heads: two ranks share one
        (MINI_MOE, {"ep": 2}),
        (MINI_MOE, {"tp": 2}),
        (MINI_DENSE, {"pp": 3}),
        (MINI_MOE, {"tp": 2, "pp": 2}),
        pytest.param(MINI_MOE, {"pp": 2}, marks=whole),
        pytest.param(MINI_MOE, {"pp": 3, "executor": "plain"}, marks=whole),
        pytest.param(MINI_DENSE, {"tp": 2, "pp": 2}, marks=whole),
        pytest.param(MINI_MOE, {"ep": 2, "pp": 2}, marks=whole),
        pytest.param(MINI_DENSE, {"tp": 2}, marks=whole),
        pytest.param(MINI_DENSE, {"tp": 4}, marks=whole),
        pytest.param(MINI_MOE, {"ep": 4}, marks=whole),
        pytest.param(MINI_MOE, {"tp": 4, "ep": 4}, marks=whole),
    ],
    ids=str,
)
def test_published_weights(
    path: Path, ranks: dict[str, Any], alone: Callable[..., Answers]
) -> None:
    exactly = not {"tp", "ep"} & ranks.keys()
    with ranks_as_threads():
        assert_same(answers(path, **ranks), alone(path), exactly=exactly)


@pytest.mark.parametrize(
    ("path", "scheme"),
    [
        (MINI_DENSE, "w4a16:64"),
        (MINI_MOE, "none"),
        pytest.param(MINI_DENSE, "none", marks=whole),
        pytest.param(MINI_DENSE, "w8a16", marks=whole),
        pytest.param(MINI_DENSE, "mxfp4a16", marks=whole),
        pytest.param(MINI_MOE, "w4a16", marks=whole),
    ],
    ids=str,
)
def test_packs_and_weights_that_are_quantised_on_load(
    path: Path, scheme: str, tmp_path: Path, alone: Callable[..., Answers]
) -> None:
    """Groups are cut where they end: the same codes on every rank."""
    wanted = alone(path, quantization=scheme)
    convert(path, tmp_path / "pack", EngineConfig.resolve(quantization=scheme))
    with ranks_as_threads():
        assert_same(answers(tmp_path / "pack", tp=2), wanted)
        assert_same(answers(tmp_path / "pack", pp=2), wanted, exactly=True)
        if ":" in scheme:
            assert_same(answers(path, tp=2, quantization=scheme), wanted)


@pytest.mark.parametrize(
    ("name", "tp"), [("llama", 2), ("qwen3moe", 2), pytest.param("gemma3", 2, marks=whole)]
)
def test_gguf_files(name: str, tp: int, tmp_path: Path) -> None:
    """Rows in types of their own; blocks of 32 are not cut."""
    sizes = {"intermediate_size": 128, "num_hidden_layers": 2}
    file = random_model(name, tmp_path, **sizes)
    path = file.write(tmp_path / "model.gguf", bytes_vocabulary(MINI_DENSE))
    wanted = answers(path)
    with ranks_as_threads():
        assert_same(answers(path, tp=tp), wanted)
        assert_same(answers(path, pp=2), wanted, exactly=True)


@pytest.mark.parametrize(
    "ranks",
    [
        {"tp": 2},
        {"pp": 2},
        pytest.param({"tp": 3}, marks=whole),
        pytest.param({"pp": 3}, marks=whole),
        pytest.param({"tp": 2, "pp": 2}, marks=whole),
    ],
    ids=str,
)
def test_smollm2(ranks: dict[str, int], alone: Callable[..., Answers]) -> None:
    path = real_model("smollm2")
    with ranks_as_threads():
        assert_same(answers(path, **ranks), alone(path), exactly="tp" not in ranks)


def test_weights_that_do_not_fit_are_read_in_the_middle(alone: Callable[..., Answers]) -> None:
    """Each rank reads what it has not room for, and the same bits come out."""
    with ranks_as_threads():
        there = answers(MINI_MOE, ep=2)
        with hmt.Engine(**OPTIONS | {"host_memory": "14MiB"}, ep=2) as engine:
            model = engine.load_model(MINI_MOE)
            assert model.summary().streamed_bytes
            assert torch.equal(model.logits(TOKENS, range(70), prefill=60), there[0])
        staged = answers(MINI_MOE, pp=2, host_memory="20MiB")
    assert_same(there, alone(MINI_MOE))
    assert_same(staged, alone(MINI_MOE), exactly=True)


@pytest.mark.parametrize("gpus", ["fake,fake", pytest.param("0,1", marks=TWO_GPUS)])
@pytest.mark.parametrize("path", [MINI_DENSE, MINI_MOE], ids=["mini-dense", "mini-moe"])
def test_each_rank_computes_on_another_gpu(
    path: Path, gpus: str, monkeypatch: pytest.MonkeyPatch, alone: Callable[..., Answers]
) -> None:
    """With room for a part of its weights; real ones meet through NCCL, as processes."""
    monkeypatch.setitem(machine._links, "a fake device", LinkRates(40e9))
    if gpus == "fake,fake":
        with ranks_as_threads():
            for ranks in ({"tp": 2}, {"pp": 2}):
                assert_same(answers(path, **ranks, gpus=gpus, gpu_memory="6MiB"), alone(path))
        return
    there = answers(path, tp=2, gpus=gpus)
    one = answers(path, gpus="0")
    assert there[1] == one[1]
    torch.testing.assert_close(there[0], one[0], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("gpus", ["fake,fake", pytest.param("0,1", marks=TWO_GPUS)])
def test_steps_of_ranks_are_captured_where_all_weights_are_on_their_gpus(
    gpus: str, monkeypatch: pytest.MonkeyPatch, alone: Callable[..., Answers]
) -> None:
    """And begin before the last one's token is known; drawn tokens are seldom what was guessed."""
    monkeypatch.setitem(machine._links, "a fake device", LinkRates(40e9))
    drawn = [
        hmt.Request(TOKENS[:n], 9, sampling=hmt.Sampling(temperature=2.0, seed=n), ignore_eos=True)
        for n in (5, 30)
    ]
    options = OPTIONS | {"gpus": gpus, "gpu_memory": "64MiB" if "fake" in gpus else None}
    with ranks_as_threads() if "fake" in gpus else nullcontext():
        with hmt.Engine(**options, tp=2) as engine:
            model = engine.load_model(MINI_DENSE)
            tokens = [answer.token_ids for answer in model.infer_batch(REQUESTS)]
            captured = cast(OverlappedExecutor, model._core.runner.executor).graphs
            assert isinstance(captured, GraphRunner) and not captured.failure
            steps = captured.async_steps
            assert 5 < steps.right <= steps.begun
            found = [answer.token_ids for answer in model.infer_batch([*drawn, REQUESTS[0]])]
            assert steps.right < steps.begun
            logits = model.logits(TOKENS, range(70), prefill=60)
            assert not any("captured" in note for note in model.summary().notes)
        with hmt.Engine(**options | {"gpus": gpus.split(",")[0]}) as engine:
            model = engine.load_model(MINI_DENSE)
            assert found == [
                answer.token_ids for answer in model.infer_batch([*drawn, REQUESTS[0]])
            ]
            one = model.logits(TOKENS, range(70), prefill=60)
    assert tokens == alone(MINI_DENSE)[1]
    torch.testing.assert_close(logits, one, rtol=1e-4, atol=1e-3)


def test_a_step_of_any_size_has_the_same_bits() -> None:
    with ranks_as_threads(), hmt.Engine(**OPTIONS, tp=3) as engine:
        model = engine.load_model(MINI_DENSE)
        apart = [model.infer(request).token_ids for request in REQUESTS]
        assert [answer.token_ids for answer in model.infer_batch(REQUESTS)] == apart
        one = model.logits(TOKENS, range(70))
        assert torch.equal(model.logits(TOKENS, range(70), prefill=7), one)


@pytest.mark.parametrize(
    "ranks", [{"tp": 2}, pytest.param({"pp": 2}, marks=whole)], ids=lambda given: str(given)
)
def test_a_rank_that_is_killed_fails_what_runs_and_what_comes(
    ranks: dict[str, int], alone: Callable[..., Answers]
) -> None:
    with hmt.Engine(**OPTIONS | {"context": 4096, "host_memory": "400MiB"}, **ranks) as engine:
        model = engine.load_model(MINI_DENSE)
        assert model.infer(REQUESTS[0]).token_ids == alone(MINI_DENSE)[1][0]
        (rank,) = model.summary().ranks
        assert (rank.number, rank.failure) == (1, "")
        stream = model.stream(hmt.Request(TOKENS, 3000, ignore_eos=True))
        next(iter(stream))
        os.kill(rank.pid, signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(RankError, match="rank 1"):
            list(stream)
        assert time.monotonic() - killed < 10
        with pytest.raises(RankError, match="load the model again"):
            model.infer(REQUESTS[0])
        assert "rank 1" in model.summary().ranks[0].failure
    assert not Path(f"/proc/{rank.pid}").exists()


def test_a_worker_whose_parent_is_gone_ends_itself() -> None:
    """Whatever it does: here it waits for a rank that never comes."""
    ours, theirs = socket.socketpair()
    process = workers.start_process(theirs)
    config = EngineConfig.resolve(**OPTIONS, tp=2)
    (order,) = workers.orders_of(MINI_DENSE, config, kv_tokens=64, max_prefill_tokens=16)
    send(ours, order | {"folder": "/nowhere"})
    assert receive(ours)[0] == {"state": "ready", "follows": False}
    ours.close()
    assert process.wait(10) == 1


def test_what_keeps_a_rank_from_loading_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    own = EngineConfig.of_rank

    def poor(config: EngineConfig, rank: int) -> EngineConfig:
        found = own(config, rank)
        return replace(found, host_memory_bytes=1 << 20) if rank else found

    monkeypatch.setattr(EngineConfig, "of_rank", poor)
    refused = pytest.raises(BudgetError, match="rank 1")
    with ranks_as_threads(), hmt.Engine(**OPTIONS, tp=2) as engine, refused:
        engine.load_model(MINI_DENSE)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tp": 0}, "at least 1"),
        ({"tp": 2, "ep": 4}, "the same number"),
        ({"ep": 2}, "no experts"),
        ({"tp": 999}, "cannot be divided among 999"),
        ({"pp": 99}, "fewer than pp=99 stages"),
        ({"pp": 2, "prefix_cache": True}, "prefix_cache and pp=2"),
        ({"tp": 2, "prefix_cache": True}, "prefix_cache"),
        ({"tp": 2, "speculate": "mtp"}, "draft model"),
        ({"tp": 2, "gpus": "0"}, "give each process one"),
    ],
    ids=lambda given: str(given),
)
def test_what_cannot_be_divided_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        prepare(MINI_DENSE, EngineConfig.resolve(**OPTIONS | options))


def test_a_rank_has_its_part_of_the_memory_and_reads_no_more_rows_than_its_own() -> None:
    config = EngineConfig.resolve(**OPTIONS, tp=2)
    alone = prepare(MINI_DENSE, EngineConfig.resolve(**OPTIONS))
    parts = [prepare(MINI_DENSE, config.of_rank(rank), rank=rank) for rank in (0, 1)]
    for block, layout in alone.layouts.items():
        if block.kind in ("attention", "ffn"):
            for placed in layout.placed:
                name = placed.param.spec.name
                mine = [
                    next(p.param for p in part.layouts[block].placed if p.param.spec.name == name)
                    for part in parts
                ]
                sizes = [param.data.nbytes for param in mine]
                cut = name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
                assert sum(sizes) == placed.param.data.nbytes * (1 if cut else 2)
    assert all(
        part.plan.budgets[tier] == alone.plan.budgets[tier] // 2
        for part in parts
        for tier in part.plan.budgets
    )
    assert parts[0].demand.kv_token_bytes * 2 == alone.demand.kv_token_bytes
