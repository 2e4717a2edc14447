"""A process's part of a step: which layers it computes, and whom it gets hidden states from.

Stages of a pipeline follow one another; the last one returns to the first what that needs for the
output layer.  Where a step wants nothing of it, as of a prompt's chunks but the last, no stage
waits for a later one: so several chunks are under way at once.
"""

import torch

from hmt.contracts.model import Model
from hmt.contracts.sharding import RankShare
from hmt.contracts.step import Step
from hmt.contracts.store import Weights


class PipelineStage:
    """What an executor computes of a model.

    layers    consecutive ones
    has_head  whether it computes logits
    """

    def __init__(self, model: Model, share: RankShare | None) -> None:
        """`share` is what this process has of the model; None: all of it."""
        spec, own = model.spec, None if share is None else share.layers
        self._model, self._share = model, share
        self._width = spec.hidden_size
        self.layers = range(spec.layers) if own is None else range(own.first, own.end)
        self.has_head = share is None or share.has_head

    def begin(self, step: Step, weights: Weights) -> torch.Tensor:
        """Hidden states in front of the layers: [tokens, hidden_size].  Raises RankError."""
        share = self._share
        if share is None or share.has_embedding:
            return self._model.embed(step, weights)
        return self._received(len(step.token_ids), share, share.stage - 1)

    def end(self, step: Step, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states behind all layers of the model, of `hidden` [tokens, hidden_size].

        In the process with the output layer; only rows that the step wants are set.  In others what
        is returned means nothing.  Raises RankError.
        """
        share = self._share
        if share is None or share.stages == 1:
            return hidden
        last = share.stages - 1
        if share.stage < last:
            share.collective.send(hidden.cpu(), share.stage + 1)
        # Ranks that divide the layers of a stage have the same hidden states.
        part = share.rank % (share.ranks // share.stages)
        if part or share.stage not in (0, last) or not len(rows := _wanted(step)):
            return hidden
        if share.stage == last:
            share.collective.send(hidden[rows.to(hidden.device)].cpu(), 0)
            return hidden
        whole = torch.empty(*hidden.shape, dtype=hidden.dtype)
        whole[rows] = self._received(len(rows), share, last)
        return whole

    def _received(self, rows: int, share: RankShare, stage: int) -> torch.Tensor:
        return share.collective.receive((rows, self._width), self._model.dtype, stage)


def _wanted(step: Step) -> torch.Tensor:
    """Rows of a step that the process with the output layer looks at: int64, ascending."""
    wanted = torch.cat((step.logit_rows, step.scored_rows, step.pooled_rows))
    rows: torch.Tensor = torch.unique(wanted)
    return rows
