"""Commands whose standard streams are closed, full, or read by nobody."""

import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("quick_processes")

PLAN = ("plan", "llama-3.1-8b", "--machine", "dgx-h100")
ANSWER = ("run", "Say hello.", "--max-new-tokens", "3")
COMMANDS = {
    "version": ("--version",),
    "plan as JSON": (*PLAN, "--json"),
    "run": ANSWER,
}


def started(
    *words: str, shell: str = "", stdout: Any = subprocess.PIPE, unbuffered: bool = False
) -> subprocess.Popen[str]:
    """`hmt` with `words`, behind what a shell does to its streams, if anything."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1" if unbuffered else ""}
    command = [sys.executable, "-m", "hmt", *words]
    if shell:
        command = ["sh", "-c", f'exec "$@" {shell}', "sh", *command]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=stdout, stderr=pipe, text=True)


@pytest.mark.parametrize(
    ("name", "unbuffered"),
    [("version", False), ("run", False), pytest.param("run", True, marks=pytest.mark.whole)],
)
def test_an_output_that_is_full_is_one_line_and_a_failure(name, unbuffered):
    with open("/dev/full", "w") as full:
        process = started(*COMMANDS[name], stdout=full, unbuffered=unbuffered)
    _, told = process.communicate()
    assert process.returncode == 1
    (line,) = [line for line in told.splitlines() if "error" in line.lower()]
    assert line.startswith("error: stdout cannot be written (No space left on device)")
    assert "Traceback" not in told and "Exception ignored" not in told


@pytest.mark.parametrize("name", ["version", "plan as JSON"])
def test_nobody_who_reads_is_no_news(name):
    with started(*COMMANDS[name]) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_closed_streams_are_not_taken_by_files(tmp_path):
    process = started(*ANSWER, "--no-summary", shell=">&-")
    _, told = process.communicate()
    assert process.returncode == 1
    assert told.splitlines() == [
        "error: stdout cannot be written (Bad file descriptor): what was printed is lost, or "
        "incomplete"
    ]
    # A trace is a file that gets the number of a closed stream, if that is left free.
    trace = tmp_path / "trace.json"
    process = started(*ANSWER, "--trace", str(trace), shell="<&- 2>&-")
    answer, _ = process.communicate()
    assert process.returncode == 0 and answer.strip()
    assert trace.read_text().startswith("{")


def test_a_chat_without_input_ends():
    process = started("run", shell="<&-")
    _, told = process.communicate()
    assert process.returncode == 0 and "Traceback" not in told


def test_letters_that_the_locale_has_not_are_written_by_number(tmp_path, monkeypatch):
    for name, value in (("PYTHONUTF8", "0"), ("PYTHONCOERCECLOCALE", "0"), ("LC_ALL", "C")):
        monkeypatch.setenv(name, value)
    process = started("plan", "--plot", shell="2>&2")  # Python begins anew, with this locale
    shown, told = process.communicate()
    assert process.returncode == 0 and not told and shown.isascii()


def test_an_error_is_told_even_where_the_output_is_full():
    with open("/dev/full", "w") as full:
        process = started("plan", "no-such-model", stdout=full)
    _, told = process.communicate()
    assert process.returncode == 1 and told.startswith("error: 'no-such-model' is neither")
