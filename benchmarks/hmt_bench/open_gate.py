"""A gate that lets all draft tokens pass: to check that none of them changes an answer."""

from collections.abc import Sequence

from typing_extensions import override

from hmt.engine.speculation.draft import Draft, Worth
from hmt.engine.speculation.gate import SpeculationGate


class UpTo:
    """Implements Worth: so many draft tokens, whatever their classes."""

    def __init__(self, most: int = 1 << 30) -> None:
        self._left = most

    def __call__(self, name: str) -> bool:
        """See Worth."""
        self._left -= 1
        return self._left >= 0

    def may_be(self, name: str) -> bool:
        """See Worth."""
        return self._left > 0


class OpenGate(SpeculationGate):
    """Lets all draft tokens pass, whatever they cost."""

    @property
    @override
    def is_open(self) -> bool:
        return True

    @override
    def worth(self, sequences: int, others: int) -> Worth:
        return UpTo()

    @override
    def worth_beside(
        self, alternative: Draft, before: Sequence[Draft], sequences: int, others: int
    ) -> int:
        return len(alternative.tokens)
