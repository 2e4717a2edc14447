"""A proposer that drafts a block of tokens in one pass: DFlash."""

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor
from typing_extensions import override

from hmt.engine.loading.prepared import DraftInputs
from hmt.engine.speculation.draft import Draft, Proposer, Worth
from hmt.engine.speculation.draft_model import DraftModel, Prediction
from hmt.engine.speculation.model_proposers import (
    MOST_PENDING,
    DraftBuilder,
    PendingStates,
)
from hmt.kernels import ops


class BlockProposer(Proposer):
    """Asks a drafter that sees hidden states of the verifier and fills in a block behind them.

    Tokens that the prefix cache had computed are unknown to it, which makes draft tokens worse at
    first and changes no answer.
    """

    needs_hidden = is_slow = True

    def __init__(
        self, model: DraftModel, vocab_size: int, inputs: DraftInputs, *, branches: bool = True
    ) -> None:
        """`vocab_size` of the model that verifies, `inputs` of the one that drafts.

        branches   whether steps may verify alternatives
        """
        assert inputs.block is not None
        self._model, self._vocab_size, self._branches = model, vocab_size, branches
        self._inputs, self._block = inputs, inputs.block
        self.layers = inputs.layers
        self._states: dict[int, PendingStates] = {}

    @override
    def observe(self, number: int, tokens: Sequence[int], start: int, hidden: Tensor) -> None:
        states = self._states.setdefault(number, PendingStates())
        states.add(start, hidden)
        if states.count > MOST_PENDING:
            self._model.append(number, states.take())

    @override
    def propose(
        self, number: int, scope: str, tokens: Sequence[int], most: int, worth: Worth
    ) -> Draft:
        states, block = self._states.get(number), self._block
        if states is None or states.end != len(tokens) - 1:
            return Draft()
        asked = [tokens[-1], *[block.mask] * (block.tokens - 1)]
        logits = self._model.draft_block(number, states.take(), asked, block.tokens - block.first)
        made = DraftBuilder(self._vocab_size, worth, self._inputs.tokens, branches=self._branches)
        for row in () if logits is None else islice(logits, most):
            found = Prediction(row, ops.logit_stats(row), torch.empty(0))
            if made.add(found, f"{self._inputs.kind} {len(made)}") is None:
                break
        return made.draft

    @override
    def ended(self, number: int) -> None:
        self._states.pop(number, None)
        self._model.close(number)
