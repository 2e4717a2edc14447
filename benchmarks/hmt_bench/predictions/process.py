"""A run that was predicted first: `python -m hmt_bench.predictions.process FOLDER CASE`.

CASE is a `Case` as JSON, FOLDER where models are written.  Prints a JSON object: what was predicted
before the model was loaded, and what was measured then.
"""

import json
import os
import random
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from hmt.base.units import MIB, round_up
from hmt.contracts.model import PAGE_TOKENS
from hmt.contracts.request import Request, Sampling
from hmt.engine import Engine, EngineConfig, LoadedModel, Prepared, prepare
from hmt.engine.run_history import factors_of
from hmt.memory import peak_resident_bytes, resident_bytes
from hmt.planner import PlanOptions, smallest_budget
from hmt.planner.cost.cost_model import CostModel
from hmt.planner.cost.step_prediction import plan_kind
from hmt.planner.cost.workload import workload_of
from hmt_bench.predictions.cases import GPU_SHAPES, Case, folder_of

_ROOM_BYTES = 64 * MIB  # beside weights that all stay
_PROMPTS = 3
_CHUNK = 512  # prompt tokens in a step, at most


def run(case: Case, folder: Path) -> dict[str, Any]:
    """Predict the case, run it, and tell both."""
    path = folder_of(case, folder)
    with Engine(**_options(case, path)) as engine:
        prepared = prepare(path, engine.config, None, engine.devices, engine.device_left())
        predicted = _predicted(case, prepared, resident_bytes())
        with engine.load_model(path) as model:
            measured = _measured(case, model)
            if engine._device is not None:
                measured["device_bytes"] = engine._device.used_bytes()
    measured["peak_bytes"] = peak_resident_bytes()
    named = asdict(case) | {"name": case.name}
    return {"case": named, "predicted": predicted, "measured": measured}


def _options(case: Case, path: Path) -> dict[str, Any]:
    """What the engine is told; of host memory, what keeps the case's share of the weights."""
    each = round_up(case.prompt + case.tokens + _ahead(case), PAGE_TOKENS)
    options: dict[str, Any] = {
        "quantization": None if case.model in GPU_SHAPES else case.scheme,
        "context": each * case.users,
        "max_batch": case.users,
        "check_weights": False,
        "verify_reads": "never",
    }
    if case.gpu_memory is not None:
        return options | {
            "gpus": "0",
            "gpu_memory": case.gpu_memory,
            "host_memory": "60GiB",
            "disk_reader": "buffered",  # packs are small: their first layers come from the disk
        }
    config = EngineConfig.resolve(**options)
    demand = prepare(path, replace(config, gpu_memory_bytes=(0,))).demand
    least = smallest_budget(demand, PlanOptions(0, config.context))
    room = _ROOM_BYTES if case.kept == 1 else 0
    return options | {"host_memory": int(least + case.kept * demand.weight_bytes + room)}


def _ahead(case: Case) -> int:
    """Tokens that users may have decoded before the last prompt is through, two for each chunk."""
    return 2 * case.users * -(-case.prompt // _CHUNK)


def _predicted(case: Case, prepared: Prepared, taken_bytes: int) -> dict[str, Any]:
    """`taken_bytes`: of the process before loading."""
    plan, machine = prepared.plan, prepared.machine
    factors = factors_of(prepared.source.path.name).get(plan_kind(plan))
    costs = CostModel(workload_of(prepared.demand, plan), machine, factors)
    prediction = costs.predict(case.users, case.prompt + case.tokens // 2, case.prompt)
    weights = costs.decode(case.users, 0).nbytes
    streaming = converting = 0
    if plan.reserved.get("slots"):
        streaming = machine.streaming_bytes
        converting = machine.converting_bytes if plan.reserved.get("staging") else 0
    grown = machine.process_bytes + max(streaming, converting) + sum(plan.reserved.values())
    driver = 0 if machine.device is None else machine.device.driver_bytes
    return {
        "tokens_per_s": prediction.tokens_per_s,
        "ttft_s": prediction.ttft_s,
        "disk_bytes": weights["disk"] / case.users,
        "peak_bytes": taken_bytes + grown,
        "device_bytes": sum(plan.device.reserved.values()) + driver,
        "step": asdict(prediction.step),
        "prompt": asdict(prediction.prompt),
        "factors": None if factors is None else asdict(factors),
    }


def _measured(case: Case, model: LoadedModel) -> dict[str, Any]:
    """Rates, and bytes per token.

    ttft_s         of one prompt, with the machine to itself
    tokens_per_s   of all users, in steps that read no prompt
    """
    _answer(case, model, 4)  # fills slots, and compiles a GPU's kernels
    times = []
    for number in range(_PROMPTS):
        begin = time.perf_counter()
        model.infer(Request(input=_tokens(case.prompt, 100 + number), max_new_tokens=1))
        times.append(time.perf_counter() - begin)
    model.reset_summary()
    _answer(case, model, case.tokens)
    steps = model.summary().predicted
    assert steps is not None
    return {
        "tokens_per_s": steps.users / steps.actual_s,
        "ttft_s": median(times),
        "disk_bytes": steps.actual_disk_bytes,
    }


def _answer(case: Case, model: LoadedModel, tokens: int) -> None:
    """Let all users decode, and those whose prompts came first until the last one has as much."""
    ahead = _ahead(case) if case.users > 1 else 0
    requests = [
        Request(
            input=_tokens(case.prompt, user),
            max_new_tokens=tokens + ahead,
            ignore_eos=True,
            # Greedy answers of random weights go round in circles, and so would their experts.
            sampling=Sampling(temperature=1.0, seed=user),
        )
        for user in range(case.users)
    ]
    model.infer_batch(requests)


def _tokens(count: int, user: int) -> list[int]:
    """Each user has others: routers send the same ones to the same experts."""
    numbers = random.Random(count + user)
    return [numbers.randrange(16, 4000) for _ in range(count)]


def main() -> None:
    """Run the case that the command line names."""
    folder, case = sys.argv[1:]
    print(json.dumps(run(Case(**json.loads(case)), Path(folder))), flush=True)
    os._exit(0)  # what libraries do when they end is no part of the measurement


if __name__ == "__main__":
    main()
