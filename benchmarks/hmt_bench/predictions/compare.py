"""All runs, each predicted from what the machine's probe has measured, and how far that was off.

Each case runs twice: before the first run nothing is known of its model, and before the second one
the factor that the first has shown.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from shutil import copyfile
from statistics import median
from typing import Any

from rich.table import Table

from hmt.base import flags
from hmt.base.errors import HMTError
from hmt.bench.environment import describe
from hmt.contracts.machine import Machine
from hmt.hardware.machine import cache_file
from hmt_bench.predictions.cases import Case

QUANTITIES = ("tokens_per_s", "ttft_s", "disk_bytes", "peak_bytes", "device_bytes")
_MODULE = "hmt_bench.predictions.process"


def runs_of(
    cases: Sequence[Case], folder: Path, progress: Callable[[str], None] = lambda what: None
) -> Iterator[dict[str, Any]]:
    """Runs all cases twice, each run in a separate process; what `process.run` says of each.

    Models are written into `folder`.  Raises HMTError where a process fails.
    """
    for case in cases:
        # Each case has its own cache folder: earlier runs on this machine tell it nothing.
        with tempfile.TemporaryDirectory() as cache:
            if cache_file().exists():
                copyfile(cache_file(), Path(cache) / cache_file().name)
            for number in range(2):
                progress(f"{case.name}, run {number + 1}")
                yield _run(case, folder, cache) | {"earlier_runs": number}


def _run(case: Case, folder: Path, cache: str) -> dict[str, Any]:
    command = [sys.executable, "-m", _MODULE, str(folder), json.dumps(asdict(case))]
    environment = {**os.environ, flags.CACHE.name: cache}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise HMTError(f"{case.name}: the process failed: {done.stderr.strip()[-500:]}")
    content: dict[str, Any] = json.loads(done.stdout)
    return content


def content_of(runs: Sequence[dict[str, Any]], machine: Machine) -> dict[str, Any]:
    """A benchmark's file: all runs, and errors before the first run of a model and after it."""
    return {
        "benchmark": "predictions",
        "machine": describe(machine),
        "runs": list(runs),
        "errors": {
            name: summed_up([run for run in runs if run["earlier_runs"] == number])
            for number, name in enumerate(("first_run", "second_run"))
        },
    }


def error(run: dict[str, Any], quantity: str) -> float | None:
    """Predicted over measured, less 1; None where there is nothing to compare."""
    predicted, measured = run["predicted"].get(quantity, 0), run["measured"].get(quantity, 0)
    if not predicted or not measured:
        return None
    return float(predicted / measured - 1)


def summed_up(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of each quantity: the median error, the worst, and the lowest prediction."""
    summary = {}
    for quantity in QUANTITIES:
        errors = [each for run in runs if (each := error(run, quantity)) is not None]
        if errors:
            summary[quantity] = {
                "runs": len(errors),
                "median": median(map(abs, errors)),
                "worst": max(map(abs, errors)),
                "lowest": min(errors),
            }
    return summary


def table(content: dict[str, Any]) -> Table:
    """Errors of all runs, for a console."""
    shown = Table(title="predicted over measured", title_justify="left")
    shown.add_column("run")
    for quantity in QUANTITIES:
        shown.add_column(quantity, justify="right")
    for run in content["runs"]:
        errors = [error(run, quantity) for quantity in QUANTITIES]
        cells = ["-" if each is None else f"{each:+.0%}" for each in errors]
        again = " again" if run["earlier_runs"] else ""
        shown.add_row(run["case"]["name"] + again, *cells)
    return shown
