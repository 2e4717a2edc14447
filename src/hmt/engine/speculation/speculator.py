"""The engine's speculation: asks the proposer, lets the gate choose, and keeps the account."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from hmt.base.errors import HMTError
from hmt.base.log import logger
from hmt.contracts.model import MOST_DRAFTS
from hmt.contracts.step import SchedulerOutput
from hmt.engine.outputs.prompt_outputs import PromptOutputSource
from hmt.engine.scheduling.sequence import SequenceState
from hmt.engine.speculation.account import SpeculationAccount
from hmt.engine.speculation.draft import Draft, Proposer
from hmt.engine.speculation.gate import FIRST_COST, SpeculationGate, StepTimes
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
        *,
        branches: bool = False,
        first_cost: float = FIRST_COST,
    ) -> None:
        """Without a proposer there are no draft tokens.

        verifies   whether steps of so many sequences take draft tokens
        scope   who may learn from whose tokens
        most    draft tokens for a sequence
        branches   whether a step may verify several drafts of a sequence
        first_cost   see StepTimes
        """
        self._branches = branches
        self._proposer = proposer
        self._scope = scope
        self._most = most
        self._verifies = verifies
        self._gate = SpeculationGate(StepTimes(first_cost))
        self._hidden = HiddenStates(() if proposer is None else proposer.layers)
        self._drafts: dict[int, Draft] = {}  # of the step that comes, by number of the request
        self._accepted = 0  # of the same step
        self._drafted = 0  # the same, those of branches and what these compute again as well
        self._asked = False  # whether time went into draft tokens for it
        self.account = SpeculationAccount()
        self.notes: tuple[str, ...] = ()

    def draft(self, sequence: SequenceState, most: int, sequences: int) -> tuple[int, ...]:
        """At most `most` draft tokens for the next step, which computes `sequences` sequences."""
        others = self._drafted
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
            self._drafted += len(draft.tokens)
        return draft.tokens

    def alternatives(self, number: int, sequences: int) -> list[tuple[int, ...]]:
        """Further drafts for the next step of a request that has one, in branches.

        See `draft`.
        """
        draft = self._drafts[number]
        chosen = [draft.begin(len(draft.tokens))]
        for other in draft.alternatives if self._branches else ():
            room = MOST_DRAFTS - sequences - self._drafted - 1
            other = other.begin(min(len(draft.tokens), room))
            if room < 1 or any(one.tokens[0] == other.tokens[0] for one in chosen):
                continue
            if count := self._gate.worth_beside(other, chosen, sequences, self._drafted):
                chosen.append(other.begin(count))
                self._drafted += count + 1
        self._drafts[number] = replace(chosen[0], alternatives=tuple(chosen[1:]))
        return [one.tokens for one in chosen[1:]]

    def with_viewer(
        self, output: SchedulerOutput, viewer: PromptOutputSource | None
    ) -> tuple[SchedulerOutput, PromptOutputSource | None]:
        """The step, and who sees its rows: the proposer, if it needs them and no one else does."""
        self._hidden.begin()
        if viewer is not None or self._proposer is None or not self._proposer.needs_hidden:
            return output, viewer
        if not self._verifies(1):  # nothing is drafted, of these neither
            return output, viewer
        return with_hidden(output), self._hidden

    def observe(self, output: SchedulerOutput, state: Callable[[int], SequenceState]) -> None:
        """Tell the proposer of the step's tokens that stay.  `state` finds requests by number."""
        for run, hidden in self._hidden.by_segment(output):
            sequence = state(run.request)
            if self._proposer is not None and sequence.kv == run.sequence and not sequence.finished:
                stays = hidden[: sequence.computed - run.start]
                try:
                    self._proposer.observe(run.request, sequence.tokens, run.start, stays)
                except HMTError as error:
                    self._failed(error)

    def reset_account(self) -> None:
        """Count from zero."""
        self.account = SpeculationAccount()

    def verified(
        self,
        sequence: SequenceState,
        drafts: Sequence[tuple[int, ...]],
        kept: int,
        accepted: int,
    ) -> None:
        """Of a request's drafts the first `accepted` tokens of one were right.

        drafts   that the step verified: fewer than were chosen where there was no room
        kept     the number of that one; 0, the first, where none was right
        """
        first = self._drafts[sequence.number]
        for draft in (first, *first.alternatives):
            if draft.tokens in drafts:
                right = accepted if drafts[kept] == draft.tokens else 0
                self.account.add(len(draft.tokens), right)
                if not accepted or drafts.index(draft.tokens) <= kept:
                    self._gate.verified(draft, right)
        self._accepted += accepted

    def step_took(self, output: SchedulerOutput, seconds: float, *, captured: bool = False) -> int:
        """The step has ended; how many of its draft tokens were wrong.

        captured   whether time went into capturing it
        """
        drafted, accepted = output.num_drafts, self._accepted
        self._drafts, self._drafted, self._accepted = {}, 0, 0
        if self._proposer is None or output.prompt_tokens:  # the time of these tells nothing
            return 0
        if captured:
            self._asked = False
            return drafted - accepted
        sequences = output.num_sequences
        emitted = sequences + accepted
        if drafted:
            alone = self._gate.times.of(sequences) / sequences
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
