"""A draft model: its sequences, beside those of the model that verifies."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from hmt.base.errors import HMTError
from hmt.base.log import logger
from hmt.base.units import round_up
from hmt.contracts.model import MOST_DRAFTS, PAGE_TOKENS
from hmt.contracts.step import SchedulerOutput, SegmentRequest
from hmt.engine.model_runner import ModelRunner
from hmt.engine.outputs.prompt_outputs import PromptOutputSource
from hmt.kernels import ops
from hmt.kernels.ops import LogitStats
from hmt.kvcache import KVAllocator

_FIRST_ID = 16  # lower ones often are marks
# Tokens that come behind those of a sequence, mostly.  What was not prepared compiles while a
# request waits: five seconds on an H200.
_CAUGHT_UP = range(1, 7)
_AHEAD = 4 * PAGE_TOKENS  # positions that a sequence grows by


@dataclass(slots=True)
class _Sequence:
    """What the model holds of a request: a sequence in its KV cache, and the tokens in it."""

    kv: int
    reserved: int
    tokens: list[int] = field(default_factory=list)


class LastHidden(PromptOutputSource):
    """Keeps the hidden state of the last row."""

    def __init__(self) -> None:
        self.row = torch.empty(0)

    @override
    def logits(self, first: int, logits: Tensor) -> None:
        """None is asked for."""

    @override
    def hidden(self, first: int, hidden: Tensor) -> None:
        """See PromptOutputSource."""
        self.row = hidden[-1].clone()


class Prediction(NamedTuple):
    """What a draft model finds of the token behind those that it was given.

    logits   f32 [vocab], valid until the next step
    stats    of these
    hidden   f32 [hidden_size], where it drafts from hidden states; else [0]
    """

    logits: Tensor
    stats: LogitStats
    hidden: Tensor


class DraftModel:
    """Runs a small model for requests of the large one.  For the engine's thread.

    Its KV cache may be too small for a request: then nothing is drafted for that one.
    """

    def __init__(
        self, runner: ModelRunner, kv: KVAllocator, chunk: int, *, captured: bool = False
    ) -> None:
        """`chunk` tokens at most are computed in a step.

        captured   whether a device captures its decoding steps
        """
        self._runner, self._kv, self._chunk = runner, kv, chunk
        self._captured = captured
        self._sequences: dict[int, _Sequence] = {}

    def tokens(self, number: int) -> list[int]:
        """What it has computed of a request."""
        held = self._sequences.get(number)
        return held.tokens if held is not None else []

    def keep(self, number: int, count: int) -> None:
        """Let it hold no more than the first `count` tokens of a request."""
        held = self._sequences.get(number)
        if held is not None and count < len(held.tokens):
            self._kv.rollback(held.kv, count)
            del held.tokens[count:]

    def feed(
        self, number: int, tokens: Sequence[int], inputs: Tensor | None = None
    ) -> Prediction | None:
        """Compute `tokens` behind those of a request; None where the cache has no room.

        inputs   [tokens, hidden_size]: hidden states that come in beside the tokens

        Raises DiskReadError or NumericsError.
        """
        held = self._room(number, len(tokens))
        if held is None:
            return None
        last, logits = LastHidden(), torch.empty(0)
        # Some tokens behind the prompt are computed as draft tokens are verified: captured.
        together = self._captured and bool(held.tokens) and len(tokens) <= MOST_DRAFTS
        together = together and self._runner.verifies(1)
        for first in range(0, len(tokens), self._chunk):
            part = list(tokens[first : first + self._chunk])
            rows = len(part) if together else int(first + len(part) == len(tokens))
            segment = SegmentRequest(
                held.kv, len(held.tokens), part, rows, reserved_tokens=held.reserved,
                num_pooled=0 if inputs is None else max(1, rows),
                drafts=len(part) - 1 if together else 0,
            )  # fmt: skip
            given = None if inputs is None else inputs[first : first + len(part)]
            output = SchedulerOutput((segment,))
            try:
                logits = self._runner.run(output, None if inputs is None else last, given)
            except HMTError:
                self._runner.abandon()
                raise
            held.tokens += part
        stats = self._runner.executor.surveys
        return Prediction(logits[-1], stats[-1] if stats else ops.logit_stats(logits[-1]), last.row)

    def append(self, number: int, states: Tensor) -> bool:
        """Let it see hidden states [tokens, layers * hidden_size] of a request's next tokens.

        For models that draft blocks.  False where the cache has no room.  Raises DiskReadError or
        NumericsError.
        """
        return all(
            self._see(number, states[first : first + self._chunk]) is not None
            for first in range(0, len(states), self._chunk)
        )

    def draft_block(
        self, number: int, states: Tensor, block: Sequence[int], rows: int
    ) -> Tensor | None:
        """`append` of states, and logits f32 [rows, vocab] of the last tokens of a block.

        The block stands behind all that the model has seen of the request, and does not stay.
        Valid until the next step.  None where the cache has no room.
        """
        if len(states) + len(block) > self._chunk:
            if not self.append(number, states):
                return None
            states = states[:0]
        logits = self._see(number, states, block, rows)
        if logits is not None:
            self._kv.rollback(self._sequences[number].kv, len(self.tokens(number)))
        return logits

    def _see(
        self, number: int, states: Tensor, block: Sequence[int] = (), rows: int = 0
    ) -> Tensor | None:
        """One step: states, and a block behind them."""
        held = self._room(number, len(states) + len(block))
        if held is None:
            return None
        tokens, start = [_FIRST_ID] * len(states), len(held.tokens)
        first = start + len(states)
        segment = SegmentRequest(
            held.kv, start, [*tokens, *block], rows, reserved_tokens=held.reserved,
            blocks=((first, first + len(block)),) if block else (),
        )  # fmt: skip
        inputs = torch.cat((states, torch.zeros(len(block), states.shape[1])))
        try:
            logits = self._runner.run(SchedulerOutput((segment,)), None, inputs)
        except HMTError:
            self._runner.abandon()
            raise
        held.tokens += tokens
        return logits

    def warm_up(self, prompts: Sequence[int], widths: Sequence[int]) -> None:
        """Let a GPU compile and capture before the first request: see `execution/warmup.py`.

        prompts   tokens of each
        widths    of the hidden states that come in, those of the model that verifies first; (): it
                  computes from tokens alone
        """
        try:
            for tokens in prompts:
                for count in (tokens, *_CAUGHT_UP):
                    given = torch.zeros(count, widths[0]) if widths else None
                    self.feed(0, [_FIRST_ID + n % 3 for n in range(count)], given)
                if widths and widths[-1] != widths[0]:
                    self.feed(0, [_FIRST_ID], torch.zeros(1, widths[-1]))
                self.close(0)
        except (HMTError, RuntimeError) as error:
            logger.warning("what a draft model computes first could not be prepared: %s", error)
            self.close(0)

    def close(self, number: int) -> None:
        """A request has ended."""
        if (held := self._sequences.pop(number, None)) is not None:
            self._kv.close(held.kv)

    def _room(self, number: int, count: int) -> _Sequence | None:
        """The request's sequence with room for `count` more tokens; None: there is none."""
        held = self._sequences.get(number)
        needed = count if held is None else len(held.tokens) + count
        positions = round_up(needed + _AHEAD, PAGE_TOKENS)
        if held is None:
            if not self._kv.can_open(positions):
                return None
            held = self._sequences[number] = _Sequence(self._kv.open(positions), positions)
        elif needed > held.reserved:
            if not self._kv.can_grow(held.kv, positions):
                return None
            self._kv.grow(held.kv, positions)
            held.reserved = positions
        return held
