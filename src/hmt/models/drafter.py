"""Models that draft for another: a family's layers behind an embedding of their own."""

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from hmt.contracts.blocks import TRUNK, BlockId, BlockKind, BlockSpec
from hmt.contracts.model import ModelSpec
from hmt.contracts.step import Step
from hmt.contracts.store import Weights
from hmt.models.decoder import Decoder
from hmt.models.forwarding import ForwardingModel

_HEAD = BlockId(TRUNK, BlockKind.HEAD)


class Drafter(ForwardingModel[Decoder]):
    """A model that computes what `base` does; subclasses say what differs.

    Their steps carry hidden states as `Step.inputs`.

    borrows   Of the embedding and the output layer, which are those of the model that verifies.
              Their bytes are there once, in whatever form that model has them.
    """

    def __init__(self, base: Decoder, spec: ModelSpec, borrows: Collection[BlockKind] = ()) -> None:
        """`base` is changed: it has the blocks of `spec` from now on, but for what is borrowed."""
        self._lender: Weights | None = None
        self._head_device: torch.device | None = None
        self.borrows = frozenset(borrows)
        own = (self._own(block) for block in spec.blocks)
        blocks = tuple(block for block in own if block.params)
        base.spec = replace(spec, blocks=blocks)
        super().__init__(base, base.spec)

    def borrow(self, weights: Weights, head_device: torch.device | None = None) -> None:
        """Compute with these, of the model that verifies, where something is borrowed of it.

        For the same thread; they must stay open for as long as this model computes.

        head_device   where the output layer is, if this model may compute elsewhere
        """
        self._lender, self._head_device = weights, head_device

    def _own(self, block: BlockSpec) -> BlockSpec:
        """What of a block is not borrowed: of the head the norm in front of it."""
        if block.id.kind not in self.borrows:
            return block
        return replace(block, params=tuple(p for p in block.params if p.name != "weight"))

    def _tokens(self, step: Step, weights: Weights, where: torch.device) -> Tensor:
        """Embeddings of the step's tokens, brought to where this model computes."""
        if BlockKind.EMBEDDING in self.borrows:
            assert self._lender is not None
            weights = self._lender
        return self._base.embed(step, weights).to(where)

    @override
    def head(self, hidden: Tensor, weights: Weights) -> Tensor:
        if BlockKind.HEAD not in self.borrows:
            return self._base.head(hidden, weights)
        assert self._lender is not None
        with weights.lease(_HEAD) as params:
            normed = self._base.final_norm(hidden, params)
        there = normed if self._head_device is None else normed.to(self._head_device)
        return self._base.logits_of(there, self._lender)
