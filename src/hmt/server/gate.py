"""How many answers may be under way: those beyond are refused at once, with a time to come back."""

import math
from dataclasses import dataclass

from hmt.server.errors import ApiError

_WEIGHT = 0.2  # of the latest answer in the mean of how long answers take


@dataclass(slots=True)
class Gate:
    """Counts answers, on the event loop, so that nobody waits to hear that there is no room.

    running    answers that the engine computes at once
    waiting    that may wait besides
    """

    running: int
    waiting: int
    inside: int = 0
    mean_s: float = 1.0  # that an answer takes

    def enter(self, answers: int) -> None:
        """Let so many in.  Raises ApiError 429 where there is no room for all of them."""
        most = self.running + self.waiting
        if answers > most:
            raise ApiError(
                400,
                f"{answers} answers were asked for at once; this server has room for {most}",
                param="n",
                code="too_many_answers",
            )
        if self.inside + answers > most:
            seconds = self.retry_after_s
            raise ApiError(
                429,
                f"the server is busy with {self.inside} answers and takes {most}: try again in "
                f"{seconds} s",
                kind="rate_limit_error",
                code="overloaded",
                headers={"Retry-After": str(seconds)},
            )
        self.inside += answers

    def leave(self, answers: int, seconds: float | None = None) -> None:
        """Let so many out, that took so long; None for those that did not end by themselves."""
        self.inside -= answers
        if seconds is not None:
            self.mean_s += _WEIGHT * (seconds - self.mean_s)

    @property
    def retry_after_s(self) -> int:
        """When a place will be free, as far as is known."""
        return min(60, max(1, math.ceil(self.mean_s / self.running)))
