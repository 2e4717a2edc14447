"""Reading experts on a guess: only while it gains, and never before a need.

Guesses go to the store as requests with Priority.GUESS, which everything else passes.  What they
change is when a block is read; no result depends on them.
"""

from dataclasses import replace

import torch

from hmt.contracts.blocks import BlockId, BlockKind
from hmt.contracts.model import Model
from hmt.contracts.plan import Plan
from hmt.contracts.store import Presence, Priority
from hmt.engine.foresight import Kind, RouterForesight, Source, Transitions, Trust, candidates
from hmt.weights import GuessCounters, WeightStore

_SLOT_SHARE = 4  # guesses may wait in a quarter of the slots


class Guesser:
    """Implements Observer: guesses the experts of the next layer."""

    def __init__(
        self, model: Model, weights: WeightStore, plan: Plan, transitions: Transitions
    ) -> None:
        self._weights = weights
        self._foresight = RouterForesight(model, weights, plan)
        self._transitions = transitions
        self._trust = Trust()
        self._switch = GainSwitch(weights.guesses)
        self._guessed: dict[int, list[tuple[int, Kind]]] = {}  # by layer: absent experts
        self._before: list[int] | None = None  # the last layer's experts, of one token
        sizes = [
            weights.slot_bytes(block.id)
            for block in model.spec.blocks
            if block.id.kind is BlockKind.EXPERT
        ]
        self._most = plan.reserved["slots"] // _SLOT_SHARE // max(sizes)

    def routed(
        self, layer: int, hidden: torch.Tensor, experts: torch.Tensor, scales: torch.Tensor
    ) -> None:
        """See Observer."""
        first, chosen = layer == self._foresight.first, experts.tolist()
        self._trust.learn(self._guessed.pop(layer, ()), {e for token in chosen for e in token})
        if first:
            self._switch.step()
            if self._before is not None and len(chosen) == 1:
                self._transitions.learn(self._before, chosen[0])
            self._before = None
        following = self._foresight.following[layer]
        last = following <= layer
        if last and len(chosen) == 1:
            self._before = chosen[0]
        if not self._switch.on:
            return
        if last:
            guess = [self._transitions.following(chosen[0], len(chosen[0]))]
            self._guess(following, guess if len(chosen) == 1 else None, Source.TRANSITIONS)
        else:
            guessed = self._foresight.of_following(layer, hidden)
            self._guess(following, guessed, Source.ROUTER)

    def layer_ended(self, index: int, hidden: torch.Tensor) -> None:
        """See Observer."""
        if self._switch.on:
            guess = self._foresight.of_first(index, hidden)
            if guess is not None:
                self._guess(self._foresight.first, guess, Source.ROUTER_OF_FIRST)

    def _guess(self, layer: int, guess: list[list[int]] | None, source: Source) -> None:
        """Request those that are not there and probable; remember all, to see who was right."""
        absent = [
            (expert, kind)
            for expert, kind in candidates(guess or [], source)
            if self._weights.presence(_block(layer, expert)) is not Presence.HIT
        ]
        self._guessed[layer] = absent
        blocks = [_block(layer, expert) for expert, kind in absent if self._trust.probable(kind)]
        self._weights.request(blocks[: self._most], Priority.GUESS)


def _block(layer: int, expert: int) -> BlockId:
    return BlockId(layer, BlockKind.EXPERT, expert)


class GainSwitch:
    """On while guesses gain more of the drive's time than they cost; tries again after a pause.

    Every 32 guesses, what was read before it was needed is weighed against what needs waited for,
    and a quarter of what nobody has needed so far: such a read held nobody up, which is counted
    already, but took a slot and energy.  The pause is 64 steps, twice as long each time that
    trying did not help, up to 1024.
    """

    _EVERY = 32
    _PAUSES = (64, 1024)
    _UNNEEDED = 0.25

    def __init__(self, counters: GuessCounters) -> None:
        """`counters` are the store's own, which go on counting."""
        self.on = True
        self._counters = counters
        self._mark = replace(counters)
        self._pause = self._PAUSES[0]
        self._left = 0

    def step(self) -> None:
        """A step begins."""
        if not self.on:
            self._left -= 1
            if self._left <= 0:
                self.on, self._mark = True, replace(self._counters)
            return
        now, mark = self._counters, self._mark
        if now.begun - mark.begun < self._EVERY:
            return
        unneeded = now.unneeded_bytes - mark.unneeded_bytes
        cost = now.delayed_bytes - mark.delayed_bytes + self._UNNEEDED * max(0, unneeded)
        self._mark = replace(now)
        if now.gained_bytes - mark.gained_bytes > cost:
            self._pause = self._PAUSES[0]
            return
        self.on, self._left = False, self._pause
        self._pause = min(2 * self._pause, self._PAUSES[1])
