"""What a step has added up, so that layers that are alike are added up once."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepSums:
    """What a step has added up: seconds or bytes, and the same by name."""

    sums: tuple[float, ...]
    parts: tuple[dict[str, float], ...]

    def until(self, later: "StepSums") -> "StepSums":
        """What has been added since."""
        sums = tuple(b - a for a, b in zip(self.sums, later.sums, strict=True))
        parts = [
            {
                name: more
                for name, amount in after.items()
                if (more := amount - before.get(name, 0.0))
            }
            for before, after in zip(self.parts, later.parts, strict=True)
        ]
        return StepSums(sums, tuple(parts))
