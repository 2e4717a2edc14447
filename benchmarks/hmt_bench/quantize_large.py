"""Quantising a random model that is larger than a memory limit, ended at random moments or not."""

import hashlib
import json
import os
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hmt.base.errors import HMTError
from hmt.bench.environment import describe
from hmt.hardware.machine import machine_for
from hmt.profiling.random_model import Shape, write_random_model
from hmt_bench.cgroup_run import WatchedRun, forget_pages, run_in_cgroup

_FIRST_S = 5.0  # importing takes that long: what is killed earlier has not begun


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured.

    model_bytes   of the checkpoint, about: as many layers as that takes
    limit_bytes   of the process, by the operating system
    options       fields of QuantizeOptions
    """

    model_bytes: int
    hidden_size: int
    intermediate_size: int
    limit_bytes: int
    options: Mapping[str, Any]

    @property
    def shape(self) -> Shape:
        """A Llama with as many layers as the size asks for."""
        hidden, inner = self.hidden_size, self.intermediate_size
        heads = hidden // 64
        kv_heads = max(1, heads // 4)
        layer = 2 * (hidden * 64 * 2 * (heads + kv_heads) + 3 * hidden * inner)
        layers = max(1, round(self.model_bytes / layer))
        return Shape(
            layers=layers, hidden_size=hidden, intermediate_size=inner, heads=heads,
            kv_heads=kv_heads,
        )  # fmt: skip


def measure(
    case: Case, folder: Path, kills: int, timeout_s: float, status: Callable[[str], None]
) -> dict[str, Any]:
    """Quantise in `folder`; with `kills` a second time, ended so often; the same bytes must result.

    The checkpoint and unfinished results stay in `folder`, so that the same call goes on with them
    where `timeout_s` was too short: "complete" is false then.  Raises MachineError, and HMTError
    where the program fails.
    """
    model = folder / "model"
    if not (model / "model.safetensors.index.json").exists():
        status("writing the checkpoint")
        write_random_model(model, case.shape)
        forget_pages(model)
    nbytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    found: dict[str, Any] = {
        "machine": describe(machine_for(folder)),
        "model_bytes": nbytes,
        "layers": case.shape.layers,
        "hidden_size": case.hidden_size,
        "intermediate_size": case.intermediate_size,
        "limit_bytes": case.limit_bytes,
        "options": dict(case.options),
    }
    whole = folder / "whole"
    if not whole.exists():
        status("quantising without a pause")
        found |= _account(_run(case, model, whole, timeout_s))
        if not found["complete"]:
            return found
    if kills:
        killed = folder / "killed"
        found["kills"] = _ended(case, model, killed, kills, found.get("seconds", 600), status)
        found["equal_bytes"] = _sums(killed) == _sums(whole)
    return found


def _run(case: Case, model: Path, out: Path, timeout_s: float) -> WatchedRun:
    command = [
        sys.executable, "-m", "hmt_bench.quantize_process", str(model), str(out),
        json.dumps(dict(case.options)),
    ]  # fmt: skip
    run = run_in_cgroup(command, case.limit_bytes, timeout_s, os.environ)
    if run.returncode not in (None, 0):
        raise HMTError(f"quantising {model} ended with {run.returncode}: {run.errors}")
    return run


def _account(run: WatchedRun) -> dict[str, Any]:
    """Time and memory of a run, the operating system's account beside the plan's."""
    facts: dict[str, Any] = {}
    for _, line in run.lines:
        facts |= json.loads(line)
    return {
        "complete": run.returncode == 0,
        "seconds": run.lines[-1][0] if run.lines else 0.0,
        "resident_peak_bytes": run.rss_bytes,
        "group_peak_bytes": run.group_bytes,
        **facts,
    }


def _ended(
    case: Case, model: Path, out: Path, kills: int, seconds: float, status: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Runs that are killed at random moments, and one that is not.

    Moments are drawn for work to be left at each: what is begun anew is a layer at most.
    """
    draw = random.Random(39)
    moments: list[dict[str, Any]] = []
    for number in range(kills):
        status(f"quantising, to be killed for the {number + 1}th time")
        lasts = _FIRST_S + draw.random() * max(1.0, 1.5 * (seconds - _FIRST_S) / kills)
        run = _run(case, model, out, lasts)
        done = [json.loads(line).get("done", 0) for _, line in run.lines]
        moments.append(
            {"after_s": lasts, "done": max(done, default=0), "complete": run.returncode == 0}
        )
        if run.returncode == 0:
            break
    if not moments[-1]["complete"]:
        status("quantising what is left")
        _run(case, model, out, 10 * seconds)
    return moments


def _sums(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found
