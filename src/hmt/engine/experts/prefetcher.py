"""Reading experts on a guess: only while it gains, and never before a need.

Guesses go to the store as requests with Priority.GUESS, which everything else passes.  What they
change is when a block is read; no result depends on them.
"""

import torch
from typing_extensions import override

from hmt.contracts.blocks import BlockId, BlockKind
from hmt.contracts.model import Model
from hmt.contracts.plan import Plan
from hmt.contracts.store import Presence, Priority
from hmt.engine.experts.ab_gate import ABGate, ABResult
from hmt.engine.experts.observers import StepObserver
from hmt.engine.experts.predictor import (
    Kind,
    PredictionSource,
    RouterPredictor,
    Trust,
    candidates,
)
from hmt.weights import WeightStore

_SLOT_SHARE = 4  # guesses may wait in a quarter of the slots


class ExpertPrefetcher(StepObserver):
    """Implements StepObserver: guesses the experts of the next layer."""

    def __init__(self, model: Model, weights: WeightStore, plan: Plan) -> None:
        self._weights = weights
        self._predictor = RouterPredictor(model, weights, plan)
        self._trust = Trust()
        self._trial = ABGate()
        self._prefetched: dict[int, list[tuple[int, Kind]]] = {}  # by layer: absent experts
        experts = [b.id for b in model.spec.blocks if b.id.kind is BlockKind.EXPERT]
        self._own = frozenset(experts)  # other ranks may have others, which routers choose, too
        most = max(map(weights.slot_bytes, experts))
        self._most = plan.reserved["slots"] // _SLOT_SHARE // most

    @property
    def saved_s(self) -> float:
        """Time that guesses have saved, as trials with and without them tell."""
        return self._trial.saved_s

    @property
    def verdict(self) -> ABResult | None:
        """Of the last trial; None before the first has ended."""
        return self._trial.verdict

    @override
    def routed(
        self, layer: int, hidden: torch.Tensor, experts: torch.Tensor, scales: torch.Tensor
    ) -> None:
        chosen = {expert for token in experts.tolist() for expert in token}
        self._trust.learn(self._prefetched.pop(layer, ()), chosen)
        if layer == self._predictor.first:
            self._trial.step(len(experts))
            if not self._trial.on:  # and what was guessed need not stay
                self._weights.request((), Priority.SPECULATIVE)
        if self._trial.on:
            guess = self._predictor.of_following(layer, hidden)
            self._prefetch(self._predictor.following[layer], guess, PredictionSource.ROUTER)

    @override
    def layer_ended(self, index: int, hidden: torch.Tensor) -> None:
        if self._trial.on:
            guess = self._predictor.of_first(index, hidden)
            if guess is not None:
                self._prefetch(self._predictor.first, guess, PredictionSource.ROUTER_OF_FIRST)

    def _prefetch(
        self, layer: int, guess: list[list[int]] | None, source: PredictionSource
    ) -> None:
        """Request those that are not there and probable; remember all, to see who was right."""
        absent = [
            (expert, kind)
            for expert, kind in candidates(guess or [], source)
            if _block(layer, expert) in self._own
            and self._weights.presence(_block(layer, expert)) is not Presence.HIT
        ]
        self._prefetched[layer] = absent
        blocks = [_block(layer, expert) for expert, kind in absent if self._trust.probable(kind)]
        self._weights.request(blocks[: self._most], Priority.SPECULATIVE)


def _block(layer: int, expert: int) -> BlockId:
    return BlockId(layer, BlockKind.EXPERT, expert)
