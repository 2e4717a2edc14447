"""Teacher forcing: what a model says behind each of given tokens, and what it keeps of them."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from hmt.base.errors import EmptyPromptError, RequestError
from hmt.contracts.step import SchedulerOutput, Segment, SegmentRequest
from hmt.contracts.store import KVCache
from hmt.engine.request_limits import check_tokens
from hmt.engine.scheduling.kv_operations import KVOperationLog

# Logits of a step, which stay valid; told whether it is of the prompt.
RunAlone = Callable[[SchedulerOutput, bool], torch.Tensor]


class TeacherForcing:
    """Steps of one sequence whose tokens are given.  Only for the engine's thread."""

    def __init__(
        self,
        kv: KVOperationLog,
        run: RunAlone,
        *,
        chunk: int,
        vocab_size: int,
        layers: Sequence[int],
        token_window: int = 0,
        adapter: int = 0,
    ) -> None:
        """`chunk` tokens of a prompt at most are computed in a step; `layers` are those with KV.

        token_window   of the model
        adapter        number of the low-rank adapter that all tokens are computed with; 0: none
        """
        self._adapter = adapter
        self._kv, self._run = kv, run
        self._chunk = chunk
        self._vocab_size = vocab_size
        self._layers = layers
        self._token_window = token_window

    def logits(self, tokens: Sequence[int], rows: Sequence[int], prefill: int) -> torch.Tensor:
        """See LoadedModel.logits."""
        return self._forced(tokens, rows, prefill, lambda kv: None)

    def keys_and_values(
        self,
        tokens: Sequence[int],
        cache: KVCache,
        see: Callable[[int, torch.Tensor, torch.Tensor], None],
    ) -> None:
        """See LoadedModel.keys_and_values; `cache` has them."""

        def look(kv: int) -> None:
            run = Segment(kv, len(tokens) - 1, 0, 1)
            for layer in self._layers:
                see(layer, *cache.read(layer, run))

        self._forced(tokens, [], len(tokens), look)

    def _forced(
        self,
        tokens: Sequence[int],
        rows: Sequence[int],
        prefill: int,
        look: Callable[[int], None],
    ) -> torch.Tensor:
        """See `logits`; `look` is given the handle of what the cache holds in the end."""
        self._check(tokens, rows, prefill)
        starts = [*range(0, prefill, self._chunk), *range(prefill, len(tokens)), len(tokens)]
        parts = [torch.empty(0, self._vocab_size)]
        kv = self._kv.open(len(tokens))
        try:
            for start, stop in pairwise(starts):
                before = tuple(tokens[max(0, start - self._token_window) : start])
                segment = SegmentRequest(
                    kv, start, list(tokens[start:stop]), 0, len(tokens), whole=len(tokens),
                    preceding=before, adapter=self._adapter,
                )  # fmt: skip
                own = tuple(row - start for row in rows if start <= row < stop)
                step = SchedulerOutput((segment,), logit_rows=own)
                parts.append(self._run(step, start < prefill))
            look(kv)
        finally:
            self._kv.close(kv)
        return torch.cat(parts)

    def _check(self, tokens: Sequence[int], rows: Sequence[int], prefill: int) -> None:
        if not tokens:
            raise EmptyPromptError("the prompt is empty; logits need at least one token")
        check_tokens(tokens, self._vocab_size)
        if not 0 <= prefill <= len(tokens):
            raise RequestError(f"prefill is {prefill}; there are {len(tokens)} tokens")
        if any(not 0 <= row < len(tokens) for row in rows) or list(rows) != sorted(rows):
            raise RequestError(f"rows must ascend within 0..{len(tokens) - 1}; got {list(rows)}")
