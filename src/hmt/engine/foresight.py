"""Which experts the next layer will need, before its router says so.

Two sources.  The next router itself, applied to the residual stream as it is one layer earlier:
attention has been added, the experts have not, so their reads can begin while these compute.  And
for the first layer with experts, whose input is another token's, which experts followed which.
"""

from typing import Self

import torch

from hmt.contracts.blocks import BlockId, BlockKind
from hmt.contracts.model import Model, ModelSpec
from hmt.contracts.plan import Plan, Tier
from hmt.contracts.store import Weights


def expert_layers(spec: ModelSpec) -> list[int]:
    """Layers that have routed experts, ascending."""
    return sorted({block.id.layer for block in spec.blocks if block.id.kind is BlockKind.EXPERT})


def expert_count(spec: ModelSpec) -> int:
    """Routed experts of a layer; 0 for a dense model."""
    indices = [block.id.index for block in spec.blocks if block.id.kind is BlockKind.EXPERT]
    return max(indices, default=-1) + 1


class RouterForesight:
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


class Transitions:
    """How often each expert of one layer was followed by each of another; old counts fade."""

    _MOST = 1 << 14  # a count; int16 holds twice that

    def __init__(self, counts: torch.Tensor) -> None:
        """`counts` int16 [experts, experts], zeros."""
        self._counts = counts

    @staticmethod
    def nbytes(experts: int) -> int:
        """Memory that the counts take."""
        return 2 * experts * experts

    @classmethod
    def over(cls, memory: torch.Tensor, experts: int) -> Self:
        """In the caller's `memory`, uint8 with at least `nbytes`, which it clears."""
        counts = memory[: cls.nbytes(experts)].view(torch.int16).view(experts, experts)
        counts.zero_()
        return cls(counts)

    def learn(self, before: list[int], after: list[int]) -> None:
        """A token's experts `before` were followed by those in `after`."""
        at = (torch.tensor(before)[:, None], torch.tensor(after))
        self._counts[at] += 1
        if int(self._counts[at].max()) >= self._MOST:
            self._counts //= 2

    def following(self, before: list[int], count: int) -> list[int]:
        """The `count` likeliest experts after `before`, the likeliest first; fewer when unknown."""
        rows = self._counts[before].float()
        scores = (rows / rows.sum(1, keepdim=True).clamp(min=1)).sum(0)
        best = scores.topk(min(count, len(scores)))
        return [
            expert
            for expert, score in zip(best.indices.tolist(), best.values.tolist(), strict=True)
            if score > 0
        ]
