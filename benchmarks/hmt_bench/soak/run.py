"""The soak: users of every kind for so long, rests between them, a shutdown in the middle of it."""

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import httpx2

from hmt.base.errors import ConfigError
from hmt.base.units import parse_bytes
from hmt.bench.environment import describe
from hmt.bench.load.own_server import OwnServer, own_server
from hmt.hardware.machine import machine_for
from hmt_bench.soak import raw_http
from hmt_bench.soak.idle_check import IdleState, idle_state, judge_growth
from hmt_bench.soak.reference_answers import Question, questions
from hmt_bench.soak.users import Notes, SoakUsers

_SECOND: Final = "second"
_LAST_USERS: Final = 6  # who wait for an answer when the server is told to end
_LAST_TOKENS: Final = 100


@dataclass(frozen=True, slots=True)
class Plan:
    """How long, with how many users at once, and in how many parts with a rest after each.

    host_memory   of the server, in which two models take turns
    prefix_cache  whether prompts go on from what earlier ones left
    """

    seconds: float = 1800.0
    users: int = 12
    parts: int = 12
    questions: int = 24
    context: int = 2048
    host_memory: str = "96MiB"
    prefix_cache: bool = False
    seed: int = 0

    def check(self) -> None:
        """Raise ConfigError for what makes no sense."""
        if self.seconds <= 0 or self.users < 1 or self.parts < 2 or self.questions < 2:
            raise ConfigError("a soak needs time, a user, two parts and two questions at least")


def run(
    plan: Plan, model: Path, text: str, progress: Callable[[str], None] = lambda said: None
) -> dict[str, Any]:
    """Soak a server of our own.  What was seen, and the verdict.

    Raises ConfigError, and HMTError where the server does not start or stops answering.
    """
    plan.check()
    options = {"dtype": "float32", "context": plan.context, "host_memory": plan.host_memory}
    progress("asking the plain executor")
    known = questions(model, text, plan.questions, plan.seed, options)
    serve = [arg for name, value in options.items() for arg in (_flag(name), str(value))]
    with tempfile.TemporaryDirectory(prefix="hmt-soak-") as folder:
        second = Path(folder) / _SECOND
        second.symlink_to(model.absolute())
        half = parse_bytes(plan.host_memory) // 2
        serve += ["--extra-model", str(second), "--first-memory", str(half), "--max-batch", "8"]
        serve += ["--prefix-cache"] * plan.prefix_cache
        serve += ["--max-waiting", str(2 * plan.users), "--threads", "1"]
        with own_server(model, serve) as server:
            found = asyncio.run(_Soak(plan, server, model.name, known, half, progress).run())
    return {
        "plan": asdict(plan),
        "model": model.name,
        "machine": describe(machine_for(model)),
        **found,
    }


class _Soak:
    def __init__(
        self,
        plan: Plan,
        server: OwnServer,
        model: str,
        known: list[Question],
        half: int,
        progress: Callable[[str], None],
    ) -> None:
        self._plan, self._server, self._model = plan, server, model
        self._known, self._half, self._progress = known, half, progress
        self._url = server.url.removesuffix("/v1")
        self._notes = Notes()
        self._draw = random.Random(plan.seed)
        self._requests = 0
        self._answering = asyncio.Event()  # those who see the server end

    async def run(self) -> dict[str, Any]:
        plan, begin, rests = self._plan, time.monotonic(), list[IdleState]()
        async with raw_http.client(self._url) as http:
            for part in range(plan.parts):
                end = begin + plan.seconds * (part + 1) / plan.parts
                users = SoakUsers(self._url, self._model, self._known, plan.context, self._notes)
                async with asyncio.TaskGroup() as group:
                    for number in range(plan.users):
                        group.create_task(self._user(users, f"{plan.seed} {part} {number}", end))
                    group.create_task(self._budgets(end))
                await users.close()
                self._server.check()
                rests.append(await idle_state(self._server.pid, http, begin, self._requests))
                self._progress(
                    f"{rests[-1].at_s:.0f} of {plan.seconds:.0f} s, {self._requests} requests, "
                    f"{rests[-1].rss_bytes >> 20} MiB, {self._notes.wrongs} wrong"
                )
        ending = await self._shut_down()
        notes = self._notes
        verdict = judge_growth(rests)
        figures = verdict.pop("figures")
        verdict |= {
            "no_wrong_answer": notes.wrongs == 0 and notes.compared > 0,
            "ended_in_order": ending["exit_status"] == 0 and not ending["broken"],
        }
        return {
            "requests": self._requests,
            "answers_compared": notes.compared,
            "outcomes": {
                kind: dict(sorted(n.items())) for kind, n in sorted(notes.outcomes.items())
            },
            "wrong": notes.wrong,
            **figures,
            "shutdown": ending,
            "verdict": verdict | {"passed": all(verdict.values())},
        }

    async def _user(self, users: SoakUsers, seed: str, end: float) -> None:
        draw = random.Random(seed)
        while time.monotonic() < end:
            self._requests += 1
            await users.visit(draw)
            self._server.check()
            await asyncio.sleep(draw.random() * 0.02)

    async def _budgets(self, end: float) -> None:
        """Change what the models may take, while they answer; both are as before in the end."""
        notes, draw, question = self._notes, self._draw, self._known[0]
        first: dict[str, Any] = {"model": self._model, "host_memory": str(self._half)}
        async with raw_http.client(f"{self._url}/v1") as http:

            async def change(what: str, allowed: tuple[int, ...] = (200,), **body: Any) -> bool:
                try:
                    done = await http.post(f"/models/{what}", json=body)
                except httpx2.TransportError as error:
                    self._server.check()
                    notes.complain(what, repr(error))
                    return False
                notes.add(what, str(done.status_code))
                if done.status_code not in allowed:
                    notes.complain(what, f"{done.status_code} {done.text}")
                return done.status_code == 200

            while time.monotonic() < end:
                await asyncio.sleep(min(draw.uniform(0.3, 5), max(0.0, end - time.monotonic())))
                given = str(round(self._half * draw.choice((0.02, 0.6, 1))))
                if await change("load", (200, 503), model=_SECOND, host_memory=given):
                    body = {"model": _SECOND, "prompt": question.prompt, "temperature": 0}
                    done = await http.post(
                        "/completions", json=body | {"max_tokens": question.tokens}
                    )
                    told = (
                        done.json()["choices"][0]["text"] if done.status_code == 200 else done.text
                    )
                    notes.compare("second model", told, question.text)
                await change("unload", model=_SECOND)
                if draw.random() < 0.1:  # the first one in another budget
                    await change("unload", model=self._model, timeout=5)
                    given = str(round(self._half * draw.uniform(0.5, 1)))
                    if not await change("load", (200, 503), **first | {"host_memory": given}):
                        await change("load", **first)
            await change("unload", model=self._model)
            await change("load", **first)

    async def _shut_down(self) -> dict[str, Any]:
        """Tell the server to end while it answers: what began must end, whole, or be refused."""
        body = {"model": self._model, "prompt": "Once upon a time", "temperature": 0}
        body |= {"max_tokens": _LAST_TOKENS, "ignore_eos": True, "stream": True}
        asked = [asyncio.create_task(self._last(body)) for _ in range(_LAST_USERS)]
        await asyncio.wait_for(self._answering.wait(), 60)
        begin = time.monotonic()
        os.kill(self._server.pid, 15)
        late = await self._last(body)
        answers = [*await asyncio.gather(*asked), late]
        status = await asyncio.to_thread(self._server.process.wait, 60)
        whole = {text for text, outcome in answers if outcome == "whole"}
        outcomes = [outcome for _, outcome in answers]
        return {
            "seconds": round(time.monotonic() - begin, 2),
            "exit_status": status,
            "outcomes": {one: outcomes.count(one) for one in sorted(set(outcomes))},
            "broken": outcomes.count("broken") + max(0, len(whole) - 1),
        }

    async def _last(self, body: dict[str, Any]) -> tuple[str, str]:
        """An answer's text, and whether it was whole, refused or broken."""
        received = bytearray()
        try:
            reader, writer = await raw_http.connect(self._url)
            writer.write(raw_http.request("/v1/completions", body))
            while part := await reader.read(65536):
                received += part
                self._answering.set()
            await raw_http.close(writer)
        except OSError:
            return "", "broken" if received else "refused"
        status, events = raw_http.body_of(bytes(received))
        if status != 200:
            return "", "refused"
        text, whole = raw_http.text_of(events) if b'"error"' not in events else ("", False)
        told = "refused" if b'"unavailable"' in events else "broken"
        return text, "whole" if whole else told


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
