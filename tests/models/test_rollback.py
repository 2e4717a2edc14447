"""Guesses at the end of a step that are taken back: as if they had never been, to the bit."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_models import ids, publish

import hmt
from hmt.base.errors import BudgetError, ConfigError
from hmt.contracts.model import LayerState, StateTensor
from hmt.contracts.plan import Tier
from hmt.contracts.step import SchedulerOutput, SegmentRequest
from hmt.engine import LoadedModel
from hmt.hardware import machine
from hmt.hardware.link_rates import LinkRates
from hmt.kernels.cpu import extension
from hmt.layers.recurrent.short_conv import ShortConv

pytestmark = pytest.mark.each_once

DRAFTS = 5
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_prefill_tokens": 16, "host_memory": "96MiB", "context": 800,
    "max_batch": 3, "draft_tokens": DRAFTS,
}  # fmt: skip
NAMES = ["qwen3_next-0", "qwen3_5_text-0", "qwen3_5_moe_text-0", "lfm2-0", "lfm2_moe-0"]
NAMES += ["kimi_linear-0", "mamba2-1", "falcon_h1-0", "jamba-0", "qwen4_exp_text-0"]
NAMES += ["deepseek_v4-0", "deepseek_v4-2", "glm5_next_text-0"]
WAYS: dict[str, dict[str, Any]] = {
    "memory": {},
    "levels": {"kv_gpu_memory": "1MiB"},
    "gpu": {"gpus": "fake", "gpu_memory": "64MiB"},
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            publish(name, made[name], 400)
        return made[name]

    return folder


@pytest.fixture(autouse=True)
def _link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine._links, "a fake device", LinkRates(40e9))


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """To the bit, unless torch multiplies, which adds otherwise by how many tokens there are."""
    if extension.load() is not None:
        return torch.equal(found, wanted)
    return float((found - wanted).abs().max()) <= 1e-4 * max(1.0, float(wanted.std()))


class Text:
    """A sequence whose tokens are known, and the logits of each position that have been seen."""

    def __init__(self, tokens: list[int], sequence: int, at: int = 0) -> None:
        self.tokens, self.sequence, self.at = tokens, sequence, at
        self.logits: dict[int, torch.Tensor] = {}

    def segment(self, count: int, guesses: list[int]) -> SegmentRequest:
        tokens = [*self.tokens[self.at : self.at + count], *guesses]
        return SegmentRequest(
            self.sequence, self.at, tokens, len(tokens), drafts=len(guesses),
            preceding=tuple(self.tokens[max(0, self.at - 3) : self.at]),
        )  # fmt: skip


class Steps:
    """Steps of the engine that belong to no request."""

    def __init__(self, model: LoadedModel) -> None:
        self.model, self.core = model, model._core
        self.kv = self.core.scheduler.kv

    def call(self, what: Callable[[], Any]) -> Any:
        return self.model._loop.call(what)

    def open(self, tokens: list[int]) -> Text:
        return Text(tokens, self.call(lambda: self.kv.open(len(tokens) + DRAFTS)))

    def fork(self, text: Text, tokens: list[int]) -> Text:
        room = len(tokens) + DRAFTS
        other = Text(tokens, self.call(lambda: self.kv.fork(text.sequence, text.at, room)), text.at)
        other.logits = dict(text.logits)
        return other

    def run(self, parts: list[tuple[Text, int, list[int]]]) -> None:
        """So many tokens of each text and guesses behind them; all count as right."""
        output = SchedulerOutput(tuple(text.segment(n, guesses) for text, n, guesses in parts))
        rows = iter(self.call(lambda: self.core._run_alone(output, False)))
        for text, count, guesses in parts:
            for _ in range(count + len(guesses)):
                text.logits[text.at] = next(rows)
                text.at += 1

    def rollback(self, text: Text, position: int) -> None:
        self.call(lambda: self.kv.rollback(text.sequence, position))
        text.at = position


def undisturbed(steps: Steps, prompts: list[list[int]]) -> list[dict[int, torch.Tensor]]:
    found = []
    for tokens in prompts:
        text = steps.open(tokens)
        for start in range(0, 32, 16):
            steps.run([(text, 16, [])])
            assert text.at == start + 16
        while text.at < len(tokens):
            steps.run([(text, 1, [])])
        steps.call(lambda text=text: steps.kv.close(text.sequence))
        found.append(text.logits)
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", WAYS)
def test_guesses_leave_nothing(name: str, way: str, folder_of: Callable[[str], Path]) -> None:
    """Sequences that guess one at a time or together, fork, wait, and go back by any number."""
    rng = random.Random(name)
    head = ids(40, 1)
    prompts = [head + ids(30, 2), head + ids(30, 3), ids(64, 4)]
    with hmt.Engine(**OPTIONS | WAYS[way]) as engine:
        model = engine.load_model(folder_of(name))
        steps = Steps(model)
        wanted = undisturbed(steps, prompts)

        def guesses(text: Text, count: int) -> list[int]:
            """As many as are asked for, of which the first may be right."""
            tokens = text.tokens[text.at + 1 :][: rng.randint(0, count)]
            return [*tokens, *ids(count - len(tokens), rng.randrange(999))]

        def settle(text: Text, before: int, asked: list[int]) -> None:
            """Take back what was wrong, or more than that."""
            right, known = 0, text.tokens[before + 1 :]
            while right < min(len(asked), len(known)) and asked[right] == known[right]:
                right += 1
            steps.rollback(text, before + 1 + rng.randint(0, right))

        first = steps.open(prompts[0])
        steps.run([(first, 16, [])])
        steps.run([(first, 16, [])])
        running = [first, steps.open(prompts[2])]
        forked = False
        while any(text.at < len(text.tokens) for text in running):
            some = [text for text in running if text.at < len(text.tokens) and rng.random() < 0.8]
            parts = []
            for text in some:
                count = 1 if text.at >= 32 else rng.randint(1, 9)
                many = rng.choice([0, 1, 3, DRAFTS]) if text.at + count <= len(text.tokens) else 0
                parts.append((text, 1 if many else count, guesses(text, many)))
            # More than 16 tokens at once are multiplied with f32 weights in another order.
            while sum(count + len(asked) for _, count, asked in parts) > 16:
                parts.pop()
            some = some[: len(parts)]
            starts = [text.at for text in some]
            if parts:
                steps.run(parts)
            for (text, _, asked), start in zip(parts, starts, strict=True):
                if asked:
                    settle(text, start, asked)
            if not forked and 34 <= first.at <= 40:
                forked = True
                running.append(steps.fork(first, prompts[1]))
            for text in running[:1]:
                if model._core.memory.kv.allocator.can_park() and rng.random() < 0.2:
                    steps.call(lambda text=text: steps.kv.park(text.sequence))
                    steps.call(lambda text=text: steps.kv.resume(text.sequence, 0))
        assert forked
        for text, logits in zip([first, running[2], running[1]], wanted, strict=True):
            for position in range(len(text.tokens)):
                assert same(text.logits[position], logits[position]), position


@pytest.mark.parametrize("name", ["qwen3_5_text-0", "lfm2-0"])
def test_checkpoints_are_made_between_guesses(name: str, folder_of: Callable[[str], Path]) -> None:
    """Though no step begins at a border of a page: others go on from there."""
    tokens = ids(90, 7)
    with hmt.Engine(**OPTIONS, prefix_cache=True) as engine:
        model = engine.load_model(folder_of(name))
        steps, prefixes = Steps(model), model._core.memory.prefixes
        [wanted] = undisturbed(steps, [tokens])
        opened = steps.call(lambda: prefixes.open(len(tokens) + DRAFTS, tokens[:30]))
        assert opened.held == 0
        text = Text(tokens, opened.sequence)
        steps.run([(text, 14, [])])
        while text.at < 70:
            at, stay = text.at, 3 if text.at % 16 != 13 else 2
            steps.run([(text, 1, [*tokens[at + 1 : at + stay], *ids(4 - stay)])])
            steps.rollback(text, at + stay)
            assert text.at % 16, "a step would begin at the border"
        steps.call(lambda: prefixes.close(text.sequence, tokens[: text.at]))
        again = steps.call(lambda: prefixes.open(len(tokens), tokens))
        assert again.held == 64, "the last border behind which all has stayed"
        text = Text(tokens, again.sequence, again.held)
        while text.at < len(tokens):
            steps.run([(text, min(9, len(tokens) - text.at), [])])
        for position in range(64, len(tokens)):
            assert same(text.logits[position], wanted[position])


def test_a_checkpoint_of_a_step_that_failed_is_none(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails when some layers have copied their state, and others have not."""
    tokens = ids(60, 7)
    with hmt.Engine(**OPTIONS, prefix_cache=True) as engine:
        model = engine.load_model(folder_of("qwen3_5_text-0"))
        steps, prefixes = Steps(model), model._core.memory.prefixes
        [wanted] = undisturbed(steps, [tokens])
        opened = steps.call(lambda: prefixes.open(len(tokens) + DRAFTS, tokens[:30]))
        text = Text(tokens, opened.sequence)
        for count in (16, 14):
            steps.run([(text, count, [])])
        steps.run([(text, 1, tokens[31:35])])
        layer = type(model.prepared.model).layer

        def fails(self: Any, index: int, *args: Any) -> torch.Tensor:
            if index == 1:
                raise BudgetError("a layer fails")
            return layer(self, index, *args)

        with monkeypatch.context() as patch:
            patch.setattr(type(model.prepared.model), "layer", fails)
            with pytest.raises(BudgetError, match="a layer fails"):
                steps.run([(text, 1, [])])
        steps.call(lambda: prefixes.close(text.sequence, tokens[:35]))
        again = steps.call(lambda: prefixes.open(len(tokens), tokens))
        assert again.held == 16
        text = Text(tokens, again.sequence, again.held)
        while text.at < len(tokens):
            steps.run([(text, 4, [])])
        assert all(same(row, wanted[at]) for at, row in text.logits.items())


@pytest.mark.parametrize("gpu", [False, True])
def test_the_journal_is_part_of_the_budget(gpu: bool, folder_of: Callable[[str], Path]) -> None:
    reserved, counted = [], []
    for name, drafts in (("lfm2-0", 0), ("lfm2-0", 7)):
        options = OPTIONS | {"draft_tokens": drafts} | (WAYS["gpu"] if gpu else {})
        with hmt.Engine(**options) as engine:
            model = engine.load_model(folder_of(name))
            plan, memory = model.plan, model._core.memory
            spec, states = model.prepared.model.spec, memory.kv.states
            each = spec.state_bytes + 4 * drafts * sum(spec.state_inputs.values())
            slots = states.slots.count + states.slots.spare
            assert len(states._buffer.tensor) >= slots * each > 0
            counted.append(slots * each)
            tier = plan.device.reserved if gpu else plan.reserved
            used = memory.device_account(plan).used_bytes if gpu else memory.used_bytes()
            assert counted[-1] <= used["kv"] <= tier["kv"]
            reserved.append(tier["kv"])
            assert engine._ledger.reserved_bytes(Tier.HOST) <= 96 << 20
    rounded = 256 * spec.layers if gpu else 2 * 4096
    assert abs(reserved[1] - reserved[0] - (counted[1] - counted[0])) <= rounded


def test_state_without_a_journal_is_refused(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(self: ShortConv) -> LayerState:
        return (StateTensor("conv", (self.taps - 1, self.hidden_size)),)

    monkeypatch.setattr(ShortConv, "state", property(without))
    with hmt.Engine(**OPTIONS | {"draft_tokens": 0}) as engine:
        engine.load_model(folder_of("lfm2-0"))
    with hmt.Engine(**OPTIONS) as engine, pytest.raises(ConfigError, match="draft_tokens=5"):
        engine.load_model(folder_of("lfm2-0"))
    with pytest.raises(ConfigError, match="draft_tokens"):
        hmt.Engine(**OPTIONS | {"draft_tokens": -1})


def test_what_is_not_a_guess_cannot_be_taken_back(folder_of: Callable[[str], Path]) -> None:
    with hmt.Engine(**OPTIONS) as engine:
        steps = Steps(engine.load_model(folder_of("qwen3_5_text-0")))
        text = steps.open(ids(60))
        steps.run([(text, 16, [])])
        with pytest.raises(AssertionError, match="cannot go back from 16 to 15"):
            steps.rollback(text, 15)
        steps.run([(text, 1, [20, 21])])
        with pytest.raises(AssertionError, match="cannot go back from 19 to 16"):
            steps.rollback(text, 16)
        with pytest.raises(AssertionError, match="ends with 6 draft tokens"):
            steps.run([(text, 1, [20] * 6)])
