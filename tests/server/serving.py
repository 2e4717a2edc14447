"""What tests of the server share: applications on one model, clients, holding the engine."""

import asyncio
import json
import shutil
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from fastapi import FastAPI
from openai import AsyncOpenAI
from scripted import saying as saying

from hmt.cli.options import embedded_model
from hmt.engine import LoadedModel
from hmt.server import ServerConfig, create_app

CHAT = "/v1/chat/completions"
NAME = "mini-dense"
TEMPLATE = (
    "{{ '<|begin|>' }}{% if tools %}<|system|>{% for t in tools %}{{ t | tojson }}{% endfor %}"
    "CALL<|end|>{% endif %}{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
    "{% for c in m.tool_calls or [] %}CALL{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def app_on(model: LoadedModel, **options: Any) -> FastAPI:
    return create_app(model, ServerConfig(**options))


def run(work: Coroutine[Any, Any, Any]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(60):
            return await work

    return asyncio.run(limited())


def http(app: FastAPI, **headers: str) -> httpx2.AsyncClient:
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx2.AsyncClient(transport=transport, base_url="http://localhost", headers=headers)


@asynccontextmanager
async def openai(app: FastAPI, key: str = "none") -> AsyncIterator[AsyncOpenAI]:
    async with http(app) as client:
        yield AsyncOpenAI(
            api_key=key, base_url="http://localhost/v1", http_client=client, max_retries=0
        )


def asking(text: str = "What is 12 + 30?", **others: Any) -> dict[str, Any]:
    """The body of a chat that is answered greedily."""
    messages = [{"role": "user", "content": text}]
    return {"model": NAME, "messages": messages, "temperature": 0, **others}


@contextmanager
def held(model: LoadedModel) -> Iterator[threading.Event]:
    """Keep the engine's thread busy, as a long step would.  The event: it no longer is."""
    holding, release, over = threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        holding.set()
        release.wait(30)
        over.set()

    model._loop.begin(hold)
    assert holding.wait(30)
    try:
        yield over
    finally:
        release.set()


def at_rest(model: LoadedModel) -> bool:
    """Whether nobody waits or runs, and every page is free."""
    load = model._loop.call(lambda: model._core.scheduler.load)
    return (load.waiting, load.running, load.free_tokens) == (0, 0, load.capacity_tokens)


@dataclass
class Call:
    """A request to an ASGI application, whose client reads and goes when the test says so."""

    app: FastAPI
    path: str
    body: Any
    messages: list[dict[str, Any]] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    wrote: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        scope = {
            "type": "http", "method": "POST", "path": self.path, "raw_path": self.path.encode(),
            "query_string": b"", "scheme": "http", "http_version": "1.1", "root_path": "",
            "asgi": {"version": "3.0", "spec_version": "2.3"}, "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        }  # fmt: skip
        parts = [json.dumps(self.body).encode()]

        async def receive() -> dict[str, Any]:
            if parts:
                return {"type": "http.request", "body": parts.pop(), "more_body": False}
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if self.gone.is_set():
                raise OSError("the client is gone")
            self.messages.append(message)
            if message.get("body"):
                self.wrote.set()

        await self.app(scope, receive, send)

    @property
    def status(self) -> int | None:
        """Of the response; None without one."""
        return self.messages[0]["status"] if self.messages else None

    @property
    def text(self) -> str:
        """All that was written."""
        return b"".join(message.get("body", b"") for message in self.messages).decode()


def events_of(text: str) -> list[Any]:
    """The objects of a stream, which must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def tooled_model(folder: Path, call: str, end: str = "") -> Path:
    """The small model with a template that knows tools, whose calls begin with `call`."""
    shutil.copytree(embedded_model(), folder)
    template = TEMPLATE.replace("CALL", call) + end
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder
