"""The attacks, on servers of this suite: beside each, /health, memory and a client are watched."""

import base64
import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import on_bodies
import on_connections
import on_forms
import on_keys
import pytest
from beside import MIB, SPARE_BYTES, Guardian
from hostile_images import Hostile, hostile_images
from pending import PENDING
from serving import tooled_model
from target import CHAT, TEXT, Answer, Failure, Target, borne, eventually, refused, require
from vision_models import publish, vision_model

pytestmark = pytest.mark.usefixtures("quick_processes")

KEYS = ("alice-key-0123456789", "bob-key-0123456789")
BUDGET = 256 * MIB
Attack = Callable[[Target], None]


def params(attacks: tuple[Attack, ...]) -> list[object]:
    """Attacks by name; those that are known not to be borne are skipped, and say why."""

    def marks(attack: Attack) -> list[pytest.MarkDecorator]:
        reason = PENDING.get(attack.__name__)
        return [] if reason is None else [pytest.mark.skip(reason=f"pending: {reason}")]

    return [pytest.param(attack, marks=marks(attack), id=attack.__name__) for attack in attacks]


class Victim:
    """A server in a separate process."""

    def __init__(
        self, folder: Path, *arguments: str, model: Path | None = None, files: int = 0
    ) -> None:
        keys = folder / "keys"
        keys.write_text("\n".join(KEYS), encoding="utf-8")
        keys.chmod(0o600)
        self.log = folder / "log"

        def limits() -> None:
            if files:
                resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hmt", "serve", *([str(model)] if model else []),
                 "--port", "0", "--api-key-file", str(keys), "--host-memory", str(BUDGET),
                 "--context", "2048", "--threads", "1", *arguments],
                stderr=log,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
                preexec_fn=limits if files else None,
            )  # fmt: skip
        eventually(self._is_up, 100, f"the server did not start: {self.text()}")
        found = re.search(r"http://127\.0\.0\.1:\d+", self.text())
        self.target = Target(found[0] if found else "", self.process.pid, KEYS)

    def _is_up(self) -> bool:
        return " is served at " in self.text() or self.process.poll() is not None

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    victim = Victim(tmp_path_factory.mktemp("victim"), "--prefix-cache")
    yield victim
    victim.end()


@pytest.fixture(scope="module")
def guardian(victim: Victim) -> Iterator[Guardian]:
    guardian = Guardian(victim.target, BUDGET + SPARE_BYTES)
    yield guardian
    guardian.close()


@pytest.fixture(scope="module")
def weak(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """A server with few descriptors, and with a chat template of a stranger."""
    folder = tmp_path_factory.mktemp("weak")
    model = tooled_model(folder / "model", "<tool_call>")
    template = model / "chat_template.jinja"
    text = template.read_text(encoding="utf-8")
    template.write_text(on_forms.TEMPLATE + text, encoding="utf-8")
    victim = Victim(folder, "--shutdown-timeout", "70", model=model, files=160)
    yield victim
    victim.end()


@pytest.fixture(scope="module")
def weak_guardian(weak: Victim) -> Iterator[Guardian]:
    guardian = Guardian(weak.target, BUDGET + SPARE_BYTES)
    yield guardian
    guardian.close()


@pytest.mark.parametrize(
    "attack",
    params((*on_connections.ATTACKS, *on_bodies.ATTACKS, *on_keys.ATTACKS, *on_forms.ATTACKS)),
)
def test_the_server_bears(attack: Attack, guardian: Guardian, victim: Victim) -> None:
    before = len(victim.text())
    with guardian.watching():
        attack(victim.target)
    said = victim.text()[before:]
    assert "Traceback" not in said, said[-2000:]
    assert len(said) < 10_000


@pytest.mark.parametrize(
    "attack", params((on_connections.half_open_connections, *on_forms.TEMPLATE_ATTACKS))
)
def test_a_server_with_few_descriptors_and_a_bad_template_bears(
    attack: Attack, weak_guardian: Guardian, weak: Victim
) -> None:
    before = len(weak.text())
    with weak_guardian.watching():
        attack(weak.target)
    assert len(weak.text()) - before < 10_000


def test_answers_end_after_a_signal_and_nothing_outlives_a_second_one(weak: Victim) -> None:
    """The last test of this server."""
    target, answers = weak.target, []
    long = {"model": target.model, "max_tokens": 300, "ignore_eos": True, "temperature": 0}

    def ask() -> None:
        answers.append(target.post(TEXT, {**long, "prompt": "Once"}))

    # What computes meanwhile: a template, a prompt, and an answer without end.
    busy: list[Callable[[], object]] = [
        lambda: target.post(CHAT, target.chat("LOOP")),
        lambda: target.post("/tokenize", {"prompt": "word " * 700_000}),
        lambda: target.post(TEXT, {**long, "prompt": "Twice", "max_tokens": 2000, "n": 16}),
    ]

    def endure(work: Callable[[], object]) -> None:
        with contextlib.suppress(Failure):
            work()

    threads = [threading.Thread(target=ask)]
    threads += [threading.Thread(target=endure, args=(work,)) for work in busy]
    threads[0].start()
    eventually(lambda: inside(target) >= 1, 30, "nothing is under way")
    for thread in threads[1:]:
        thread.start()
    time.sleep(0.5)
    weak.process.send_signal(signal.SIGTERM)
    threads[0].join(80)
    require(bool(answers), "an answer did not end after SIGTERM")
    assert answers[0].status == 200, answers[0].text
    assert answers[0].json["usage"]["completion_tokens"] == 300
    assert weak.process.poll() is None  # it waits for the others
    weak.process.send_signal(signal.SIGINT)
    weak.process.wait(15)  # half of what answers have to end
    for thread in threads:
        thread.join(30)


def inside(target: Target) -> int:
    """Answers under way."""
    state = target.get("/v1/hmt/state").json
    return int(state["requests"]["inside"])


def show(target: Target, image: Hostile) -> None:
    """Ask about an image, as clients of either API do."""
    data = base64.b64encode(image.data).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    for path, part in (
        (CHAT, {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}),
        ("/v1/messages", {"type": "image", "source": source}),
    ):
        message = {"role": "user", "content": [{"type": "text", "text": "What?"}, part]}
        answer = target.post(path, {**target.chat(max_tokens=2), "messages": [message]})
        (borne if image.fine else accepted)(answer, image.name)


def accepted(answer: Answer, what: str) -> None:
    """Raise Failure unless it was answered, or refused as wrong or as too much for now."""
    if answer.status not in (200, 429, 503):
        refused(answer, what)
        require("internal" not in answer.text, f"{what}: {answer.text}")


@pytest.mark.parametrize("count", [40, pytest.param(400, marks=pytest.mark.whole)])
def test_a_server_that_sees_bears_hostile_images(
    count: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("seeing")
    publish(vision_model("qwen3_vl"), folder / "model")
    victim = Victim(folder, "--context", "512", model=folder / "model")
    try:
        guardian = Guardian(victim.target, BUDGET + SPARE_BYTES)
        before = len(victim.text())
        try:
            with guardian.watching(), ThreadPoolExecutor(3) as pool:
                shown = [pool.submit(show, victim.target, one) for one in hostile_images(count, 11)]
                for one in shown:
                    one.result()
        finally:
            guardian.close()
        said = victim.text()[before:]
        assert "Traceback" not in said and len(said) < 10_000, said[-2000:]
    finally:
        victim.end()


def test_the_prefix_cache_is_there_to_be_attacked(victim: Victim) -> None:
    assert on_keys.caches_prompts(victim.target)


def test_the_same_attacks_are_a_command(victim: Victim) -> None:
    folder = Path(__file__).parent
    command = [sys.executable, str(folder / "__main__.py"), victim.target.url,
               "--pid", str(victim.process.pid), "--only", "two_lengths"]  # fmt: skip
    keys = [part for key in KEYS for part in ("--key", key)]
    done = subprocess.run([*command, *keys], capture_output=True, text=True, timeout=100)
    assert (done.returncode, "borne" in done.stdout) == (0, True), done.stdout + done.stderr
    elsewhere = [sys.executable, str(folder / "__main__.py"), "http://192.0.2.1:8000"]
    done = subprocess.run(elsewhere, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and "not of this machine" in done.stderr


def test_nothing_pending_is_unknown() -> None:
    rooms = (on_connections, on_bodies, on_keys, on_forms)
    known = {attack.__name__ for room in rooms for attack in room.ATTACKS}
    known |= {attack.__name__ for attack in on_forms.TEMPLATE_ATTACKS}
    assert set(PENDING) <= known


def test_transformers_is_never_told_to_trust_code() -> None:
    source = Path(__file__).parents[3] / "src"
    named = [
        f"{path.relative_to(source)}:{number}"
        for path in source.rglob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"trust_remote_code\s*=\s*(?!False)", line) and "trust_remote_code=" in line
    ]
    assert named == []
