"""What runs were predicted to take, and what they took: the last of them, kept per machine.

A line of JSON for each in a file beside the machine's rates.  From them `recalibrate` finds the
factors with which predictions would have been right, and later ones are made with.
"""

import contextlib
import json
from dataclasses import asdict
from typing import Any

from hmt.engine.foreseen import Decoded, Foreseen
from hmt.engine.kept_file import number_of, replace_file
from hmt.engine.machine import cache_folder, factors, fingerprint, keep_factors, probed
from hmt.planner.calibration import PARTS, StepRun, fitted

_FILE = "runs.jsonl"
_KEPT = 200  # of all machines that share the folder
_LEAST_STEPS = 16  # what is shorter was still warming up


def keep(foreseen: Foreseen, decoded: Decoded, model: str) -> None:
    """Remember a run, if it tells anything.  Never fails: what cannot be written is not kept."""
    if decoded.steps < _LEAST_STEPS or not foreseen.step_s:
        return
    known = factors()
    run = StepRun.of(foreseen.cost, foreseen.actual_s, known)
    record = {
        "machine": fingerprint(),
        "probed": probed(),
        "model": model,
        "users": foreseen.users,
        "context": round(foreseen.context),
        "steps": decoded.steps,
        "predicted_s": foreseen.step_s,
        "disk_bytes": [foreseen.disk_bytes, foreseen.actual_disk_bytes],
        **asdict(run),
    }
    lines = _lines()[1 - _KEPT :]
    replace_file(cache_folder() / _FILE, "\n".join([*lines, json.dumps(record)]) + "\n")


def runs() -> list[StepRun]:
    """Those of this machine, since it was probed; the oldest first."""
    found, here = [], (fingerprint(), probed())
    for line in _lines():
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            record: dict[str, Any] = json.loads(line)
            alike = (record["machine"], record["probed"]) == here
            if alike and record["actual_s"] > 0:
                parts = {part: number_of(record["parts"][part]) for part in PARTS}
                at_once, actual_s = (number_of(record[name]) for name in ("at_once", "actual_s"))
                found.append(StepRun(parts, at_once, actual_s))
    return found


def recalibrate() -> tuple[list[StepRun], dict[str, float], dict[str, float]]:
    """Fit factors to the runs of this machine and keep them: the runs, factors before and after."""
    known, before = runs(), factors()
    after = fitted(known)
    if known:
        keep_factors(after)
    return known, before, after


def _lines() -> list[str]:
    try:
        return (cache_folder() / _FILE).read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
