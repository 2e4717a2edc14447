"""What became of each request, and what many of them say together."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

OK = "ok"
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request; moments are seconds on one clock.

    due_s           when it should have been sent: waiting for that counts
    sent_s          when it was
    first_s         when the first text came; None without any
    last_s          when the last text came
    ended_s         when the answer was complete, or failed
    status          "ok"; else the HTTP status that refused it, or "timeout", "unreachable",
                    "disconnected" (the stream broke off) or "error" (an event said so)
    detail          what the endpoint said about a failure
    prompt_tokens   as the endpoint counted them; None where it does not
    tokens          of the answer, as the endpoint counted them, else the events with text
    """

    due_s: float
    sent_s: float
    first_s: float | None
    last_s: float | None
    ended_s: float
    status: str
    detail: str = ""
    prompt_tokens: int | None = None
    tokens: int = 0

    @property
    def ttft_s(self) -> float | None:
        """Time to the first text."""
        return None if self.first_s is None else self.first_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Time per token after the first; None of an answer without a second."""
        if self.first_s is None or self.last_s is None or self.tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.tokens - 1)

    @property
    def e2e_s(self) -> float:
        """Time to the end of the answer."""
        return self.ended_s - self.due_s


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """P50, P90 and P99, with straight lines between neighbours; None of nothing."""
    if not values:
        return None
    found = np.percentile(values, PERCENTILES)
    return {f"p{p}": float(value) for p, value in zip(PERCENTILES, found, strict=True)}


def summarise(outcomes: Sequence[Outcome], asked_tokens: int) -> dict[str, Any]:
    """Times and rates of the requests that succeeded, and how many failed, by status.

    Rates count from the moment that the first request was due until the last had ended.
    `asked_tokens` is the length that answers should have.  Needs one outcome at least.
    """
    good = [one for one in outcomes if one.status == OK]
    failed = [one for one in outcomes if one.status != OK]
    wall_s = max(one.ended_s for one in outcomes) - min(one.due_s for one in outcomes)
    tokens = sum(one.tokens for one in good)
    prompts = [one.prompt_tokens for one in good if one.prompt_tokens is not None]
    return {
        "requests": len(outcomes),
        "succeeded": len(good),
        "failures": dict(sorted(Counter(one.status for one in failed).items())),
        "first_failure": failed[0].detail if failed else None,
        "wall_s": wall_s,
        "requests_per_s": len(good) / wall_s,
        "tokens_per_s": tokens / wall_s,
        "tokens": tokens,
        "short_answers": sum(one.tokens < asked_tokens for one in good),
        "mean_prompt_tokens": float(np.mean(prompts)) if prompts else None,
        "ttft_s": percentiles([one.ttft_s for one in good if one.ttft_s is not None]),
        "tpot_s": percentiles([one.tpot_s for one in good if one.tpot_s is not None]),
        "e2e_s": percentiles([one.e2e_s for one in good]),
        "latest_sending_s": max(one.sent_s - one.due_s for one in outcomes),
    }
