"""A long prompt that comes again after a restart: read from the disk, or computed anew.

Each answer is a process of its own.  The first computes the prompt and keeps it in a folder; the
second finds it there; the third has no folder.  What the disk holds may still be in the page cache
of the operating system, past which HMT reads where the file system permits it.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from hmt.base.errors import ConfigError, HMTError
from hmt.bench.environment import describe
from hmt.hardware.machine import machine_for
from hmt.text import Tokenizer

CASES = ("computed and kept", "from the disk", "computed")


def run(
    model: Path,
    text: str,
    folder: Path,
    *,
    tokens: int = 30_000,
    runs: int = 3,
    options: dict[str, Any] | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Seconds to the first token of a prompt of `tokens` tokens of `text`, medians of `runs`.

    folder   empty, on the disk that keeps the prompt; a folder of each run is made in it

    Raises ConfigError for a text that is too short, HMTError where a process fails or two answers
    are not the same.
    """
    ids = Tokenizer.open(model).encode(text)
    if len(ids) < tokens:
        raise ConfigError(f"{tokens} tokens were asked for, and the text has {len(ids)}")
    prompt = folder / "prompt.json"
    prompt.write_text(json.dumps(ids[:tokens]))
    plain = {"context": tokens + 16, "max_batch": 1, **(options or {})}
    found: dict[str, list[dict[str, Any]]] = {case: [] for case in CASES}
    for number in range(runs):
        kept = plain | {"prefix_cache_dir": str(folder / f"kept-{number}")}
        for case, given in zip(CASES, (kept, kept, plain), strict=True):
            progress(f"{case}, run {number + 1} of {runs}")
            found[case].append(_answer(model, prompt, given))
    answers = {one["token"] for results in found.values() for one in results}
    if len(answers) > 1:
        raise HMTError(f"answers differ: tokens {sorted(answers)}; please report this")
    return {
        "model": model.resolve().name,
        "tokens": tokens,
        "runs": runs,
        "machine": describe(machine_for(model)),
        "results": [{"case": case, **_medians(results)} for case, results in found.items()],
    }


def _answer(model: Path, prompt: Path, options: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "hmt_bench.prefix_process"]
    arguments = [str(model), str(prompt), json.dumps(options)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise HMTError(f"a process failed: {done.stderr.strip()[-500:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _medians(results: list[dict[str, Any]]) -> dict[str, Any]:
    names = ("loading_s", "first_token_s", "closing_s")
    times = {name: median(one[name] for one in results) for name in names}
    last = results[-1]
    read = (last["prefixes"] or {}).get("drive_read_pages", 0)
    return times | {"computed_tokens": last["computed_tokens"], "pages_read": read}
