"""A client of an OpenAI endpoint that notes when text came, and never fails: it tells."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import httpx2

from hmt.base.errors import ConfigError, HMTError
from hmt.bench.load.outcome import OK, Outcome

_DETAIL = 300  # characters of a failure's text
_REFUSED = (400, 422)  # what endpoints say to parameters that they do not know
_HERE = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to ask, and how.

    url         with its version, as OpenAI's clients take it: http://127.0.0.1:8000/v1
    chat        as chats; else as completions, whose prompts have no template around them
    ignore_eos  whether answers can be asked to have their full length
    usage       whether a stream tells its tokens
    """

    url: str
    model: str
    key: str | None = None
    chat: bool = False
    timeout_s: float = 600.0
    ignore_eos: bool = True
    usage: bool = True

    @property
    def path(self) -> str:
        """Where answers are asked for."""
        return "chat/completions" if self.chat else "completions"

    def body(self, prompt: str, tokens: int, *, stream: bool) -> dict[str, Any]:
        """A request for a greedy answer of so many tokens."""
        body: dict[str, Any] = {"model": self.model, "max_tokens": tokens}
        body |= {"temperature": 0, "stream": stream}
        if self.chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if self.ignore_eos:
            body["ignore_eos"] = True
        if stream and self.usage:
            body["stream_options"] = {"include_usage": True}
        return body


class Client:
    """Asks an endpoint; `connect` makes one."""

    def __init__(self, endpoint: Endpoint, http: httpx2.AsyncClient) -> None:
        self.endpoint = endpoint
        self._http = http

    async def ask(self, prompt: str, tokens: int, due_s: float) -> Outcome:
        """A streamed answer; never raises for what the endpoint does or does not do.

        Where a connection ends before a byte of the answer came, another one is tried, once: the
        server may have closed it for being idle just when it was used again.
        """
        answer = _Answer(due_s, perf_counter())
        body = self.endpoint.body(prompt, tokens, stream=True)
        try:
            async with asyncio.timeout(self.endpoint.timeout_s):
                try:
                    await self._stream(body, answer)
                except httpx2.RemoteProtocolError:
                    if answer.begun:
                        raise
                    await self._stream(body, answer)
        except TimeoutError:
            answer.fail("timeout", f"no end after {self.endpoint.timeout_s:g} s")
        except httpx2.TransportError as error:
            status = "disconnected" if answer.begun else "unreachable"
            answer.fail(status, f"{type(error).__name__} {error}")
        return answer.outcome()

    async def count(self, prompt: str) -> int | None:
        """Tokens of a prompt as the endpoint counts them.  Raises HMTError where it refuses."""
        body = self.endpoint.body(prompt, 1, stream=False)
        response = await self._post(body)
        if response.status_code != 200:
            raise HMTError(
                f"{self.endpoint.url} refused a prompt of {len(prompt)} characters with status "
                f"{response.status_code}: {response.text[:_DETAIL]}"
            )
        usage = _object(response.text).get("usage") or {}
        return usage.get("prompt_tokens")

    async def settle(self, prompt: str) -> None:
        """Leave out of requests what the endpoint does not take.  Raises HMTError."""
        plain = replace(self.endpoint, ignore_eos=False, usage=False)
        ways = (self.endpoint, replace(plain, usage=True), replace(plain, ignore_eos=True), plain)
        for way in ways:
            self.endpoint = way
            outcome = await self.ask(prompt, 2, perf_counter())
            if outcome.status not in map(str, _REFUSED):
                break
        if outcome.status != OK:
            raise HMTError(
                f"{self.endpoint.url} does not answer: {outcome.status} {outcome.detail}".rstrip()
            )

    async def _stream(self, body: dict[str, Any], answer: "_Answer") -> None:
        async with self._http.stream("POST", self.endpoint.path, json=body) as response:
            answer.begun = True
            if response.status_code != 200:
                text = (await response.aread()).decode("utf-8", "replace")
                answer.fail(str(response.status_code), text)
                return
            async for event in httpx2.EventSource(response):
                if event.data == "[DONE]":
                    answer.complete = True
                elif event.data:
                    answer.take(_object(event.data), perf_counter())
        if not answer.complete:
            answer.fail("disconnected", "the stream ended in the middle of the answer")

    async def _post(self, body: dict[str, Any]) -> httpx2.Response:
        try:
            async with asyncio.timeout(self.endpoint.timeout_s):
                try:
                    return await self._http.post(self.endpoint.path, json=body)
                except httpx2.RemoteProtocolError:  # see `ask`
                    return await self._http.post(self.endpoint.path, json=body)
        except (TimeoutError, httpx2.TransportError) as error:
            raise HMTError(
                f"{self.endpoint.url} does not answer: {type(error).__name__} {error}"
            ) from error


@asynccontextmanager
async def connect(endpoint: Endpoint) -> AsyncIterator[Client]:
    """A client with as many connections as there are requests under way."""
    headers = {"Accept-Encoding": "identity"}
    if endpoint.key is not None:
        headers["Authorization"] = f"Bearer {endpoint.key}"
    async with httpx2.AsyncClient(
        base_url=endpoint.url,
        headers=headers,
        timeout=None,  # asyncio's counts for the whole
        # Servers close what is idle, llama.cpp's after 5 s: whoever asks just then is not answered.
        limits=httpx2.Limits(
            max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0
        ),
        trust_env=urlsplit(endpoint.url).hostname not in _HERE,  # no proxy to this machine
    ) as http:
        yield Client(endpoint, http)


def versioned(url: str) -> str:
    """The address with /v1 where it has no path.  Raises ConfigError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url {url}: give an address such as http://127.0.0.1:8000/v1")
    return url.rstrip("/") + ("" if parts.path.strip("/") else "/v1")


def first_model(url: str, key: str | None) -> str:
    """The name of the first model that the endpoint has.  Raises HMTError."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    here = urlsplit(url).hostname in _HERE
    try:
        response = httpx2.get(f"{url}/models", headers=headers, timeout=30, trust_env=not here)
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx2.HTTPError, ValueError, LookupError, TypeError) as error:
        raise HMTError(
            f"{url}/models does not say which models there are ({type(error).__name__} {error}): "
            "name one with --model"
        ) from error


class _Answer:
    """An answer as it comes."""

    def __init__(self, due_s: float, sent_s: float) -> None:
        self.due_s, self.sent_s = due_s, sent_s
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.status, self.detail = OK, ""
        self.begun = self.complete = False
        self.prompt_tokens: int | None = None
        self.tokens: int | None = None
        self.parts = 0

    def take(self, event: dict[str, Any], now: float) -> None:
        """An event that came at `now`."""
        if event.get("error"):
            self.fail("error", json.dumps(event["error"]))
        if usage := event.get("usage"):
            self.prompt_tokens = usage.get("prompt_tokens")
            self.tokens = usage.get("completion_tokens")
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            # A completion's token is one without text, too: half of a character, a control token.
            token = "text" in choice and choice.get("finish_reason") is None
            if (
                token
                or choice.get("text")
                or delta.get("content")
                or delta.get("reasoning_content")
            ):
                self.parts += 1
                self.first_s = now if self.first_s is None else self.first_s
                self.last_s = now
            if choice.get("finish_reason"):
                self.complete = True  # some endpoints say no [DONE]

    def fail(self, status: str, detail: str) -> None:
        """The first failure counts."""
        if self.status == OK:
            self.status, self.detail = status, " ".join(detail.split())[:_DETAIL]

    def outcome(self) -> Outcome:
        """What became of it, now that it has ended."""
        tokens = self.parts if self.tokens is None else self.tokens
        return Outcome(
            self.due_s, self.sent_s, self.first_s, self.last_s, perf_counter(), self.status,
            self.detail, self.prompt_tokens, tokens,
        )  # fmt: skip


def _object(text: str) -> dict[str, Any]:
    """JSON that should be an object; what is none counts as an error of the endpoint."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"error": f"no JSON object: {text[:_DETAIL]}"}
