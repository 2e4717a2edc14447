"""What draft tokens gave, and what they cost."""

from dataclasses import dataclass, field, replace
from itertools import zip_longest


@dataclass(slots=True)
class SpeculationAccount:
    """Which draft tokens were verified, and what became of them.

    steps        that verified draft tokens
    tokens       that these steps gave
    proposed     draft tokens that were verified
    accepted     of them, those that were right
    by_depth     [(verified, accepted)] of first draft tokens, second ones, ...
    saved_s      time that steps without drafts would have taken for the same tokens, less what was
                 taken
    failures     proposers that failed, and were not asked again
    """

    steps: int = 0
    tokens: int = 0
    proposed: int = 0
    accepted: int = 0
    by_depth: list[tuple[int, int]] = field(default_factory=list)
    saved_s: float = 0.0
    failures: int = 0

    def add(self, proposed: int, accepted: int) -> None:
        """Count one draft."""
        self.proposed += proposed
        self.accepted += accepted
        self.by_depth += [(0, 0)] * (proposed - len(self.by_depth))
        for depth in range(min(proposed, accepted + 1)):
            verified, right = self.by_depth[depth]
            self.by_depth[depth] = verified + 1, right + (depth < accepted)

    def merge(self, other: "SpeculationAccount") -> None:
        """Add what another one counts."""
        self.steps += other.steps
        self.tokens += other.tokens
        self.proposed += other.proposed
        self.accepted += other.accepted
        self.saved_s += other.saved_s
        self.failures += other.failures
        pairs = zip_longest(self.by_depth, other.by_depth, fillvalue=(0, 0))
        self.by_depth = [(a + c, b + d) for (a, b), (c, d) in pairs]

    def copy(self) -> "SpeculationAccount":
        """As it is now."""
        return replace(self, by_depth=list(self.by_depth))
