"""A proposer whose model attends to the KV cache of the model that verifies: Gemma 4's assistant.

It needs the last token's hidden state and nothing of the tokens before, so that it can draft at
once behind a prompt that the prefix cache has.
"""

from collections.abc import Callable, Sequence

from torch import Tensor
from typing_extensions import override

from hmt.base.errors import HMTError
from hmt.contracts.step import SchedulerOutput, SegmentRequest
from hmt.engine.loading.prepared import DraftInputs
from hmt.engine.model_runner import ModelRunner
from hmt.engine.speculation.draft import Draft, Proposer, Worth
from hmt.engine.speculation.draft_model import LastHidden, Prediction
from hmt.engine.speculation.model_proposers import decoded
from hmt.kernels import ops


class Assistant:
    """Runs a model that attends to the verifier's KV cache.  For the engine's thread."""

    def __init__(self, runner: ModelRunner, kv_of: Callable[[int], int]) -> None:
        """`kv_of`: the handle that a request's sequence has in the verifier's KV cache now."""
        self._runner, self._kv_of = runner, kv_of
        self._positions: dict[int, int] = {}

    def set_position(self, number: int, position: int) -> None:
        """A request's last token that is known is at `position`, behind what the cache has."""
        self._positions[number] = position

    def feed(
        self, number: int, tokens: Sequence[int], inputs: Tensor | None = None
    ) -> Prediction | None:
        """What comes behind one token, with a hidden state [1, width of the verifier].

        Raises DiskReadError or NumericsError.
        """
        position = self._positions[number]
        segment = SegmentRequest(self._kv_of(number), position, list(tokens), 1, num_pooled=1)
        last = LastHidden()
        try:
            logits = self._runner.run(SchedulerOutput((segment,)), last, inputs)
        except HMTError:
            self._runner.abandon()
            raise
        return Prediction(logits[-1], ops.logit_stats(logits[-1]), last.row)

    def close(self, number: int) -> None:
        """A request has ended."""
        self._positions.pop(number, None)


class AssistantProposer(Proposer):
    """Asks an assistant for token after token, from the last hidden state that was observed."""

    needs_hidden = is_slow = True

    def __init__(
        self, model: Assistant, vocab_size: int, inputs: DraftInputs, *, branches: bool = True
    ) -> None:
        """`vocab_size` of the model that verifies, `inputs` of the one that drafts.

        branches   whether steps may verify alternatives
        """
        self._model, self._vocab_size, self._branches = model, vocab_size, branches
        self._kind = inputs.kind
        self._last: dict[int, tuple[int, Tensor]] = {}  # by request: tokens so far, hidden [1, n]

    @override
    def observe(self, number: int, tokens: Sequence[int], start: int, hidden: Tensor) -> None:
        if len(hidden):
            self._last[number] = start + len(hidden), hidden[-1:].clone()

    @override
    def propose(
        self, number: int, scope: str, tokens: Sequence[int], most: int, worth: Worth
    ) -> Draft:
        seen, hidden = self._last.get(number, (0, None))
        if not seen or seen != len(tokens) - 1:
            return Draft()
        self._model.set_position(number, seen)
        found = self._model.feed(number, tokens[-1:], hidden)
        return decoded(
            self._model, number, found, lambda depth: f"{self._kind} {depth}",
            self._vocab_size, most, worth,
            branches=self._branches,
        )  # fmt: skip

    @override
    def ended(self, number: int) -> None:
        self._last.pop(number, None)
        self._model.close(number)
