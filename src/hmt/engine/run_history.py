"""What runs were predicted to take and what they took, and the factors that follow from it.

The last runs are kept, a line of JSON each, in a file beside the machine's rates.  Predictions of a
model are multiplied by the factor that its own runs have shown, by the kind of plan: the tiers in
which its weights live.  A factor is the moving average of the logarithms, the last runs counting
most: what one run says counts fully for the next one, since a model that was never run is 25% off
and chance between two runs of the same is 5 to 10%.
"""

import contextlib
import json
from collections.abc import Mapping
from math import exp, log
from typing import Any

from hmt.base.folders import cache_folder
from hmt.base.json_store import number_of, write_atomically
from hmt.contracts.machine import Machine
from hmt.contracts.plan import Plan
from hmt.engine.prediction_report import Predictor, StepTotals
from hmt.hardware.machine import fingerprint, probed
from hmt.planner import Demand
from hmt.planner.cost.step_prediction import RunFactors, plan_kind

_FILE = "runs.jsonl"
_KEPT = 200  # of all machines that share the folder
_LEAST_STEPS = 16  # of decoding: what is shorter was still warming up
_LEAST_PREFILL_TOKENS = 256
_NEW = 0.5  # the weight of each further run
_MOST = 8.0  # a factor beyond it, or below its inverse, is a mistake and not a calibration


def predictor_of(model: str, demand: Demand, plan: Plan, machine: Machine) -> Predictor:
    """What steps of `model` will take under `plan`, with what its own runs have shown."""
    return Predictor(demand, plan, machine, factors_of(model).get(plan_kind(plan)))


def keep(
    predictor: Predictor, plan: Plan, model: str, decoded: StepTotals, prefilled: StepTotals
) -> None:
    """Remember a run, if it tells anything.  Never fails: what cannot be written is not kept."""
    record: dict[str, Any] = {
        "machine": fingerprint(),
        "probed": probed(),
        "model": model,
        "plan": plan_kind(plan),
    }
    times = {
        "decode": (predictor.bare_decode_s(decoded), decoded.step_s),
        "prefill": (predictor.bare_prefill_s(prefilled), prefilled.step_s),
    }
    enough = {
        "decode": decoded.steps >= _LEAST_STEPS,
        "prefill": prefilled.tokens >= _LEAST_PREFILL_TOKENS,
    }
    told = {name: pair for name, pair in times.items() if enough[name] and all(pair)}
    if not told:
        return
    lines = _lines()[1 - _KEPT :]
    text = "\n".join([*lines, json.dumps(record | told)]) + "\n"
    write_atomically(cache_folder() / _FILE, text)


def factors_of(model: str) -> Mapping[str, RunFactors]:
    """What runs of `model` on this machine took over what was predicted, by kind of plan.

    Of runs since the machine was probed last; nothing of a model that never ran.
    """
    logs: dict[tuple[str, str], float] = {}
    here = fingerprint(), probed(), model
    for line in _lines():
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            record = json.loads(line)
            if (record["machine"], record["probed"], record["model"]) != here:
                continue
            for phase in ("decode", "prefill"):
                if phase in record:
                    predicted_s, actual_s = map(number_of, record[phase])
                    found = max(-log(_MOST), min(log(_MOST), log(actual_s / predicted_s)))
                    key = str(record["plan"]), phase
                    logs[key] = logs[key] + _NEW * (found - logs[key]) if key in logs else found
    return {
        kind: RunFactors(
            exp(logs.get((kind, "decode"), 0.0)), exp(logs.get((kind, "prefill"), 0.0))
        )
        for kind in {kind for kind, _ in logs}
    }


def _lines() -> list[str]:
    try:
        return (cache_folder() / _FILE).read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
