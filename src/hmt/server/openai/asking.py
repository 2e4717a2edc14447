"""From a request in OpenAI's words to one for the engine."""

from fastapi import Request

from hmt.server.openai.schemas import Choosing
from hmt.server.service import LATER, Asked


def asked(
    request: Request, body: Choosing, *, longest: int | None, logprobs: int | None, answers: int
) -> Asked:
    """What `body` wants of the engine."""
    return Asked(
        owner=request.state.owner,
        sampling=body.sampling(logprobs),
        longest=longest,
        answers=answers,
        counted="n" if answers == body.choices else "best_of",
        stops=body.stops,
        ignore_eos=bool(body.ignore_eos),
        priority=LATER if body.service_tier == "flex" else 0,
        timeout_s=body.timeout,
        grammar=body.grammar,
        formed="response_format" if body.structured_outputs is None else "structured_outputs",
        cache_salt=body.cache_salt or "",
    )
