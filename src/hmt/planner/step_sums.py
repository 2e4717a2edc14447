"""What a step has added up, so that layers that are alike are added up once."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepSums:
    """What a step has added up: seconds, and seconds or bytes by name."""

    times: tuple[float, ...]
    parts: tuple[dict[str, float], ...]

    def until(self, later: "StepSums") -> "StepSums":
        """What has been added since."""
        times = tuple(b - a for a, b in zip(self.times, later.times, strict=True))
        parts = [
            {
                name: more
                for name, amount in after.items()
                if (more := amount - before.get(name, 0.0))
            }
            for before, after in zip(self.parts, later.parts, strict=True)
        ]
        return StepSums(times, tuple(parts))
