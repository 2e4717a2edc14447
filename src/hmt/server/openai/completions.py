"""POST /v1/completions: text goes on as it is, without a chat template."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from hmt.base.errors import HMTError
from hmt.contracts.request import TokenEvent, TokenLogprob
from hmt.server.errors import as_api_error
from hmt.server.generation import Generation
from hmt.server.openai.request import Counting, api_request
from hmt.server.openai.response import GatheredAnswers, Heading, gather, rendered, token_text, usage
from hmt.server.openai.schemas import CompletionBody
from hmt.server.service import service_of
from hmt.server.stream import EventStream, unless_gone
from hmt.text import Tokenizer

router = APIRouter()

_DEFAULT_NEW_TOKENS: Final = 16  # as OpenAI
_LISTS: Final = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@router.post("/v1/completions")
async def completions(body: CompletionBody, request: Request) -> Response:
    """Continue texts."""
    service = service_of(request, body.model)
    tokenizer, given = service.model.tokenizer, body.prompts
    longest = _DEFAULT_NEW_TOKENS if body.max_tokens is None else body.max_tokens
    # Answers without a token are all alike.
    tried = body.best_of or body.choices if longest else 1
    # Which are best is told by their log-probabilities, wanted or not.
    logprobs = 0 if body.logprobs is None and tried > body.choices else body.logprobs
    wanted = api_request(request, body, longest=longest, logprobs=logprobs, answers=tried)
    if body.echo and (body.logprobs is not None or not longest):
        wanted = replace(wanted, prompt_logprobs=body.logprobs or 0)

    if body.suffix:
        try:
            ends = tokenizer.infill.ends
        except HMTError as error:
            raise as_api_error(error, "suffix") from error
        wanted = replace(wanted, stop_token_ids=(*wanted.stop_token_ids, *ends))
    encoded: list[list[int]] = []

    def prompts() -> list[list[int]]:
        most = service.max_positions
        encoded.extend(_ids(tokenizer, prompt, body.suffix, most) for prompt in given)
        return encoded

    generation = await service.begin(wanted, prompts, len(given), "prompt")
    heading = Heading("text_completion", service.name, "cmpl")
    teller = _Teller(tokenizer, given, encoded, tried, bool(body.echo), body.logprobs is not None)
    if body.stream:
        copies = 0 if longest else body.choices
        counting = Counting.of(body)
        return EventStream(generation, _chunks(generation, heading, teller, copies, counting))
    async with generation:
        answers = await unless_gone(request.receive, gather(generation))

        def choices() -> Iterator[dict[str, Any]]:
            index = itertools.count()
            for number in range(len(given)):
                mine = list(range(number * tried, (number + 1) * tried))
                if tried > body.choices:
                    mine.sort(key=lambda one: answers[one].mean_logprob, reverse=True)
                for one in (mine * body.choices)[: body.choices]:
                    yield teller.whole(next(index), generation, one, answers[one])

        return await rendered(heading, choices(), usage(generation))


def _ids(tokenizer: Tokenizer, prompt: str | list[int], suffix: str | None, most: int) -> list[int]:
    """A prompt's tokens; with a suffix those that ask for what stands between."""
    if not isinstance(prompt, str):
        return prompt
    if suffix:
        return tokenizer.infill_prompt(prompt, suffix, most=most)
    return tokenizer.encode(prompt, most=most)


@dataclass(slots=True)
class _Teller:
    """Tells answers, and before them their prompts where these are echoed.

    each     answers to a prompt
    scored   whether log-probabilities are told
    """

    tokenizer: Tokenizer
    prompts: list[str | list[int]]
    encoded: list[list[int]]
    each: int
    echo: bool
    scored: bool

    def whole(
        self, index: int, generation: Generation, number: int, answer: GatheredAnswers
    ) -> dict[str, Any]:
        """An answer that has ended, as choice `index`."""
        echo, before = self.prompt(generation, number)
        after = _logprobs(answer.events, self.tokenizer, len(echo)) if self.scored else None
        parts = [part for part in (before, after) if part is not None]
        logprobs = {name: [one for part in parts for one in part[name]] for name in _LISTS}
        reason = generation.choices[number].finish_reason
        return _part(
            index,
            echo + answer.text,
            logprobs if parts else None,
            None if reason is None else reason.value,
        )

    def prompt(self, generation: Generation, number: int) -> tuple[str, dict[str, Any] | None]:
        """What comes before answer `number`, once its prompt has been computed."""
        if not self.echo:
            return "", None
        given = self.prompts[number // self.each]
        text = given if isinstance(given, str) else self.tokenizer.decode(given)
        if not self.scored:
            return text, None
        ids = self.encoded[number // self.each]
        scores = generation.choices[number - number % self.each].prompt.logprobs
        return text, _echoed(ids, scores, self.tokenizer)


async def _chunks(
    generation: Generation, heading: Heading, teller: _Teller, copies: int, counting: Counting
) -> AsyncIterator[dict[str, Any]]:
    """A stream.  Answers without a token are told as so many `copies`; 0: all have some."""
    numbers = range(len(generation.choices))
    offsets: dict[int, int] = {}  # of answers that have begun

    async def begin(number: int) -> list[dict[str, Any]]:
        text, logprobs = await asyncio.to_thread(teller.prompt, generation, number)
        offsets[number] = len(text)
        return [_part(number, text, logprobs)] if text else []

    if not (teller.scored or copies):
        for number in numbers:
            for part in await begin(number):
                yield heading.of([part], **counting.beside(generation))
    async for number, event in generation.events():
        if number not in offsets:
            for part in await begin(number):
                yield heading.of([part], **counting.beside(generation))
        logprobs = _logprobs([event], teller.tokenizer, offsets[number])
        offsets[number] += len(event.text)
        if event.text or event.finish_reason is not None or logprobs:
            reason = event.finish_reason
            part = _part(number, event.text, logprobs, None if reason is None else reason.value)
            yield heading.of([part], **counting.beside(generation))
    for number in numbers:
        parts = [*await begin(number), _part(number, "", None, "length")] if copies else []
        for part in parts:
            for copy in range(copies):
                yield heading.of(
                    [part | {"index": number * copies + copy}], **counting.beside(generation)
                )
    if counting.last:
        yield heading.of([], usage=usage(generation))


def _part(
    number: int,
    text: str,
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _echoed(
    ids: list[int], scores: tuple[TokenLogprob, ...], tokenizer: Tokenizer
) -> dict[str, Any]:
    """A prompt's lists; its first token follows nothing and has no log-probability."""
    stream, offset, offsets = tokenizer.stream(), 0, []
    for token in ids:
        offsets.append(offset)
        offset += len(stream.push(token))
    return {
        "tokens": [token_text(tokenizer, token) for token in ids],
        "token_logprobs": [None, *(one.logprob for one in scores)],
        "top_logprobs": [None, *(_top(one, tokenizer) for one in scores)],
        "text_offset": offsets,
    }


def _logprobs(
    events: list[TokenEvent], tokenizer: Tokenizer, offset: int = 0
) -> dict[str, Any] | None:
    """Lists by token; text_offset counts characters of the answer."""
    if not events or events[0].logprob is None:
        return None
    # With the token that ended the answer, as with OpenAI and vLLM: lm-eval-harness counts on it.
    tokens = [event.logprob for event in events if event.logprob is not None]
    offsets = []
    for event in events:
        offsets.append(offset)
        offset += len(event.text)
    return {
        "tokens": [token_text(tokenizer, one.token_id) for one in tokens],
        "token_logprobs": [one.logprob for one in tokens],
        "top_logprobs": [_top(one, tokenizer) for one in tokens],
        "text_offset": offsets,
    }


def _top(one: TokenLogprob, tokenizer: Tokenizer) -> dict[str, float]:
    """The likeliest in a token's place; of tokens that are written alike the likeliest."""
    return {token_text(tokenizer, token): value for token, value in reversed(one.top)}
