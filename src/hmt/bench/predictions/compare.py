"""All runs, each predicted from what the machine's probe has measured, and what came of it.

A machine that others use, too, is another one a minute later: one case on an H200, three times
behind the same probe, was 5 and 22% too slow and 2% too fast.  So cases are run in several rounds,
and what a case is off is the middle of them.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from hmt.base.errors import HMTError
from hmt.bench.environment import describe
from hmt.bench.predictions.cases import Case
from hmt.contracts.machine import Machine

QUANTITIES = (
    "tokens_per_s", "ttft_s", "host_bytes", "disk_bytes", "link_bytes", "peak_bytes", "device_bytes"
)  # fmt: skip
_PEAKS = ("peak_bytes", "device_bytes")
# A drive that others use gives 1.5 GB/s in one minute and 2.6 in the next; what it gives is
# measured for half a second before a run and behind it.
_SAME, _ATTEMPTS = 1.15, 4
# Python launches what a GPU computes, at one pace or at half of it: where both come in one run, the
# usual one is neither.
_SAME_PACE, _PACE_ATTEMPTS = 1.25, 2
_COMPILING_TOKENS = 8  # enough for every kernel of a run
_LEAST_SHARE = 0.01  # of all bytes that a token reads: what is less is no error worth its name


def runs_of(
    cases: Sequence[Case],
    folder: Path,
    *,
    progress: Callable[[str], None] = lambda what: None,
    compiled: bool = False,
) -> Iterator[dict[str, Any]]:
    """Runs all cases, each in a process of its own; what `process.run` says of each.

    compiled   whether the GPU's kernels are, since the cases have been run before

    Models are written into `folder`.  A run is made again while the drive, measured before and
    behind it, has changed, and one of a GPU once if Python's pace has; the last counts.  Raises
    HMTError where a process fails.
    """
    on_gpu = [case for case in cases if case.gpu_memory is not None]
    if on_gpu and not compiled:
        progress(f"compiling kernels for {len(on_gpu)} runs")
        _compile_kernels(on_gpu, folder)
    for case in cases:
        for attempt in range(1, _ATTEMPTS + 1):
            (run,) = _run([case], folder, progress)
            changed = _drive_changed(run)
            if case.gpu_memory is not None and attempt < _PACE_ATTEMPTS:
                changed |= run["measured"]["pace_changed"] > _SAME_PACE
            if not changed or attempt == _ATTEMPTS:
                yield run | {"attempts": attempt}
                break


def _compile_kernels(cases: Sequence[Case], folder: Path) -> None:
    """Run all cases for some tokens, side by side: the GPU's kernels are kept on the drive then.

    One that fails will say so when it counts.
    """
    short = [replace(case, tokens=min(case.tokens, _COMPILING_TOKENS)) for case in cases]
    # One of each model goes before the others: it writes the model.
    writing = list({(case.model, case.scheme): case for case in short}.values())
    side_by_side = max(1, len(os.sched_getaffinity(0)) // 2)

    def run(case: Case) -> None:
        with suppress(HMTError):
            list(_run([case], folder, lambda what: None))

    with ThreadPoolExecutor(side_by_side) as pool:
        list(pool.map(run, writing))
        list(pool.map(run, [case for case in short if case not in writing]))


def _drive_changed(run: dict[str, Any]) -> bool:
    drive = run.get("drive")
    if not drive or not drive["before"] or not drive["after"]:
        return False
    change = drive["after"] / drive["before"]
    return not 1 / _SAME <= change <= _SAME


def _run(
    cases: Sequence[Case], folder: Path, progress: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    progress(cases[0].name)
    command = [sys.executable, "-m", "hmt.bench.predictions.process", str(folder)]
    given = json.dumps([asdict(case) for case in cases])
    count = 0
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [*command, given], stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            count += 1
            yield json.loads(line)
            if count < len(cases):
                progress(cases[count].name)
        if process.wait():
            errors.seek(0)
            said = errors.read().strip()[-500:]
            raise HMTError(f"{cases[count].name}: the process failed: {said}")


def content_of(runs: Sequence[dict[str, Any]], machine: Machine) -> dict[str, Any]:
    """A benchmark's file: all runs; errors of cases (their middle), and of single runs.

    And how far `apart` runs of a case are: how much more tokens/s the fastest gave than the
    slowest, which is the host's doing.
    """
    speeds = [[run["measured"]["tokens_per_s"] for run in each] for each in _by_case(runs)]
    spreads = [max(each) / min(each) - 1 for each in speeds if len(each) > 1]
    return {
        "benchmark": "predictions",
        "machine": describe(machine),
        "runs": list(runs),
        "errors": summed_up(middle(runs)),
        "errors_of_runs": summed_up(runs),
        "apart": {"median": median(spreads), "worst": max(spreads)} if spreads else {},
    }


def _by_case(runs: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The runs of each case, in the order of the first ones."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        found.setdefault(run["case"]["name"], []).append(run)
    return list(found.values())


def middle(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One run for each case: each quantity of the one whose error is in the middle.

    Of two in the middle the lower one.  `errors` are those of all, in their order.
    """
    found = []
    for each in _by_case(runs):
        one = {side: dict(each[0][side]) for side in ("predicted", "measured")}
        errors: dict[str, list[float]] = {}
        for quantity in QUANTITIES:
            known = [(off, run) for run in each if (off := error(run, quantity)) is not None]
            if not known:
                continue
            errors[quantity] = [off for off, _ in known]
            _, run = sorted(known, key=lambda pair: pair[0])[(len(known) - 1) // 2]
            for side, of in one.items():
                of[quantity] = run[side][quantity]
        found.append({**each[0], **one, "errors": errors})
    return found


def error(run: dict[str, Any], quantity: str) -> float | None:
    """Predicted over measured, less 1; None where there is nothing to compare."""
    predicted, measured = run["predicted"].get(quantity, 0), run["measured"].get(quantity, 0)
    least = 0.0
    if quantity.endswith("_bytes") and quantity not in _PEAKS:
        read = run["predicted"].get("step", {}).get("nbytes", {})
        everything = (read.get("GPU", 0) + read.get("CPU", 0)) / run["case"]["users"]
        most = max(everything, run["measured"]["host_bytes"], run["measured"]["disk_bytes"])
        least = _LEAST_SHARE * most
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
