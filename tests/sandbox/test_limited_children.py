"""Limited children: the kernel is the oracle of how they end, and that no other process does."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hmt.sandbox import Ended, Limits, Lost, Refused, Sandbox, Worker

ROLE = "odd_roles:Odd"
PREPARE = Limits(memory_bytes=256 << 20, cpu_s=5)
LIMITS = Limits(memory_bytes=64 << 20, cpu_s=0.3)


@pytest.fixture
def make() -> Iterator[Callable[..., Sandbox]]:
    made: list[Sandbox] = []

    def sandbox(blob: bytes = b"", **settings: Any) -> Sandbox:
        made.append(Sandbox(ROLE, settings, lambda: blob, prepare=PREPARE, worker=LIMITS))
        return made[-1]

    yield sandbox
    for one in made:
        one.close()


def ask(worker: Worker, what: str) -> Any:
    return worker.call({"do": what}).message["said"]


def gone(pid: int, seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def test_a_worker_answers(make: Callable[..., Sandbox]) -> None:
    worker = make(b"prepared").fork()
    reply = worker.call({"do": "é\ud800"}, b"\x00raw ")
    assert reply.message["said"] == "é\ud800" and reply.blob == b"\x00raw prepared"


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("loop", "more than 0.3 s of processor time"),
        ("compute", "more than 0.3 s of processor time"),
        ("allocate", "more than 64.0 MiB of memory"),
        ("abort", "more than 64.0 MiB of memory"),
        ("overflow", "nests too deeply"),
        ("exit", "status 3"),
    ],
)
def test_a_limit_ends_that_request_only(make: Callable[..., Sandbox], what: str, why: str) -> None:
    sandbox = make()
    other, worker = sandbox.fork(), sandbox.fork()
    with pytest.raises(Ended, match=why):
        ask(worker, what)
    assert ask(other, "here") == "here"
    assert ask(sandbox.fork(), "here") == "here"


def test_memory_is_measured_and_held_to_its_limit(make: Callable[..., Sandbox]) -> None:
    worker = make().fork()
    ask(worker, "grow")
    assert 32 << 20 <= worker.used_bytes < 48 << 20
    with pytest.raises(Ended, match="memory"):
        for _ in range(4):
            ask(worker, "grow")


def test_the_oldest_request_is_to_blame(make: Callable[..., Sandbox]) -> None:
    worker = make().fork()
    first, second = worker.begin({"do": "loop"}), worker.begin({"do": "here"})
    assert isinstance(first.exception(30), Ended) and isinstance(second.exception(30), Lost)
    assert isinstance(worker.begin({"do": "here"}).exception(30), Lost)


@pytest.mark.parametrize(("what", "kind"), [("refuse", "mine"), ("panic", "error")])
def test_what_a_role_raises_is_told(make: Callable[..., Sandbox], what: str, kind: str) -> None:
    worker = make().fork()
    with pytest.raises(Refused) as refused:
        ask(worker, what)
    assert refused.value.kind == kind and str(refused.value) in ("no", "as Rust's are")
    assert refused.value.more.get("line") == (7 if what == "refuse" else None)
    assert ask(worker, "here") == "here"  # it goes on


@pytest.mark.parametrize("what", ["loop", "overflow", "allocate", "exit"])
def test_what_cannot_be_prepared_is_not_tried_again(what: str) -> None:
    sandbox = Sandbox(ROLE, {"prepare": what}, prepare=Limits(256 << 20, 0.5), worker=LIMITS)
    reasons = []
    for _ in range(2):
        with pytest.raises(Ended) as ended:
            sandbox.fork()
        reasons.append(ended.value)
    assert reasons[0] is reasons[1]


def test_a_child_that_was_killed_is_made_anew(make: Callable[..., Sandbox]) -> None:
    sandbox = make()
    first = sandbox.fork()
    assert sandbox._process is not None
    os.kill(sandbox._process.pid, signal.SIGKILL)
    assert gone(sandbox._process.pid)
    with pytest.raises(Lost):
        while True:
            ask(first, "here")  # it goes with its parent
    assert ask(sandbox.fork(), "here") == "here"


def test_children_have_no_secrets_and_write_no_files(
    make: Callable[..., Sandbox], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    worker = make(file=str(tmp_path / "file")).fork()
    assert "HF_TOKEN" not in ask(worker, "environment")
    with pytest.raises((Refused, Ended)):
        ask(worker, "write")


def test_closing_ends_whoever_waits(make: Callable[..., Sandbox]) -> None:
    sandbox = make()
    worker = sandbox.fork()
    pid, raised = ask(worker, "pid"), list[BaseException]()

    def wait() -> None:
        try:
            ask(worker, "sleep")
        except (Ended, Lost) as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    sandbox.close()
    thread.join(10)
    assert raised and gone(pid)
    with pytest.raises(Lost):
        sandbox.fork()


PARENT = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from hmt.sandbox import Limits, Sandbox
sandbox = Sandbox({ROLE!r}, {{}}, prepare=Limits(1 << 28, 5), worker=Limits(1 << 28, 100))
worker = sandbox.fork()
print(sandbox._process.pid, worker.call({{"do": "pid"}}).message["said"], flush=True)
worker.begin({{"do": "loop"}})
sys.stdin.read()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, None])
def test_children_end_with_their_parent(how: signal.Signals | None) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert parent.stdin and parent.stdout and parent.stderr
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2, parent.stderr.read()
    if how is None:
        parent.stdin.close()
    else:
        parent.send_signal(how)
    parent.wait(10)
    try:
        assert [gone(pid) for pid in pids] == [True, True]
        assert parent.stderr.read() == ""
    finally:
        for stream in (parent.stdin, parent.stdout, parent.stderr):
            stream.close()


def test_starting_imports_no_torch() -> None:
    modules = "sys, hmt.sandbox.child, hmt.sandbox.template_rendering"
    program = f"import {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
