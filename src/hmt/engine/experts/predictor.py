"""Which experts the next layer will need, before its router says so.

The next router itself is applied to the residual stream as it is one layer earlier: attention has
been added, the experts have not, so their reads can begin while these compute.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from enum import IntEnum

import torch

from hmt.contracts.blocks import BlockId, BlockKind
from hmt.contracts.model import Model, ModelSpec
from hmt.contracts.plan import Plan, Tier
from hmt.contracts.store import Weights

_PROBABLE = 0.5  # an expert is read on a guess when it is more likely than not to be needed
_MEMORY = 32  # guesses after which an old one counts for about a third


class PredictionSource(IntEnum):
    """Where a guess comes from; each earns its own trust."""

    ROUTER = 0
    ROUTER_OF_FIRST = 1


# A source and a rank in its list: 0 is what it thinks likeliest.
Kind = tuple[PredictionSource, int]


def candidates(guess: Sequence[Sequence[int]], source: PredictionSource) -> list[tuple[int, Kind]]:
    """Each expert that was predicted for some token, by its best rank, then by number of tokens."""
    best: dict[int, int] = {}
    tokens: Counter[int] = Counter()
    for token in guess:
        for rank, expert in enumerate(token):
            best[expert] = min(rank, best.get(expert, rank))
            tokens[expert] += 1
    ordered = sorted(best, key=lambda expert: (best[expert], -tokens[expert]))
    return [(expert, (source, best[expert])) for expert in ordered]


class Trust:
    """How often guesses of each kind came true lately, among experts that had to be read."""

    def __init__(self) -> None:
        self._probability: defaultdict[Kind, float] = defaultdict(lambda: 1.0)  # until seen

    def probable(self, kind: Kind) -> bool:
        """Whether the next guess of this kind is worth a read."""
        return self._probability[kind] > _PROBABLE

    def learn(self, predicted: Iterable[tuple[int, Kind]], chosen: set[int]) -> None:
        """What was predicted for a layer, read or not, and what its router chose."""
        for expert, kind in predicted:
            self._probability[kind] += (float(expert in chosen) - self._probability[kind]) / _MEMORY


def expert_layers(spec: ModelSpec) -> list[int]:
    """Layers that have routed experts, ascending."""
    return sorted({block.id.layer for block in spec.blocks if block.id.kind is BlockKind.EXPERT})


def expert_count(spec: ModelSpec) -> int:
    """Routed experts of a layer; 0 for a dense model."""
    indices = [block.id.index for block in spec.blocks if block.id.kind is BlockKind.EXPERT]
    return max(indices, default=-1) + 1


class RouterPredictor:
    """Asks routers early.  Only those that live in memory: no read is worth a guess."""

    def __init__(self, model: Model, weights: Weights, plan: Plan) -> None:
        self._model = model
        self._weights = weights
        layers = expert_layers(model.spec)
        self.first = layers[0]
        self.following = dict(zip(layers, (*layers[1:], layers[0]), strict=True))
        self._readable = {
            layer for layer in layers if plan.homes[BlockId(layer, BlockKind.ROUTER)] is Tier.HOST
        }

    def of_following(self, layer: int, hidden: torch.Tensor) -> list[list[int]] | None:
        """Experts of the layer that follows `layer`, per token, the likeliest first.

        hidden is the residual stream that the router of `layer` saw.  None behind the last layer,
        and where the following router is not in memory.
        """
        following = self.following[layer]
        return self._of(following, hidden) if following > layer else None

    def of_first(self, index: int, hidden: torch.Tensor) -> list[list[int]] | None:
        """Experts of the first layer that has any, when `index`, a dense one, is just before it."""
        return self._of(self.first, hidden) if index + 1 == self.first else None

    def _of(self, layer: int, hidden: torch.Tensor) -> list[list[int]] | None:
        if layer not in self._readable:
            return None
        return self._model.expected_experts(layer, hidden, self._weights).tolist()
