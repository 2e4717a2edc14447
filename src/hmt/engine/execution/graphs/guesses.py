"""When the next step is begun before this one's logits are known, and how often that was right."""

from dataclasses import dataclass

from hmt.contracts.step import Segment, Step

_MOST_SKIPPED = 64  # steps without a guess, where guesses are wrong
# With experts on the CPU, a step that was begun in vain takes four times what one that came saves:
# of 30B-A3B in 8 GiB, 8.4 of 10.8 ms are the CPU's and the device's, 2.4 are Python's.
_LIKELY = 0.8
_LEARNED = 0.1  # of how often guesses come, from each step


@dataclass(slots=True)
class AsyncStepCounters:
    """Steps that were begun early, and those of them that came."""

    begun: int = 0
    right: int = 0


class NextStepGuesses:
    """Learns from each step whether it was the likeliest one.

    likeliest   runs and tokens of the step that may follow; (), [] where none is guessed
    counters    of steps that were begun on a guess
    """

    def __init__(self) -> None:
        """Guesses until some were wrong."""
        self.likeliest: tuple[tuple[Segment, ...], list[int]] = (), []
        self.counters = AsyncStepCounters()
        self._likely = 1.0  # how often it came lately
        self._skip = self._skipped = 0
        self._verifies = False  # whether any step had draft tokens

    def learn(self, step: Step) -> None:
        """`step` has come: was it the likeliest one?  None is guessed from now on."""
        runs, tokens = self.likeliest
        self.likeliest = (), []
        if len(step.token_ids) > len(step.segments):
            self._verifies = True
            self._likely -= _LEARNED * self._likely
        elif runs == step.segments:
            self._likely += _LEARNED * ((tokens == step.token_ids.tolist()) - self._likely)

    def ended(self, *, right: bool) -> None:
        """A step that was begun on a guess has come, or not."""
        self.counters.right += right
        self._skipped = 0 if right else min(_MOST_SKIPPED, 2 * self._skipped + 1)
        self._skip = self._skipped

    def is_worth_it(self, *, asks_cpu: bool) -> bool:
        """Whether to begin the next step now.  `asks_cpu`: its device asks the CPU for experts."""
        if self._skip:
            self._skip -= 1
            return False
        # A step that was begun before draft tokens came makes these wait for all of it, and what it
        # saves where none come is Python's part of a step.
        return not ((asks_cpu or self._verifies) and self._likely < _LIKELY)
