"""What is computed before the first request changes nothing but when kernels are compiled."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from reference import MINI_MOE

import hmt
from hmt.base.errors import BudgetError
from hmt.cli.options import embedded_model
from hmt.contracts.plan import Plan, Tier
from hmt.engine import engine_core
from hmt.engine.execution import warmup
from hmt.engine.speculation import draft_opening
from hmt.hardware import machine
from hmt.hardware.link_rates import LinkRates

OPTIONS = {"context": 128, "host_memory": "64MiB", "gpus": "fake", "gpu_memory": "64MiB"}
REQUEST = hmt.Request(input="Once upon", max_new_tokens=8)


@pytest.fixture(autouse=True)
def link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine._links, "a fake device", LinkRates(40e9))


def answer() -> tuple[list[int], torch.Tensor, hmt.RunSummary, Plan]:
    """Tokens, logits, and the account of the answer alone."""
    with hmt.Engine(**OPTIONS) as engine:
        model = engine.load_model(embedded_model())
        before = model.summary()
        assert (before.prompt.tokens, before.generation.tokens) == (0, 0)
        assert model.load.running == 0 and model._core.steps == 0
        room = model._core.memory.kv.allocator.free_tokens
        assert room == model._core.memory.kv.allocator.capacity_tokens, "nothing is kept"
        tokens = list(model.infer(REQUEST).token_ids)
        summary = model.summary()
        logits = model.logits(range(20, 60), range(40), prefill=24)
        return tokens, logits, summary, model.plan


def test_answers_and_accounts_are_those_without(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, logits, summary, plan = answer()
    computed: list[int] = []

    def counted(forced: object, prompts: list[int], vocabulary: int) -> bool:
        computed.extend(prompts)
        return warmup.warm_up(forced, prompts, vocabulary)  # type: ignore[arg-type]

    monkeypatch.setattr(engine_core, "is_slow_at_first", lambda where: True)
    monkeypatch.setattr(engine_core, "warm_up", counted)
    warm_tokens, warm_logits, warm_summary, _ = answer()
    assert computed == warmup.prompts_to_warm(plan, 128) and len(computed) > 1
    assert warm_tokens == tokens and torch.equal(warm_logits, logits)
    for mine, other in (
        (warm_summary.prompt, summary.prompt),
        (warm_summary.generation, summary.generation),
    ):
        assert (mine.tokens, mine.steps) == (other.tokens, other.steps)


def test_what_cannot_be_warmed_up_is_loaded_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(
        self: engine_core.EngineCore, tokens: object, rows: object, prefill: int
    ) -> torch.Tensor:
        raise BudgetError("no room")

    monkeypatch.setattr(engine_core, "is_slow_at_first", lambda where: True)
    with monkeypatch.context() as here, hmt.Engine(**OPTIONS) as engine:
        here.setattr(engine_core.EngineCore, "logits", fails)
        model = engine.load_model(embedded_model())
        assert "no room" in caplog.text
        assert len(model.infer(REQUEST).token_ids) == 8


def test_prompts_are_pieces_that_fit_and_nothing_is_read_from_a_drive() -> None:
    *_, plan = answer()
    plan = replace(plan, max_prefill_tokens=512)
    assert warmup.prompts_to_warm(plan, 4096) == [524, 256, 128, 64, 32, 16]
    assert warmup.prompts_to_warm(plan, 100) == [96, 48, 24, 12]
    assert warmup.prompts_to_warm(plan, 15) == []
    block = next(iter(plan.homes))
    assert warmup.prompts_to_warm(replace(plan, homes={block: Tier.DISK}), 4096) == []


def test_no_other_prompt_begins_when_it_took_long_enough() -> None:
    asked: list[tuple[int, list[int], int]] = []

    def forced(tokens: Sequence[int], rows: Sequence[int], prefill: int) -> None:
        assert all(0 <= token < 50 for token in tokens)
        asked.append((len(tokens), list(rows), prefill))

    assert warmup.warm_up(forced, [40, 16], 50, enough_s=-1.0)
    assert asked == [(44, [39, 40, 41, 42, 43], 40)]
    assert warmup.warm_up(forced, [40, 16], 50)
    assert [prefill for *_, prefill in asked] == [40, 40, 16]


def test_only_kernels_of_a_gpu_are_slow_at_first() -> None:
    assert not warmup.is_slow_at_first(torch.device("cpu"))


def test_a_draft_model_is_warmed_up_where_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps that come are captured before the first request, and leave nothing."""
    monkeypatch.setattr(draft_opening, "is_slow_at_first", lambda where: True)
    options = {"host_memory": "256MiB", "gpu_memory": "128MiB", "gpus": "fake", "context": 256}
    with hmt.Engine(**options, speculate="mtp") as engine:
        model = engine.load_model(MINI_MOE)
        draft = model._core.memory.draft
        assert draft is not None
        used = draft.memory.kv.allocator
        assert used.free_tokens == used.capacity_tokens
        own = model._core.speculator._proposer._proposers[1]  # type: ignore[union-attr]
        keys = own._model._runner.executor.graphs.graphs[False]
        assert sorted(key.tokens for key in keys) == [1, 2, 3, 4, 5, 6]
