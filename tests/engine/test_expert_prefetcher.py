"""The guesser: asks for what is absent and probable, with the last priority, or not at all."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reference import MINI_MOE

import hmt
from hmt.contracts.blocks import BlockId, BlockKind
from hmt.contracts.plan import Tier
from hmt.contracts.store import Presence, Priority
from hmt.engine.experts import prefetcher as guesser_module
from hmt.engine.experts.prefetcher import ExpertPrefetcher

LAYERS, EXPERTS, TOP_K = (1, 2, 4), 8, 2
HIDDEN = torch.zeros(1, 4)


class Store:
    """What a guesser asks of the store."""

    def __init__(self) -> None:
        self.present: set[BlockId] = set()
        self.requests: list[tuple[list[BlockId], Priority]] = []

    def presence(self, block: BlockId) -> Presence:
        return Presence.HIT if block in self.present else Presence.MISS

    def request(self, blocks: Sequence[BlockId], priority: Priority) -> None:
        self.requests.append((list(blocks), priority))

    def slot_bytes(self, block: BlockId) -> int:
        return 100


class Foreseeing:
    """A model whose routers, asked early, say what they are told to."""

    def __init__(self) -> None:
        blocks = [BlockId(layer, BlockKind.EXPERT, e) for layer in LAYERS for e in range(EXPERTS)]
        self.spec: Any = SimpleNamespace(blocks=[SimpleNamespace(id=block) for block in blocks])
        self.answers: dict[int, list[int]] = {}
        self.asked: list[int] = []

    def expected_experts(self, index: int, hidden: torch.Tensor, weights: object) -> torch.Tensor:
        self.asked.append(index)
        return torch.tensor([self.answers[index]] * len(hidden))


class Bench:
    """A guesser between the two."""

    def __init__(self, resident: bool = True, slots: int = 100) -> None:
        self.store, self.model = Store(), Foreseeing()
        tier = Tier.HOST if resident else Tier.DISK
        homes = {BlockId(layer, BlockKind.ROUTER): tier for layer in LAYERS}
        plan: Any = SimpleNamespace(homes=homes, reserved={"slots": slots * 100})
        self.guesser = ExpertPrefetcher(self.model, self.store, plan)  # type: ignore[arg-type]

    def step(self, chosen: dict[int, list[int]]) -> None:
        self.guesser.layer_ended(0, HIDDEN)
        for layer in LAYERS:
            experts = torch.tensor([chosen[layer]])
            self.guesser.routed(layer, HIDDEN, experts, torch.ones(1, TOP_K))
            self.guesser.layer_ended(layer, HIDDEN)

    @property
    def requested(self) -> list[list[tuple[int, int]]]:
        assert {priority for _, priority in self.store.requests} <= {Priority.SPECULATIVE}
        return [[(b.layer, b.index) for b in blocks] for blocks, _ in self.store.requests]


def test_each_layer_is_foreseen_once_and_the_first_by_the_dense_one_before_it() -> None:
    bench = Bench()
    bench.model.answers = {1: [0, 1], 2: [2, 3], 4: [4, 5]}
    bench.store.present.add(BlockId(2, BlockKind.EXPERT, 2))
    bench.step({1: [0, 1], 2: [2, 3], 4: [4, 5]})
    assert bench.model.asked == [1, 2, 4]
    assert bench.requested == [[(1, 0), (1, 1)], [(2, 3)], [(4, 4), (4, 5)], []]


def test_no_router_is_read_to_make_a_guess() -> None:
    bench = Bench(resident=False)
    bench.step({1: [0, 1], 2: [2, 3], 4: [4, 5]})
    assert bench.model.asked == []
    assert all(not blocks for blocks in bench.requested)


def test_a_source_that_fails_is_not_believed_but_still_watched() -> None:
    bench = Bench()
    bench.guesser._trial = SimpleNamespace(on=True, step=lambda tokens: None, saved_s=0.0)
    bench.model.answers = {1: [0, 1], 2: [0, 1], 4: [0, 1]}
    wrong = {1: [2, 3], 2: [0, 3], 4: [0, 3]}
    for _ in range(60):
        bench.step(wrong)
    del bench.store.requests[:]
    bench.step(wrong)
    assert bench.requested[:3] == [[], [(2, 0)], [(4, 0)]], "by rank and source"
    for _ in range(60):
        bench.step({1: [0, 1], 2: [0, 1], 4: [0, 1]})
    del bench.store.requests[:]
    bench.step(wrong)
    assert bench.requested[:3] == [[(1, 0), (1, 1)], [(2, 0), (2, 1)], [(4, 0), (4, 1)]]


def test_guesses_wait_in_a_quarter_of_the_slots() -> None:
    bench = Bench(slots=7)
    bench.model.answers = {1: [0, 1], 2: [0, 1], 4: [0, 1]}
    bench.step({1: [0, 1], 2: [2, 3], 4: [4, 5]})
    assert [len(blocks) for blocks in bench.requested[:3]] == [1, 1, 1]


def test_nothing_is_computed_while_guesses_do_not_help() -> None:
    bench = Bench()
    steps: list[int] = []
    bench.guesser._trial = SimpleNamespace(on=False, step=steps.append, saved_s=0.0)
    bench.step({1: [0, 1], 2: [2, 3], 4: [4, 5]})
    assert bench.model.asked == [] and steps == [1]
    assert bench.requested == [[]], "what was guessed before need not stay"


class _Always:
    def __init__(self) -> None:
        self.on, self.saved_s, self.verdict = True, 0.0, None

    def step(self, tokens: int) -> None:
        self.saved_s += 0.5


@pytest.mark.parametrize("budget", ["9MiB", "12MiB", "16MiB"])
def test_guessing_changes_no_logits_and_is_accounted_for(
    budget: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(guesser_module, "ABGate", _Always)
    tokens = list(range(100, 160))
    found = []
    for guesses in (False, True):
        options = {"context": 256, "host_memory": budget, "guesses": guesses}
        with hmt.Engine(**options) as engine:
            model = engine.load_model(MINI_MOE)
            found.append(model.logits(tokens, range(60), prefill=20))
            phase = model.summary().generation
        if not guesses:
            assert (
                phase.expert_prefetches,
                phase.expert_prefetch_hit_rate,
                phase.expert_prefetch_saved_s,
            ) == (0, None, 0.0)
        elif phase.expert_prefetches:  # in the least memory no router is there to be asked
            assert 0.2 < phase.expert_prefetch_hit_rate <= 1  # type: ignore[operator]
            assert phase.expert_prefetch_saved_s == pytest.approx(0.5 * 40)
    assert torch.equal(*found)
