"""Runs that were predicted first: `python -m hmt.bench.predictions.process FOLDER CASES`.

CASES is a JSON list of `Case`s, FOLDER where their models are.  For each it prints a JSON object:
what was predicted before the model was loaded, and what was measured then; and what is predicted at
the paces that the CPU had meanwhile.
"""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from hmt.base.units import MIB, round_up
from hmt.bench.predictions.cases import GPU_SHAPES, WRITTEN, Case, folder_of
from hmt.bench.predictions.meanwhile import Meanwhile
from hmt.bench.traced_curve import DeviceCache, traced_curve
from hmt.contracts.blocks import TRUNK
from hmt.contracts.machine import Machine
from hmt.contracts.model import PAGE_TOKENS
from hmt.contracts.plan import Tier
from hmt.contracts.request import Request, Sampling
from hmt.engine import (
    Engine,
    EngineConfig,
    ExpertAccount,
    LoadedModel,
    Prepared,
    RunSummary,
    prepare,
)
from hmt.engine.by_turns import middle_half
from hmt.engine.cpu_pace import CpuPace, PaceProcess, at_cpu_pace
from hmt.engine.machine import measure_drive_again
from hmt.engine.pace import at_pace
from hmt.memory import peak_resident_bytes, resident_bytes
from hmt.planner import PlanOptions, smallest_budget
from hmt.planner.cost import CostModel
from hmt.planner.loads import loads_of
from hmt.planner.predicted import Prediction
from hmt.planner.routing import HitCurve

_WARM_TOKENS = 24
_TRACED_TOKENS, _TRACED_STEPS = 64, 256
_TRACED_TEXTS, _GPU_TRACED_TEXTS = 4, 8  # as many as decode at once where experts are cached
_MOST_WARMING, _MOST_ANSWERS = 12, 4  # prompts, and answers
_REPLAYS = 12
_GUESSED = 36
_PROMPTS, _PROMPTS_S = 5, 2.0  # alone, of which those in the middle count
_PACE_S, _LOOK_S, _GPU_LOOK_S = 0.1, 0.25, 0.1
_USUAL_CHUNK = 64  # or more
_DRIVE_S = 0.5
_ROOM_BYTES = 64 * MIB  # beyond what a budget needs, where all is kept


def run(case: Case, folder: Path) -> dict[str, Any]:
    """Predict, load, measure."""
    path = folder_of(case, folder)
    # A drive that others use, too: what it gives now is predicted with.
    reads = case.kept < 1
    before_rate = measure_drive_again(path, _DRIVE_S) if reads else 0.0
    with ExitStack() as stack:
        engine = stack.enter_context(Engine(**_options(case, path)))
        pace: Callable[[], CpuPace] = CpuPace
        if case.gpu_memory is None:
            pace = partial(stack.enter_context(PaceProcess()).measured, _PACE_S)
        prepared = prepare(path, engine.config, None, engine._device, engine._device_left())
        # Which libraries there are depends on the model's family.
        taken, most = resident_bytes(), peak_resident_bytes()
        hits = _curve(case, folder, prepared)
        predict = partial(_predicted, case, prepared, (taken, most), hits)
        predicted = predict([pace()] * 2)
        memory = {"opened": _taken(engine)}
        with engine.load_model(path) as model:
            memory["loaded"] = _taken(engine)
            measured = _measured(case, model, pace)
            before, predicted = predicted, predict(measured["paces"])
            measured["paces"] = list(map(_plain, measured["paces"]))
            if engine._device is not None:
                memory["answered"] = _taken(engine)
                measured["device_bytes"] = memory["answered"][0]
                measured["device_memory"] = memory
    peak_bytes = peak_resident_bytes()
    drive = {}
    if reads:
        after_rate = measure_drive_again(path, _DRIVE_S)
        drive = {"drive": {"before": before_rate, "after": after_rate}}
    return drive | {
        "case": asdict(case) | {"name": case.name},
        "predicted_before": before,
        "predicted": predicted,
        "measured": measured | {"peak_bytes": peak_bytes},
    }


def _taken(engine: Engine) -> tuple[int, int]:
    """Bytes of the GPU that this process has, and those of them that torch has."""
    device = engine._device
    return (0, 0) if device is None else (device.used_bytes(), device.kept_bytes())


def _options(case: Case, path: Path) -> dict[str, Any]:
    """What the engine is told; of host memory, what keeps the case's share of the weights."""
    each = round_up(case.prompt + case.tokens + _ahead(case), PAGE_TOKENS)
    options: dict[str, Any] = {
        "quantization": None if case.model in GPU_SHAPES else case.scheme,
        "context": each * case.users,
        "max_batch": case.users,
        "prefill_chunk": case.chunk,
        "check_weights": False,
        "verify_reads": "never",
    }
    if case.gpu_memory is not None:
        return options | {
            "gpu_id": "0",
            "gpu_memory": case.gpu_memory,
            "host_memory": "60GiB",
            "disk_reader": "buffered",  # packs are small: their first layers come from the drive
        }
    config = EngineConfig.resolve(**options)
    demand = prepare(path, replace(config, gpu_memory_bytes=0)).demand
    least = smallest_budget(demand, PlanOptions(0, config.context))
    room = _ROOM_BYTES if case.kept == 1 else 0
    return options | {"host_memory": int(least + case.kept * demand.weight_bytes + room)}


def _ahead(case: Case) -> int:
    """Tokens that a user may decode while the prompts of others are computed; and replays."""
    more = _REPLAYS if case.gpu_memory is not None else 0
    if case.users == 1:
        return 1 + more
    return more + 2 * case.users * -(-case.prompt // (case.chunk or _USUAL_CHUNK))


def _curve(case: Case, folder: Path, prepared: Prepared) -> HitCurve | None:
    """Hits on a trace of the model's own routing, as `hmt plan --routing` has them.

    Random routers choose neither evenly nor like trained ones.  The trace is recorded once, by a
    process of its own.
    """
    shape = {**WRITTEN, **GPU_SHAPES}.get(case.model)
    if shape is None or not shape.experts:
        return None
    trace = folder / f"{case.model}.{_texts(case)}-texts.trace.jsonl"
    if not trace.exists():
        command = [sys.executable, "-m", "hmt.bench.predictions.process", str(folder), str(trace)]
        given = json.dumps(asdict(case))
        subprocess.run([*command, given], check=True, stdout=subprocess.DEVNULL)
    device, cache, suffix = prepared.plan.device, None, ".curve.json"
    if device.expert_slots:
        cache = DeviceCache(device.expert_slots, device.link_share)
        suffix = f".{cache.slots}-slots-{cache.link_share:.2f}{suffix}"
    found = trace.with_suffix(suffix)  # replaying it for each run would take half a minute
    if not found.exists():
        found.write_text(json.dumps(asdict(traced_curve(trace, cache))))
    kept = json.loads(found.read_text())
    return HitCurve(tuple(map(tuple, kept["points"])), kept["origin"], kept["apart"])


def _texts(case: Case) -> int:
    return _GPU_TRACED_TEXTS if case.model in GPU_SHAPES else _TRACED_TEXTS


def record(case: Case, folder: Path, trace: Path) -> None:
    """Write which experts the case's model chooses while it decodes."""
    path = folder_of(case, folder)
    texts, tokens = _texts(case), _TRACED_STEPS
    alike = replace(
        case, kept=1.0, users=texts, prompt=_TRACED_TOKENS, tokens=tokens, gpu_memory=None
    )
    options = _options(alike, path)
    with Engine(**options | {"trace_experts": trace}) as engine:
        model = engine.load_model(path)
        _answers(alike, model, texts, _TRACED_TOKENS, tokens)


def _predicted(
    case: Case,
    prepared: Prepared,
    process_bytes: tuple[int, int],
    hits: HitCurve | None,
    paces: Sequence[float | CpuPace],
) -> dict[str, Any]:
    """See `_measured`; and by part, what a step and a prompt are made of.

    process_bytes   that it has before loading, and the most it has had
    paces           of the CPU before prompts, and before steps
    """
    demand = prepared.demand if hits is None else replace(prepared.demand, hits=hits)
    loads = loads_of(demand, prepared.plan)
    reading, decoding = (
        CostModel(loads, _at(prepared.machine, pace), drawn=_draws(case)) for pace in paces
    )
    found: Prediction = decoding.predict(case.users, _context(case), case.prompt)
    prompt = reading.predict(case.users, _context(case), case.prompt)
    found = replace(found, prompt=prompt.prompt, ttft_s=prompt.ttft_s)
    costs = decoding
    weights = costs.decode(case.users, 0).nbytes
    (taken, most), reserved = process_bytes, prepared.plan.reserved
    grown = prepared.machine.process_bytes + _streaming_bytes(prepared) + sum(reserved.values())
    grown -= _on_gpu_alone(prepared) * reserved["activations"]  # the CPU's, never touched
    return {
        "tokens_per_s": found.tokens_per_s,
        "ttft_s": found.ttft_s,
        "host_bytes": (weights["CPU"] + weights["link"]) / case.users,
        "disk_bytes": weights["disk"] / case.users,
        "link_bytes": weights["link"] / case.users,
        "peak_bytes": max(most, taken + grown),
        "device_bytes": sum(prepared.plan.device.reserved.values())
        + prepared.machine.context_bytes,
        "step": asdict(found.step),
        "prompt": asdict(found.prompt),
        "reserved": dict(prepared.plan.reserved),
        "chunk": prepared.plan.prefill_chunk,
    }


def _on_gpu_alone(prepared: Prepared) -> bool:
    """Whether the CPU computes no part of any layer."""
    plan, layers = prepared.plan, range(prepared.model.spec.layers + 1)
    there = plan.device.computes | {b for b, home in plan.homes.items() if home is Tier.DEVICE}
    return plan.device.stages >= set(layers) and all(
        block in there for block in plan.homes if block.layer != TRUNK
    )


def _at(machine: Machine, pace: float | CpuPace) -> Machine:
    return at_pace(machine, pace) if isinstance(pace, float) else at_cpu_pace(machine, pace)


def _plain(pace: float | CpuPace) -> float | dict[str, float]:
    return pace if isinstance(pace, float) else asdict(pace)


def _streaming_bytes(prepared: Prepared) -> int:
    """What a process takes besides where weights come from the drive."""
    machine, reserved = prepared.machine, prepared.plan.reserved
    if not reserved.get("slots"):
        return 0
    converted = machine.converting_bytes if reserved.get("staging") else 0
    return max(machine.streaming_bytes, converted)


def _draws(case: Case) -> bool:
    """Greedy answers of random weights go round in circles, and so would their experts."""
    return case.model in WRITTEN or case.model in GPU_SHAPES


def _context(case: Case) -> int:
    """Of each user, on average, while all of them decode."""
    return case.prompt + case.tokens // 2 + _ahead(case) // 8


def _measured(case: Case, model: LoadedModel, pace: Callable[[], CpuPace]) -> dict[str, Any]:
    """Rates, and bytes per token by link.

    ttft_s    of one prompt, with the machine to itself; first_ttft_s when its length came first
    tokens_per_s   of all users, while all of them decode
    paces     of the CPU meanwhile, of both; where a GPU computes, of Python alone
    pace_changed   see Meanwhile.changed: the larger one of both
    """
    # A GPU's kernels are compiled for a prompt's size when it first comes; slots are filled, and
    # what is read is converted, when it first is.
    first = case.gpu_memory is not None or case.kept < 1
    warm = case.prompt if first else _WARM_TOKENS
    first_ttft_s = _answers(case, model, 1, warm, 1)[0] if first else 0.0
    for _ in range(_MOST_WARMING):
        converting = model.summary().prompt.converted_s
        _answers(case, model, 1, warm, 1)
        if model.summary().prompt.converted_s == converting:
            break
    # So many that a GPU has ceased to guess what is drawn.
    guessed = min(_GUESSED, case.tokens) if case.gpu_memory is not None else 4
    _answers(case, model, case.users, warm, guessed)
    # An expert that no prompt has chosen takes 20 to 60 ms when it is first read.
    streams = case.kept < 1 and model.summary().generation.experts
    for answer in range(_MOST_ANSWERS if streams else 0):
        _answers(case, model, case.users, warm, case.tokens, seed=100 * (answer + 1))
        if not model.summary().generation.converted_s:
            break
    model.reset_summary()
    on_gpu, chain = case.gpu_memory is not None, dict[str, float]()
    answers = partial(_answers, case, model, case.users, case.prompt, case.tokens, chain)
    if on_gpu:
        pace = CpuPace  # of Python alone, which launches what the GPU computes
    every_s = _GPU_LOOK_S if on_gpu else _LOOK_S if case.kept == 1 else None
    with Meanwhile(model, pace, None if on_gpu else every_s) as seen:
        ttft_s = _usual_first_s(case, model, seen)
    reading, changed = seen.pace, seen.changed
    with Meanwhile(model, pace, every_s) as seen:
        _, (rate, summary) = answers(seen)
    decoding = seen.pace
    phase, experts = summary.generation, _experts(summary)
    return {
        "tokens_per_s": rate,
        "ttft_s": ttft_s,
        "first_ttft_s": first_ttft_s,
        "paces": [pace.calls_s if on_gpu else pace for pace in (reading, decoding)],
        "pace_changed": max(changed, seen.changed),
        **chain,
        **({} if experts is None else {"experts": asdict(experts)}),
        "host_bytes": phase.host_bytes / phase.tokens,
        "disk_bytes": phase.disk_bytes / phase.tokens,
        "link_bytes": phase.link_bytes / phase.tokens,
        "used_bytes": sum(summary.used_bytes.values()),
        "drive_s": phase.drive_s / phase.seconds,
        "waited": phase.waited_s / phase.seconds,
        "kernels": phase.kernel_s / phase.seconds,
    }


def _usual_first_s(case: Case, model: LoadedModel, seen: Meanwhile) -> float:
    """Seconds to the first token of one user; of long prompts, of few."""
    times: list[float] = []
    while len(times) < _PROMPTS and sum(times) < _PROMPTS_S:
        # A GPU's prompts are launched in a tenth of a second, and the pace changes as soon; while
        # the drive brings weights, nobody looks at it (see Meanwhile).
        if case.gpu_memory is not None or case.kept < 1:
            seen.look()
        times.append(_answers(case, model, 1, case.prompt, 1, None, seen)[0])
    return middle_half(times)


def _answers(
    case: Case,
    model: LoadedModel,
    users: int,
    prompt: int,
    tokens: int,
    chain: dict[str, float] | None = None,
    seen: Meanwhile | None = None,
    seed: int = 0,
) -> tuple[float, tuple[float, RunSummary]]:
    """Seconds to the first tokens; tokens per second from there on, and what these cost.

    `seen` looks at the CPU's pace from the first tokens on.  Into `chain` goes what the GPU alone
    takes for a step, one of many in a row and by itself.
    """
    requests = [
        Request(
            input=_text(prompt, user),
            max_new_tokens=tokens + (_ahead(case) - 1 if tokens > 4 else 0),
            ignore_eos=True,
            sampling=Sampling(temperature=1.0, seed=seed + user) if _draws(case) else Sampling(),
        )
        for user in range(users)
    ]
    clock = time.perf_counter if seen is None else seen.clock
    begin = clock()
    with ExitStack() as stack:
        streams = [stack.enter_context(closing(s)) for s in model.stream_batch(requests)]
        for stream in streams:
            next(stream)
        first = clock()
        if tokens == 1:
            return first - begin, (0.0, model.summary())
        # Those whose prompts came first have decoded meanwhile: the last one sets the pace.
        _next(streams)
        if seen is not None:
            seen.begin()
        # On the thread of steps, between two of them.  The streams still hold what was computed
        # before: when they were counted, a step of sixteen and more took no time.
        before, second = model._loop.call(partial(_count_anew, model, clock))
        for _ in range(tokens - 2):
            _next(streams)
        end, now = model._loop.call(lambda: (clock(), model._summary()))
        summary = _with_brought(now, before)
        if chain is not None and case.gpu_memory is not None:
            chain.update(zip(("replayed_s", "alone_s"), model.replayed_s(_REPLAYS), strict=True))
        return first - begin, (now.generation.tokens / (end - second), summary)


def _count_anew(model: LoadedModel, clock: Callable[[], float]) -> tuple[RunSummary, float]:
    """Count from zero; what was counted until now, and when that was."""
    before = model._summary()
    model._core.reset_account()
    return before, clock()


def _text(tokens: int, user: int) -> list[int]:
    """Tokens are what text is made of, to routers; each user has others."""
    numbers = random.Random(tokens + user)
    return [numbers.randrange(16, 4000) for _ in range(tokens)]


def _with_brought(summary: RunSummary, before: RunSummary) -> RunSummary:
    """`summary` with what kernels have fetched since then, which no copy counts: of experts.

    The CPU's count has the whole of those of which a part came over the link.
    """
    now, then = _experts(summary), _experts(before)
    if now is None or then is None or summary.device is None:
        return summary
    since = ExpertAccount(
        now.found - then.found, now.brought - then.brought, now.left - then.left, now.nbytes,
        now.cut - then.cut,
    )  # fmt: skip
    phase = summary.generation
    generation = replace(
        phase,
        link_bytes=phase.link_bytes + round((since.brought + since.cut) * since.nbytes),
        host_bytes=phase.host_bytes + since.brought * since.nbytes,
    )
    device = replace(summary.device, experts=since)
    return replace(summary, generation=generation, device=device)


def _experts(summary: RunSummary) -> ExpertAccount | None:
    return None if summary.device is None else summary.device.experts


def _next(streams: list[Any]) -> None:
    """The next token of each."""
    for stream in streams:
        next(stream)


def main() -> None:
    """See the module's text."""
    folder, *trace, cases = sys.argv[1:]
    if trace:
        record(Case(**json.loads(cases)), Path(folder), Path(trace[0]))
        os._exit(0)
    for case in json.loads(cases):
        print(json.dumps(run(Case(**case), Path(folder))), flush=True)
    os._exit(0)  # what libraries do when they end is no part of the measurement


if __name__ == "__main__":
    main()
