"""The engine's speculation: asks the proposer, lets the gate choose, and keeps the account."""

from collections.abc import Callable

from hmt.base.errors import HMTError
from hmt.base.log import logger
from hmt.contracts.model import MOST_DRAFTS
from hmt.contracts.step import SchedulerOutput
from hmt.engine.outputs.prompt_outputs import PromptOutputSource
from hmt.engine.scheduling.sequence import SequenceState
from hmt.engine.speculation.account import SpeculationAccount
from hmt.engine.speculation.draft import Draft, Proposer
from hmt.engine.speculation.gate import SpeculationGate
from hmt.engine.speculation.hidden_states import HiddenStates, with_hidden


class Speculator:
    """Draft tokens for sequences that decode.  For the engine's thread only.

    account   since the last reset
    notes     what the user should know: why a proposer is not asked any more
    """

    def __init__(
        self,
        proposer: Proposer | None,
        scope: Callable[[SequenceState], str] = lambda _: "",
        most: int = MOST_DRAFTS,
        verifies: Callable[[int], bool] = lambda _: True,
    ) -> None:
        """Without a proposer there are no draft tokens.

        verifies   whether steps of so many sequences take draft tokens
        scope   who may learn from whose tokens
        most    draft tokens for a sequence
        """
        self._proposer = proposer
        self._scope = scope
        self._most = most
        self._verifies = verifies
        self._gate = SpeculationGate()
        self._hidden = HiddenStates(() if proposer is None else proposer.layers)
        self._drafts: dict[int, Draft] = {}  # of the step that comes, by number of the request
        self._accepted = 0  # of the same step
        self._asked = False  # whether time went into draft tokens for it
        self.account = SpeculationAccount()
        self.notes: tuple[str, ...] = ()

    def draft(self, sequence: SequenceState, most: int, sequences: int) -> tuple[int, ...]:
        """At most `most` draft tokens for the next step, which computes `sequences` sequences."""
        others = sum(len(draft.tokens) for draft in self._drafts.values())
        most = min(most, self._most, MOST_DRAFTS - sequences - others)
        if self._proposer is None or most < 1 or not self._gate.is_open:
            return ()
        if not self._verifies(sequences):
            return ()
        scope, worth = self._scope(sequence), self._gate.worth(sequences, others)
        try:
            draft = self._proposer.propose(sequence.number, scope, sequence.tokens, most, worth)
        except HMTError as error:
            self._failed(error)
            return ()
        self._asked |= bool(draft.tokens) or self._proposer.is_slow
        if draft.tokens:
            self._drafts[sequence.number] = draft
        return draft.tokens

    def shown(
        self, output: SchedulerOutput, viewer: PromptOutputSource | None
    ) -> tuple[SchedulerOutput, PromptOutputSource | None]:
        """The step, and who sees its rows: the proposer, if it needs them and no one else does."""
        self._hidden.begin()
        if viewer is not None or self._proposer is None or not self._proposer.needs_hidden:
            return output, viewer
        return with_hidden(output), self._hidden

    def observe(self, output: SchedulerOutput, state: Callable[[int], SequenceState]) -> None:
        """Tell the proposer of the step's tokens that stay.  `state` finds requests by number."""
        for run, hidden in self._hidden.by_segment(output):
            sequence = state(run.request)
            if self._proposer is not None and not sequence.finished:
                stays = hidden[: sequence.computed - run.start]
                try:
                    self._proposer.observe(run.request, sequence.tokens, run.start, stays)
                except HMTError as error:
                    self._failed(error)

    def reset_account(self) -> None:
        """Count from zero."""
        self.account = SpeculationAccount()

    def verified(self, sequence: SequenceState, accepted: int) -> None:
        """The first `accepted` draft tokens of the step were right."""
        draft = self._drafts[sequence.number]
        self._accepted += accepted
        self._gate.verified(draft, accepted)
        self.account.add(len(draft.tokens), accepted)

    def step_took(self, output: SchedulerOutput, seconds: float, *, captured: bool = False) -> int:
        """The step has ended; how many of its draft tokens were wrong.

        captured   whether time went into capturing it
        """
        drafted, accepted = output.num_drafts, self._accepted
        self._drafts, self._accepted = {}, 0
        if self._proposer is None or output.prompt_tokens:  # the time of these tells nothing
            return 0
        if captured:
            self._asked = False
            return drafted - accepted
        emitted = len(output.segments) + accepted
        if drafted:
            alone = self._gate.times.of(len(output.segments)) / len(output.segments)
            self.account.steps += 1
            self.account.tokens += emitted
            self.account.saved_s += emitted * alone - seconds
        self._gate.step_took(output.num_tokens, emitted, seconds, drafting=self._asked)
        self._asked = False
        return drafted - accepted

    def _failed(self, error: HMTError) -> None:
        """A proposer cannot draft, and is not asked again: requests go on without."""
        note = f"what drafted tokens failed, and is not asked again in this run: {error}"
        logger.warning(note)
        self.notes += (note,)
        self.account.failures += 1

    def ended(self, sequence: SequenceState) -> None:
        """A request has ended."""
        if self._proposer is not None:
            self._proposer.ended(sequence.number)
