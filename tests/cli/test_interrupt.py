"""Ctrl-C: the answer ends, the summary is printed, the shell is told."""

import signal
import subprocess
import sys

import pytest

from hmt.cli import run
from hmt.cli.interrupt import StopKey
from hmt.cli.main import app

pytestmark = pytest.mark.usefixtures("quick_processes")

COMMAND = [
    sys.executable,
    "-c",
    "import sys; sys.argv[0] = 'hmt'; from hmt.cli.main import main; main()",
]
LONG = ["run", "--raw", "--host-memory", "24MiB", "--context", "2048", "--max-new-tokens", "2000"]


def test_ctrl_c_ends_the_answer_and_prints_the_summary():
    process = subprocess.Popen(
        [*COMMAND, *LONG, "--threads", "1", "Once upon a time"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    begun = process.stdout.read(4)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert len(begun) == 4
    assert process.returncode == 130, err
    assert "tokens/s" in err and "Traceback" not in err


def test_the_first_press_waits_for_a_clean_place_and_the_second_does_not():
    before = signal.getsignal(signal.SIGINT)
    with StopKey() as key:
        key.patient = True
        signal.raise_signal(signal.SIGINT)
        assert key.pressed
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_press_that_nobody_looks_at_interrupts_at_once():
    with StopKey() as key:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert not key.pressed


def test_a_stopped_answer_leaves_a_model_that_answers(hmt, monkeypatch):
    """In a chat, the press ends one answer; the next line is answered as if nothing had been."""
    writes = []

    def write(text):
        writes.append(text)
        if len(writes) == 3:
            signal.raise_signal(signal.SIGINT)

    lines = iter(["Repeat: apple book ball key lamp", "/reset", "What is 3 + 4?", "/exit"])
    monkeypatch.setattr(run, "_write", write)
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    done = hmt("run", "--host-memory", "8MiB", "--context", "512", "--threads", "1")
    assert done.code == 0
    assert "(stopped" in done.err
    assert len(writes) > 3 and "".join(writes[3:]).strip()


def test_a_press_while_the_prompt_is_read_ends_the_run(hmt, monkeypatch):
    def stream(*arguments):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(run, "_stream", stream)
    done = hmt("run", "--host-memory", "8MiB", "--context", "512", "hello there")
    assert done.code == 130 and "Traceback" not in done.err


def test_the_commands_are_there():
    from typer.testing import CliRunner

    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for name in ("run", "plan", "probe", "doctor", "eval", "bench"):
        assert name in result.output
