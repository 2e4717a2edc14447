"""Whether draft tokens are worth verifying: what they may give against the time that they cost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from hmt.engine.speculation.draft import Draft, Worth

_FORGET: Final = 0.95  # of what is known of steps' times, for each step
_FORGET_CLASS: Final = 0.98  # of what is known of a class, for each draft token that was verified
_RETURN: Final = 0.995  # the same for each draft token that was not worth it: so it is tried again
# Share of draft tokens of a new class that are accepted, and the weight of that.  What a long
# match repeats goes on, and what a model is sure of is right: so these are tried where a token more
# is dear, which is how its cost is measured.
_ASSUMED: Final = 0.5, 4.0
_SURE: Final = "lookup >16", "draft 5", "mtp 0 5", "eagle3 0 5", "dflash 0 5", "assistant 0 5"
_ASSUMED_OF: Final = dict.fromkeys(_SURE, 0.9)
FIRST_COST: Final = 0.2  # of a step's time, that a token more costs before that was measured
_TRIAL_STEPS: Final = 12  # with draft tokens, before they are judged
_CLEAR_LOSS: Final = 4, 0.7  # after so many steps with less than this share of the speed: at once
# Times what a step should have taken: what took longer was not the tokens' price.  The first draft
# tokens on a GPU compile kernels for seconds, and would count for hundreds of steps.
_OUTLIER: Final = 3.0
_PAUSE_STEPS: Final = 64  # without any, after a loss; twice as many after the next
_LONGEST_PAUSE: Final = 2048


@dataclass(slots=True)
class StepTimes:
    """A line through the times of steps by their number of tokens; older steps count less.

    first_cost   share of a step's time that a token more is assumed to cost before it was measured
    """

    first_cost: float = FIRST_COST
    weight: float = 0.0
    tokens: float = 0.0  # these are means
    seconds: float = 0.0
    variance: float = 0.0
    covariance: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """A step was measured."""
        self.weight = self.weight * _FORGET + 1
        share = 1 / self.weight
        more, longer = tokens - self.tokens, seconds - self.seconds
        self.tokens += share * more
        self.seconds += share * longer
        self.variance = (1 - share) * (self.variance + share * more * more)
        self.covariance = (1 - share) * (self.covariance + share * more * longer)

    @property
    def per_token(self) -> float:
        """Seconds that a token more takes; assumed where all steps had as many."""
        mean = self.seconds / max(1.0, self.tokens)
        if self.variance < 0.01:
            return self.first_cost * mean
        return min(max(self.covariance / self.variance, 0.01 * mean), mean)

    def of(self, tokens: float) -> float:
        """Seconds that a step of so many tokens takes."""
        at_least = 0.1 * self.seconds
        return max(at_least, self.seconds + (tokens - self.tokens) * self.per_token)


@dataclass(slots=True)
class Acceptance:
    """How often draft tokens of one class are accepted, given that those before them were."""

    assumed: float = _ASSUMED[0]
    tried: float = _ASSUMED[1]
    accepted: float = field(init=False)

    def __post_init__(self) -> None:
        self.accepted = self.assumed * self.tried

    def add(self, accepted: bool) -> None:
        """One was verified."""
        self.accepted = self.accepted * _FORGET_CLASS + accepted
        self.tried = self.tried * _FORGET_CLASS + 1

    def drift(self) -> None:
        """None was verified: what is assumed counts more."""
        weight = _ASSUMED[1]
        self.accepted += (1 - _RETURN) * (self.assumed * weight - self.accepted)
        self.tried += (1 - _RETURN) * (weight - self.tried)

    @property
    def rate(self) -> float:
        """Share that is accepted."""
        return self.accepted / self.tried


@dataclass(slots=True)
class _Speed:
    tokens: float = 0.0
    seconds: float = 0.0
    steps: int = 0

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens = self.tokens * _FORGET + tokens
        self.seconds = self.seconds * _FORGET + seconds
        self.steps += 1

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class _NextDraft:
    """Implements Worth.

    acceptance   finds what is known of a class
    per_token    seconds that a token more takes
    seconds      that the step takes with the draft tokens chosen until now
    expected     tokens that it gives on average
    likely       how likely the last draft token is right
    """

    acceptance: Callable[[str], Acceptance]
    per_token: float
    seconds: float
    expected: float
    likely: float = 1.0

    def may_be(self, name: str) -> bool:
        """See Worth."""
        rate = self.acceptance(name).rate
        return self.likely * rate * self.seconds > self.expected * self.per_token

    def __call__(self, name: str) -> bool:
        """See Worth."""
        known = self.acceptance(name)
        if not self.may_be(name):
            if self.likely == 1:
                known.drift()
            return False
        self.likely *= known.rate
        self.expected += self.likely
        self.seconds += self.per_token
        return True


@dataclass(slots=True)
class SpeculationGate:
    """Chooses how many draft tokens a step verifies, by measured times and measured acceptance.

    A draft token is worth it where the tokens that it adds on average, for each second that it
    adds, are more than the step gives for each second without it: then tokens per second rise.
    Where steps with drafts turn out slower by token than those without, there are none for a while.
    """

    times: StepTimes = field(default_factory=StepTimes)
    classes: dict[str, Acceptance] = field(default_factory=dict)
    _plain: _Speed = field(default_factory=_Speed)
    _drafting: _Speed = field(default_factory=_Speed)
    _pause: int = _PAUSE_STEPS
    _paused: int = 0  # steps that are left of it

    @property
    def is_open(self) -> bool:
        """Whether drafts are wanted at all: not during a pause, nor before a step was timed."""
        return not self._paused and self.times.weight > 1

    def worth(self, sequences: int, others: int) -> Worth:
        """What chooses the draft tokens for a sequence, one after the other.

        sequences   that get a token in the step
        others      draft tokens that it verifies already, of other sequences
        """
        seconds = self.times.of(sequences + others)
        return _NextDraft(self._class, self.times.per_token, seconds, float(sequences))

    def worth_beside(
        self, alternative: Draft, before: Sequence[Draft], sequences: int, others: int
    ) -> int:
        """How many tokens of another draft of a sequence are worth verifying; 0: none.

        before      what is verified for the sequence already, each beginning with another token
        sequences   that get a token in the step
        others      draft tokens that it verifies already

        They count where no first token of `before` is right, and cost one token more, since the
        sequence's last token is computed again.
        """
        per_token = self.times.per_token
        seconds = self.times.of(sequences + others)
        expected, likely = float(sequences), 1.0
        for draft in before:
            expected += self._accepted(draft, likely)
            likely *= 1 - self._class(draft.classes[0]).rate
        best, most = 0, 0.0
        for count in range(1, len(alternative.tokens) + 1):
            gain = self._accepted(alternative.begin(count), likely)
            surplus = gain * seconds - (count + 1) * per_token * expected
            if surplus > most:
                best, most = count, surplus
        if not best:
            self._class(alternative.classes[0]).drift()
        return best

    def _accepted(self, draft: Draft, likely: float) -> float:
        """Tokens of a draft that are accepted on average, where it counts so often."""
        tokens = 0.0
        for name in draft.classes:
            likely *= self._class(name).rate
            tokens += likely
        return tokens

    def verified(self, draft: Draft, accepted: int) -> None:
        """The first `accepted` tokens of a draft were right; it is not known of all behind them."""
        for number, name in enumerate(draft.classes[: accepted + 1]):
            self._class(name).add(number < accepted)

    def step_took(self, tokens: int, emitted: int, seconds: float, *, drafting: bool) -> None:
        """A step of `tokens` tokens, draft tokens included, gave `emitted` ones.

        drafting   whether time went into draft tokens, be it that they were verified or made
        """
        if self.times.weight > 1:
            seconds = min(seconds, _OUTLIER * self.times.of(tokens))
        self.times.add(tokens, seconds)
        (self._drafting if drafting else self._plain).add(emitted, seconds)
        self._paused = max(0, self._paused - 1)
        steps, share = self._drafting.steps, self._drafting.rate / (self._plain.rate or 1)
        is_clear = steps >= _CLEAR_LOSS[0] and share < _CLEAR_LOSS[1]
        if not self._plain.seconds or not (steps >= _TRIAL_STEPS or is_clear):
            return
        if share < 1:
            self._paused, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        else:
            self._pause = _PAUSE_STEPS
        self._drafting = _Speed()

    def _class(self, name: str) -> Acceptance:
        if name not in self.classes:
            self.classes[name] = Acceptance(_ASSUMED_OF.get(name, _ASSUMED[0]))
        return self.classes[name]
