"""What guesses of next tokens gave, and what they cost."""

from dataclasses import dataclass, field, replace


@dataclass(slots=True)
class SpeculationAccount:
    """What guesses were made, and what became of them.

    steps        that verified guesses
    tokens       that these steps gave
    proposed     guesses that were verified
    accepted     of them, those that were right
    by_depth     [(verified, accepted)] of first guesses, second ones, ...
    saved_s      time that steps without guesses would have taken for the same tokens, less what
                 was taken
    """

    steps: int = 0
    tokens: int = 0
    proposed: int = 0
    accepted: int = 0
    by_depth: list[tuple[int, int]] = field(default_factory=list)
    saved_s: float = 0.0

    def add(self, proposed: int, accepted: int) -> None:
        """Count one draft."""
        self.proposed += proposed
        self.accepted += accepted
        self.by_depth += [(0, 0)] * (proposed - len(self.by_depth))
        for depth in range(min(proposed, accepted + 1)):
            verified, right = self.by_depth[depth]
            self.by_depth[depth] = verified + 1, right + (depth < accepted)

    def copy(self) -> "SpeculationAccount":
        """As it is now."""
        return replace(self, by_depth=list(self.by_depth))

    @property
    def acceptance(self) -> float | None:
        """Share of the verified guesses that were right; None without any."""
        return self.accepted / self.proposed if self.proposed else None
