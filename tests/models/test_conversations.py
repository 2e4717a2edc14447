"""A long conversation with a hybrid over HTTP: each turn computes what is new, and little more.

The server is a process that is killed in between; what it wrote is what the next one has.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hybrid_models import publish

import hmt
from hmt.contracts.step import Segment
from hmt.engine import LoadedModel
from hmt.engine.scheduling.prefill_budget import to_border
from hmt.kvcache import SequenceSlots
from hmt.kvcache.state_checkpoints import StateCheckpoints, checkpoint_interval

pytestmark = pytest.mark.usefixtures("quick_processes")

INTERVAL, CHUNK, NEW = 32, 12, 20
CONTEXT = 1024
# Turns of 60 tokens: the distance between checkpoints is scaled like them.
SERVE = f"""
from hmt.kvcache import state_checkpoints
state_checkpoints.INTERVAL_TOKENS = {INTERVAL}
from hmt.cli.main import main
main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hybrid")
    publish("qwen3_5_text-0", made, CONTEXT)
    return made


def message(seed: int, tokens: int = 40) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(16, 250) for _ in range(tokens)]


class Server:
    """The process, and the lines that it logs."""

    def __init__(self, folder: Path, kept: Path) -> None:
        self._name, self._kept = folder.name, kept
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVE, "serve", str(folder), "--port", "0", "--log-requests",
             "--host-memory", "160MiB", "--context", str(CONTEXT), "--threads", "1",
             "--max-batch", "16", "--max-prefill-tokens", str(CHUNK), "--dtype", "float32",
             "--prefix-cache-dir", str(kept)],
            stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        assert self._process.stderr is not None
        self._told = self._process.stderr
        line = self._told.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/v1", line)
        assert found, line + self._told.read()
        self._at = f"http://127.0.0.1:{found[1]}/v1/completions"

    def answer(self, prompt: list[int]) -> tuple[str, dict[str, int]]:
        """The text, and what the log says of the prompt, which is what `usage` says."""
        asked = {
            "model": self._name,
            "prompt": prompt,
            "max_tokens": NEW,
            "temperature": 0,
            "ignore_eos": True,
        }
        request = urllib.request.Request(
            self._at, json.dumps(asked).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)
        logged: dict[str, int] = json.loads(self._told.readline())["prompt"]
        details = answer["usage"]["prompt_tokens_details"]
        assert details == {
            "cached_tokens": logged["cached"], "diverged_at": logged["diverged_at"],
        }  # fmt: skip
        assert logged["checkpoint_at"] == logged["cached"]
        return answer["choices"][0]["text"], logged

    def kill(self) -> None:
        """Once nothing is written any more: it writes when it has nothing else to do."""
        seen: Any = None  # files appear whole, under their names
        while (now := sorted(os.listdir(self._kept))) != seen or not self._sleeps():
            seen = now
            time.sleep(0.7)
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(60)
        self._told.close()

    def _sleeps(self) -> bool:
        """Whether none of its threads wants a processor or waits for the disk."""
        for stat in Path(f"/proc/{self._process.pid}/task").glob("*/stat"):
            with suppress(OSError):  # it has ended meanwhile
                if stat.read_text().rpartition(")")[2].split()[0] != "S":
                    return False
        return True


@contextmanager
def serving(folder: Path, kept: Path) -> Iterator[Server]:
    server = Server(folder, kept)
    try:
        yield server
    finally:
        server.kill()


class Conversation:
    """What was asked and answered until now, and what each turn may compute."""

    def __init__(self, plain: LoadedModel) -> None:
        self._plain = plain  # with no cache
        self._known: list[list[int]] = []

    def turn(self, server: Server, prompt: list[int]) -> list[int]:
        """One turn; the prompt with its answer."""
        wanted = self._plain.infer(hmt.Request(prompt, NEW, ignore_eos=True))
        text, logged = server.answer(prompt)
        assert text == wanted.text
        same = max((common(prompt, known) for known in self._known), default=0)
        # Of an answer the last token is not computed, and only whole pages are kept.
        assert same - 16 <= logged["diverged_at"] <= same
        assert logged["tokens"] == len(prompt)
        computed = len(prompt) - logged["cached"]
        assert computed <= len(prompt) - same + INTERVAL
        whole = [*prompt, *wanted.token_ids]
        self._known.append(whole)
        return whole


def common(one: list[int], other: list[int]) -> int:
    same = [a == b for a, b in zip(one, other, strict=False)]
    return [*same, False].index(False)


def test_each_turn_computes_what_is_new_and_an_interval_at_most(
    folder: Path, tmp_path: Path
) -> None:
    """Ten turns, an edit in the middle and another last message; the same after a SIGKILL."""
    options: dict[str, Any] = {"host_memory": "64MiB", "context": CONTEXT, "max_batch": 1}
    with hmt.Engine(**options, dtype="float32", max_prefill_tokens=CHUNK, threads=1) as engine:
        talk = Conversation(engine.load_model(folder))
        text, begins = list[int](), list[int]()
        for turns in (range(10), range(10, 11)):
            with serving(folder, tmp_path) as server:
                for turn in turns:
                    begins.append(len(text))
                    text = talk.turn(server, [*text, *message(turn)])
                edited_and_changed(talk, server, text, begins)


def edited_and_changed(
    talk: Conversation, server: Server, text: list[int], begins: list[int]
) -> None:
    """The middle of a message in the middle is another one; then all of the last message."""
    at = begins[len(begins) // 2] + 30
    prompt = text[:-NEW]
    talk.turn(server, [*prompt[:at], 250 + len(begins) % 10, *prompt[at + 1 :]])
    talk.turn(server, [*text[: begins[-1]], *message(100 + len(begins))])


@pytest.mark.parametrize("slots", [8, 20])
@pytest.mark.parametrize("turn", [150, 3000, 9000])
def test_checkpoints_of_a_conversation_become_sparser_evenly(slots: int, turn: int) -> None:
    """However many tokens there are: n copies are no further apart than 2 L / n, about."""
    kept, interval = StateCheckpoints(SequenceSlots(0, 1, slots), 256), 256
    pages = np.arange(20 * (turn + 100))  # of each position its number: nothing is evicted
    length = 0
    for sequence in range(1, 21):
        begin = kept.longest(pages[: length // 16]) * 16
        assert length - begin <= 16 * (sequence > 1), "a turn goes on where the last one ended"
        if begin:
            kept.slot_behind(begin // 16 - 1)
            kept.began_at(sequence, begin)
        prompt, answer = length + turn, 100
        for start in steps(begin, prompt, interval):
            kept.take(Segment(sequence, start, 0, 1, whole=prompt))
        for start in range(prompt, prompt + answer + 1):
            kept.take(Segment(sequence, start, 0, 1, whole=prompt))
        length = (prompt + answer) // 16 * 16
        kept.keep(sequence, pages[: length // 16])
        held = [16 * (n + 1) for n, _ in kept.kept_behind(pages[: length // 16])]
        assert len(held) <= slots
        gaps = [b - a for a, b in zip([0, *held], held, strict=False)]
        assert max(gaps) <= max(2 * interval, 2 * length / (slots - 4) + interval)
        before = (prompt - 1) // 16 * 16
        assert {before, length} <= set(held), "where the last prompt and answer ended"


@pytest.mark.parametrize("chunk", [48, 512, 1500, 4096])
@pytest.mark.parametrize("begin", [0, 16, 3008, 5136])
def test_steps_begin_where_checkpoints_are_made(chunk: int, begin: int) -> None:
    """Wherever a prompt goes on from, and not much more often than without checkpoints."""
    interval = checkpoint_interval(chunk)
    computed, starts = begin, set[int]()
    while (left := 15_000 - computed) > 0:
        starts.add(computed)
        computed += to_border(computed, 15_000, min(chunk, left), interval)
    wanted = {at for at in range(interval, 15_000, interval) if at > begin} | {14_992}
    assert wanted <= starts and interval >= chunk
    assert len(starts) <= -(-(15_000 - begin) // chunk) + len(wanted) + 1


def steps(begin: int, prompt: int, interval: int) -> Iterator[int]:
    """Where steps of a prompt begin."""
    border = (prompt - 1) // 16 * 16
    yield from sorted({begin, border, *range(0, prompt, 64)} & set(range(begin, prompt)))
