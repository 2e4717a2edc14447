"""From a request in OpenAI's words to one for the engine."""

from dataclasses import dataclass
from typing import Any

from fastapi import Request

from hmt.server.generation import Generation
from hmt.server.openai.response import usage
from hmt.server.openai.sampling import Sampler
from hmt.server.openai.schemas import SamplingFields
from hmt.server.service import LATER, ApiRequest


def api_request(
    request: Request,
    body: Sampler,
    *,
    longest: int | None,
    logprobs: int | None,
    answers: int,
) -> ApiRequest:
    """What `body` wants of the engine."""
    return ApiRequest(
        owner=request.state.owner,
        sampling=body.sampling(logprobs),
        max_new_tokens=longest,
        answers=answers,
        counted="n" if answers == body.choices else "best_of",
        stop=body.stops,
        ignore_eos=bool(body.ignore_eos),
        min_tokens=body.min_tokens or 0,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        priority=LATER if body.service_tier == "flex" else 0,
        timeout_s=body.timeout,
        grammar=body.grammar,
        formed=body.formed,
        cache_salt=body.cache_salt or "",
    )


@dataclass(frozen=True, slots=True)
class Counting:
    """What a stream says of tokens: in a last event, and in every one before it."""

    last: bool
    always: bool

    @classmethod
    def of(cls, body: SamplingFields) -> "Counting":
        """As `body` wants it."""
        return cls(body.wants_usage, body.counts_always)

    def beside(self, generation: Generation) -> dict[str, Any]:
        """What an event has beside its choices."""
        if self.always:
            return {"usage": usage(generation)}
        return {"usage": None} if self.last else {}
