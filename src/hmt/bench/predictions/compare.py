"""All runs, each predicted from what the machine's probe has measured, and what came of it."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from hmt.base.errors import HMTError
from hmt.bench.environment import describe
from hmt.bench.predictions.cases import Case
from hmt.engine.machine import machine_for

QUANTITIES = ("tokens_per_s", "ttft_s", "host_bytes", "disk_bytes", "link_bytes", "peak_bytes")
_LEAST_SHARE = 0.01  # of the bytes of a token: what is less is no error worth its name


def compare(
    cases: Sequence[Case],
    folder: Path,
    *,
    together: bool = False,
    progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Run all cases; the content of a benchmark's file.

    Models are written into `folder`.  Each case is a process of its own, unless they run `together`
    (on a GPU, where kernels would be compiled anew).  Raises HMTError where a process fails.
    """
    runs = []
    for part in [cases] if together else [[case] for case in cases]:
        progress(part[0].name)
        runs += _process(part, folder, progress)
    return {
        "benchmark": "predictions",
        "machine": describe(machine_for(folder)),
        "runs": runs,
        "errors": summed_up(runs),
    }


def _process(
    cases: Sequence[Case], folder: Path, progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "hmt.bench.predictions.process", str(folder)]
    given = json.dumps([asdict(case) for case in cases])
    found: list[dict[str, Any]] = []
    with subprocess.Popen(
        [*command, given], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            found.append(json.loads(line))
            if len(found) < len(cases):
                progress(cases[len(found)].name)
        errors = process.stderr.read()
    if process.returncode:
        raise HMTError(f"{cases[len(found)].name}: the process failed: {errors.strip()[-500:]}")
    return found


def error(run: dict[str, Any], quantity: str) -> float | None:
    """Predicted over measured, less 1; None where there is nothing to compare."""
    predicted, measured = run["predicted"][quantity], run["measured"][quantity]
    least = 0.0
    if quantity.endswith("_bytes") and quantity != "peak_bytes":
        least = _LEAST_SHARE * max(run["measured"]["host_bytes"], run["measured"]["disk_bytes"])
    if not predicted or measured <= least:
        return None
    return float(predicted / measured - 1)


def summed_up(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of each quantity: the median error, the worst, and the lowest prediction."""
    found = {}
    for quantity in QUANTITIES:
        errors = [each for run in runs if (each := error(run, quantity)) is not None]
        if errors:
            found[quantity] = {
                "runs": len(errors),
                "median": median(map(abs, errors)),
                "worst": max(map(abs, errors)),
                "lowest": min(errors),
            }
    return found
