"""Several drafts of one sequence in one step: each further one over a fork of its KV cache.

So a tree of draft tokens needs no masks: to every cache and kernel a branch is a sequence like any
other, and its logits have the bits of a chain's.  What branches share, which here is the last token
that was chosen, is computed once for each.
"""

from collections.abc import Callable, Iterator, Sequence

from hmt.base.units import round_up
from hmt.contracts.model import PAGE_TOKENS
from hmt.contracts.step import SegmentRequest
from hmt.engine.scheduling.kv_operations import KVOperationLog
from hmt.engine.scheduling.sequence import SequenceState

# (number of a request, sequences of the step) -> what its draft's tokens may be instead.
Alternatives = Callable[[int, int], Sequence[tuple[int, ...]]]


class DraftBranches:
    """Forks of sequences, each for the length of a step.  Only for the engine's thread."""

    def __init__(self, kv: KVOperationLog, alternatives: Alternatives) -> None:
        self._kv = kv
        self._alternatives = alternatives
        self._open: dict[int, list[int]] = {}  # handles in the KV cache, by number of the request

    def with_branches(self, segments: Sequence[SegmentRequest]) -> list[SegmentRequest]:
        """The segments of a step, each with its branches behind it.

        There are fewer where there is no room.  Raises BudgetError or DiskReadError.
        """
        return [
            one
            for segment in segments
            for one in (segment, *(self._fork(segment, len(segments)) if segment.drafts else ()))
        ]

    def _fork(self, segment: SegmentRequest, sequences: int) -> Iterator[SegmentRequest]:
        kv = self._kv.allocator
        for drafts in self._alternatives(segment.request, sequences):
            tokens = [segment.tokens[0], *drafts]
            positions = segment.start + len(tokens)
            if not kv.can_fork(segment.sequence, segment.start, positions):
                return
            handle = self._kv.fork(segment.sequence, segment.start, positions)
            self._open.setdefault(segment.request, []).append(handle)
            yield segment._replace(
                sequence=handle, tokens=tokens, num_logit_rows=len(tokens), drafts=len(tokens),
                reserved_tokens=round_up(positions, PAGE_TOKENS),
            )  # fmt: skip

    def keep(self, sequence: SequenceState, handle: int) -> None:
        """Let a sequence have what `handle` holds: its own KV, or that of one of its branches."""
        for other in self._open.pop(sequence.number, ()):
            if other != handle:
                self._kv.close(other)
        if sequence.kv is None or sequence.kv == handle:
            return
        self._kv.close(sequence.kv)
        sequence.kv = handle
        if self._kv.allocator.can_grow(handle, sequence.reserved_tokens):
            self._kv.grow(handle, sequence.reserved_tokens)
        else:  # the scheduler lets it grow when it needs to
            sequence.reserved_tokens = self._kv.allocator.reserved_tokens(handle)

    def drop(self, number: int) -> None:
        """A request has ended: give up the branches that it has."""
        for handle in self._open.pop(number, ()):
            self._kv.close(handle)
