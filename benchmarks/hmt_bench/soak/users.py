"""Users of every kind: those who want an answer, and those who do a server harm."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import httpx2

from hmt_bench.soak import raw_http
from hmt_bench.soak.reference_answers import Question

_PATH: Final = "/v1/completions"
_BUSY: Final = ("overloaded", "unavailable", "model_not_loaded")  # it may be asked again later
_MALFORMED: Final = (
    b"", b"{", b"[]", b"\xff\xfe", b'{"model": 3}', b'{"model": "m", "prompt": "a", "n": -1}',
    b'{"prompt": null}', b"[" * 5000, b'{"model": "m", "prompt": "a", "temprature": 1}',
)  # fmt: skip


@dataclass(slots=True)
class Notes:
    """What became of everything, by kind of user.

    wrong   what should not have been, in words; the first ones
    """

    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    wrongs: int = 0
    compared: int = 0

    def add(self, kind: str, outcome: str) -> None:
        """One more."""
        self.outcomes.setdefault(kind, Counter())[outcome] += 1

    def complain(self, kind: str, text: str) -> None:
        """Something was wrong."""
        self.wrongs += 1
        if len(self.wrong) < 20:
            self.wrong.append(f"{kind}: {text[:400]}")

    def compare(self, kind: str, found: str, wanted: str) -> None:
        """An answer, beside the oracle's."""
        self.compared += 1
        if found != wanted:
            self.complain(kind, f"answered {found!r} instead of {wanted!r}")


class SoakUsers:
    """All kinds of them, drawn by weight; each leaves nothing behind."""

    def __init__(
        self, url: str, model: str, questions: list[Question], longest: int, notes: Notes
    ) -> None:
        """`longest`: tokens of the server's context."""
        self._url, self._model, self._questions = url, model, questions
        self._longest = longest
        self._notes = notes
        self._http = raw_http.client(url)
        self._kinds: list[tuple[int, Callable[[random.Random], Awaitable[None]]]] = [
            (8, self.asks), (6, self.streams), (4, self.cancels), (3, self.disconnects),
            (2, self.asks_too_much), (3, self.malforms), (2, self.reads_slowly),
            (1, self.has_no_time), (1, self.wants_scores), (1, self.wants_several),
        ]  # fmt: skip

    async def close(self) -> None:
        """Let go of all connections."""
        await self._http.aclose()

    async def visit(self, draw: random.Random) -> None:
        """One request of some kind."""
        weights = [weight for weight, _ in self._kinds]
        (_, kind) = draw.choices(self._kinds, weights)[0]
        try:
            await kind(draw)
        except (httpx2.TransportError, OSError, asyncio.IncompleteReadError) as error:
            self._notes.add(kind.__name__, "connection failed")
            self._notes.complain(kind.__name__, repr(error))

    def body(self, question: Question, **fields: Any) -> dict[str, Any]:
        """A request for a greedy answer."""
        asked = {"prompt": question.prompt, "max_tokens": question.tokens, "temperature": 0}
        return {"model": self._model} | asked | fields

    async def asks(self, draw: random.Random) -> None:
        """The whole answer at once."""
        question = draw.choice(self._questions)
        await self._compared("asks", self.body(question), question.text)

    async def wants_several(self, draw: random.Random) -> None:
        """Two prompts, three answers to each."""
        one, other = draw.sample(self._questions, 2)
        tokens = min(one.tokens, other.tokens)
        body = self.body(one, prompt=[one.prompt, other.prompt], n=3, max_tokens=tokens)
        told = await self._post("wants_several", body)
        if told is not None:
            for choice, question in zip(told["choices"], [one] * 3 + [other] * 3, strict=True):
                if question.tokens == tokens:
                    self._notes.compare("wants_several", choice["text"], question.text)

    async def wants_scores(self, draw: random.Random) -> None:
        """Log-probabilities of the prompt."""
        question = draw.choice(self._questions)
        body = self.body(question, echo=True, logprobs=1)
        await self._compared("wants_scores", body, question.prompt + question.text)

    async def has_no_time(self, draw: random.Random) -> None:
        """A deadline that an answer may meet, or not."""
        question = draw.choice(self._questions)
        body = self.body(question, timeout=draw.choice((0.01, 0.05, 0.3)))
        await self._compared("has_no_time", body, question.text, (504,))

    async def asks_too_much(self, draw: random.Random) -> None:
        """A prompt that is longer than the context, or an answer."""
        question = draw.choice(self._questions)
        body = draw.choice(
            [
                self.body(question, prompt="word " * (2 * self._longest)),
                self.body(question, max_tokens=self._longest),
                self.body(question, prompt=[1] * self._longest),
            ]
        )
        await self._refused("asks_too_much", body, "context_length_exceeded")

    async def malforms(self, draw: random.Random) -> None:
        """What is no request."""
        await self._refused("malforms", draw.choice(_MALFORMED), None)

    async def streams(self, draw: random.Random) -> None:
        """An answer as it comes."""
        question = draw.choice(self._questions)
        await self._by_hand("streams", question, self.body(question, stream=True))

    async def reads_slowly(self, draw: random.Random) -> None:
        """A stream whose reader takes a few bytes now and then."""
        question = draw.choice(self._questions)
        body = self.body(question, stream=True, logprobs=5)
        await self._by_hand("reads_slowly", question, body, draw.uniform(0.01, 0.1))

    async def cancels(self, draw: random.Random) -> None:
        """A client that goes in the middle of a stream."""
        question = draw.choice(self._questions)
        body = self.body(
            question, stream=True, ignore_eos=True, max_tokens=200, n=draw.choice((1, 3))
        )
        reader, writer = await raw_http.connect(self._url)
        try:
            writer.write(raw_http.request(_PATH, body))
            for _ in range(draw.randrange(8)):
                if not await asyncio.wait_for(reader.readline(), 60):
                    break
            await asyncio.sleep(draw.random() * 0.05)
        finally:
            await raw_http.close(writer, abort=draw.random() < 0.5)
        self._notes.add("cancels", "gone")

    async def disconnects(self, draw: random.Random) -> None:
        """A client that goes before there is an answer: half a request, or one that waits."""
        question = draw.choice(self._questions)
        whole = raw_http.request(_PATH, self.body(question, max_tokens=100, ignore_eos=True))
        sent = whole if draw.random() < 0.5 else whole[: draw.randrange(1, len(whole))]
        _, writer = await raw_http.connect(self._url)
        try:
            writer.write(sent)
            await asyncio.sleep(draw.random() * 0.05)
        finally:
            await raw_http.close(writer, abort=draw.random() < 0.5)
        self._notes.add("disconnects", "gone")

    async def _post(self, kind: str, body: Any, allowed: tuple[int, ...] = ()) -> Any:
        """The body of an answer; None where there is none."""
        response = await self._http.post(_PATH, json=body)
        self._notes.add(kind, str(response.status_code))
        if response.status_code == 200:
            return response.json()
        if response.status_code not in allowed and not _is_busy(response.content):
            self._notes.complain(kind, f"{response.status_code} {response.text}")
        return None

    async def _compared(
        self, kind: str, body: Any, wanted: str, allowed: tuple[int, ...] = ()
    ) -> None:
        told = await self._post(kind, body, allowed)
        if told is not None:
            self._notes.compare(kind, told["choices"][0]["text"], wanted)

    async def _refused(self, kind: str, body: Any, code: str | None) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        response = await self._http.post(_PATH, content=content, headers=headers)
        self._notes.add(kind, str(response.status_code))
        if _is_busy(response.content):
            return
        told = response.json().get("error", {})
        if (
            response.status_code != 400
            or not told.get("message")
            or code not in (None, told["code"])
        ):
            self._notes.complain(kind, f"{response.status_code} {response.text}")

    async def _by_hand(
        self, kind: str, question: Question, body: Any, pause_s: float | None = None
    ) -> None:
        reader, writer = await raw_http.connect(self._url, limit=1024 if pause_s else 65536)
        received = bytearray()
        try:
            writer.write(raw_http.request(_PATH, body))
            async with asyncio.timeout(120):
                while part := await reader.read(500 if pause_s else 65536):
                    received += part
                    if pause_s is not None:
                        await asyncio.sleep(pause_s)
        finally:
            with suppress(OSError):
                await raw_http.close(writer)
        status, events = raw_http.body_of(bytes(received))
        self._notes.add(kind, str(status))
        if status == 200 and b'"error"' not in events:
            text, whole = raw_http.text_of(events)
            self._notes.compare(kind, text if whole else f"{text} (cut off)", question.text)
        elif status == 200:  # the model went while it answered
            self._notes.add(kind, "error in the stream")
            if b'"unavailable"' not in events:
                self._notes.complain(kind, events[-300:].decode("utf-8", "replace"))
        elif not _is_busy(events):
            self._notes.complain(kind, f"{status} {events[:300]!r}")


def _is_busy(body: bytes) -> bool:
    """Whether an answer was refused because the server is full, or the model is exchanged."""
    try:
        return json.loads(body)["error"]["code"] in _BUSY
    except (ValueError, LookupError, TypeError):
        return False
