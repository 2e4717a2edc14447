"""The page at / in Chromium, driven by playwright: skipped without it."""

import base64
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from serving import app_on

from hmt.engine import LoadedModel
from hmt.server import ServerConfig, bind

sync_api = pytest.importorskip("playwright.sync_api", reason="needs the extra 'browser'")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
ROOT = Path(__file__).parents[2]
AXE = ROOT / "node_modules" / "axe-core" / "axe.min.js"
Opened = Callable[..., Any]
SCREENSHOTS = ROOT / "build" / "screenshots"  # what tests have seen

MARKS = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium or google-chrome"),
    # Playwright's own threads and sockets end with the process.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@contextmanager
def served(model: LoadedModel, **options: Any) -> Iterator[str]:
    bound = bind(ServerConfig(port=0))
    app = app_on(model, **options)
    config = uvicorn.Config(app, lifespan="off", log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join()
        bound.close()


@contextmanager
def launched() -> Iterator[Any]:
    """Chromium."""
    with sync_api.sync_playwright() as playwright:
        options = {"executable_path": CHROMIUM, "args": ["--no-sandbox"]}
        with playwright.chromium.launch(**options) as browser:
            yield browser


@contextmanager
def opening(browser: Any, address: str) -> Iterator[Opened]:
    """What opens the page; nothing may come on its console, and no request may go elsewhere."""
    wrong: list[str] = []
    contexts = []

    def open_page(expected: str = "", **options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)

        def told(message: Any) -> None:
            if not (expected and expected in message.text):
                wrong.append(message.text)

        page.on("console", told)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda r: None if r.url.startswith(address) else wrong.append(r.url))
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


def stream(*deltas: dict[str, str]) -> dict[str, Any]:
    """A response that says `deltas`."""
    events = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas
    ]
    events.append({"choices": [], "usage": {"completion_tokens": len(deltas)}})
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    return {"status": 200, "content_type": "text/event-stream", "body": body}


def ask(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def answered(page: Any, number: int) -> Any:
    """The answer with this number, once it is complete."""
    turn = page.locator(".turn.assistant").nth(number)
    turn.locator(".told, .failed").first.wait_for()
    return turn


DATA_TRANSFER = """files => {
    const given = new DataTransfer();
    for (const [name, type, data] of files) {
        const bytes = Uint8Array.from(atob(data), c => c.charCodeAt(0));
        given.items.add(new File([bytes], name, { type }));
    }
    return given;
}"""


def given(page: Any, kind: str, *files: tuple[str, str, bytes]) -> None:
    """Paste files into the message, or drop them on the chat."""
    encoded = [[name, type_, base64.b64encode(data).decode()] for name, type_, data in files]
    transfer = page.evaluate_handle(DATA_TRANSFER, encoded)
    if kind == "drop":
        for event in ("dragover", "drop"):
            page.dispatch_event("#chat", event, {"dataTransfer": transfer})
    else:
        page.evaluate(
            "given => document.getElementById('prompt').dispatchEvent("
            "new ClipboardEvent('paste', { clipboardData: given, cancelable: true }))",
            transfer,
        )


def pending(page: Any, count: int) -> None:
    """Wait until so many images are to be sent."""
    sync_api.expect(page.locator("#attached li")).to_have_count(count, timeout=20_000)
