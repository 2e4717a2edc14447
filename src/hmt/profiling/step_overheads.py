"""What steps cost beyond the bytes they read and what they compute: measured with small models.

A model of few layers and the same one of more layers tell a layer's overhead; one user and several
tell a sequence's; what is left is the step's: scheduling, sampling and Python.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from hmt.contracts.machine import ComputeRates, Machine
from hmt.contracts.request import Request
from hmt.planner import PlanOptions, smallest_budget
from hmt.planner.cost.cost_model import CostModel
from hmt.planner.cost.workload import workload_of
from hmt.profiling.probe_models import FEW, MANY, dense_model, small_model

if TYPE_CHECKING:
    from hmt.engine.api import LoadedModel

USERS = 8
OPTIONS: dict[str, Any] = {"host_memory": "256MiB", "context": 8192, "check_weights": False}
_PROMPT, _LONG_PROMPT = 24, 512
_ROUNDS, _WARM_STEPS, _STEPS = 3, 10, 100
_REPLAYS = 24
_LONG_ANSWER = 4096  # tokens, which take far longer than the replays in the middle of them


def cpu_overheads(machine: Machine) -> ComputeRates:
    """The CPU's rates of `machine`, with its overheads.  Raises what loading a model raises."""
    bare = replace(machine, cpu=_without_overheads(machine.cpu))
    with ExitStack() as stack:
        few, many = (stack.enter_context(_loaded(small_model, count)) for count in (FEW, MANY))
        decode = {
            (layers, users): _beyond(bare, model, users)
            for layers, model, users in ((FEW, few, 1), (MANY, many, 1), (FEW, few, USERS))
        }
        prompts = {layers: _prompt_beyond(bare, m) for layers, m in ((FEW, few), (MANY, many))}
    layer_s = max(0.0, (decode[MANY, 1] - decode[FEW, 1]) / (MANY - FEW))
    sequence_s = max(0.0, (decode[FEW, USERS] - decode[FEW, 1]) / (USERS - 1))
    return replace(
        machine.cpu,
        step_overhead_s=max(0.0, decode[FEW, 1] - FEW * layer_s - sequence_s),
        sequence_overhead_s=sequence_s,
        layer_overhead_s=layer_s,
        prefill_layer_overhead_s=max(0.0, (prompts[MANY] - prompts[FEW]) / (MANY - FEW)),
    )


def device_overheads(machine: Machine, options: Mapping[str, Any]) -> ComputeRates:
    """The same of the GPU of `machine`, whose other rates are known.

    options   of an engine, with the GPU
    """
    device = machine.devices[0]
    bare = replace(machine, devices=(replace(device, compute=_without_overheads(device.compute)),))
    bare = replace(bare, cpu=_without_overheads(machine.cpu))
    decode, prompts = {}, {}
    for layers in (FEW, MANY):
        with _loaded(dense_model, layers, options) as model:
            prompts[layers] = _prompt_beyond(bare, model)
            replayed_s = _replayed_s(model)
            decode[layers] = max(0.0, replayed_s - _costs(bare, model).decode(1, _PROMPT).seconds)
    layer_s = max(0.0, (decode[MANY] - decode[FEW]) / (MANY - FEW))
    return replace(
        device.compute,
        step_overhead_s=max(0.0, decode[FEW] - FEW * layer_s),
        layer_overhead_s=layer_s,
        prefill_layer_overhead_s=max(0.0, (prompts[MANY] - prompts[FEW]) / (MANY - FEW)),
    )


def disk_block_overhead_s(machine: Machine) -> float:
    """Seconds of a block that is read from the disk, beyond its bytes; `machine` knows the rest.

    Raises what loading a model raises.
    """
    with small_model(FEW) as folder, opened(folder, {}) as model:
        kept_s = _decoding_s(model, 1)
    with small_model(FEW) as folder:
        options = {"host_memory": memory_for(folder, 0.0, OPTIONS)}
        with opened(folder, options) as model:
            streamed_s = _decoding_s(model, 1)
            loads = workload_of(model.prepared.demand, model.prepared.plan)
    read_bytes = CostModel(loads, machine).decode(1, _PROMPT).nbytes["disk"]
    if not loads.read_blocks or not machine.disk_read_rate:
        return 0.0
    beyond_s = streamed_s - kept_s - read_bytes / machine.disk_read_rate
    return max(0.0, beyond_s) / loads.read_blocks


def memory_for(folder: Path, share: float, options: Mapping[str, Any]) -> int:
    """Bytes of host memory that keep a `share` of the weights resident."""
    from hmt.engine.config import EngineConfig
    from hmt.engine.loading.prepare import prepare

    given = {name: value for name, value in options.items() if name != "host_memory"}
    config = EngineConfig.resolve(**given)
    demand = prepare(folder, config).demand
    least = smallest_budget(demand, PlanOptions(0, config.context))
    return int(least + share * demand.weight_bytes)


def prompt_tokens(count: int, user: int = 0) -> list[int]:
    """Different tokens for each user, since routers send the same one to the same experts."""
    return [20 + (31 * at + 17 * user) % 480 for at in range(count)]


def _without_overheads(rates: ComputeRates) -> ComputeRates:
    return replace(
        rates,
        step_overhead_s=0.0,
        sequence_overhead_s=0.0,
        layer_overhead_s=0.0,
        prefill_layer_overhead_s=0.0,
    )


@contextmanager
def opened(folder: Path, options: Mapping[str, Any]) -> "Iterator[LoadedModel]":
    """The model in `folder`, in a new engine.  Raises what loading it raises."""
    # Not above: an engine asks for its machine.
    from hmt.engine.engine import Engine

    with Engine(**{**OPTIONS, "max_batch": USERS, **options}) as engine:
        yield engine.load_model(folder)


@contextmanager
def _loaded(
    model: Callable[[int], AbstractContextManager[Path]],
    layers: int,
    options: Mapping[str, Any] | None = None,
) -> "Iterator[LoadedModel]":
    with model(layers) as folder, opened(folder, options or {}) as loaded:
        yield loaded


def _beyond(bare: Machine, model: "LoadedModel", users: int) -> float:
    """Seconds of a decode step beyond what is predicted."""
    predicted_s = _costs(bare, model).decode(users, _PROMPT + _STEPS / 2).seconds
    return max(0.0, _decoding_s(model, users) - predicted_s)


def _prompt_beyond(bare: Machine, model: "LoadedModel") -> float:
    """The same of a prompt of one chunk or more."""
    times = []
    for number in range(_ROUNDS + 1):
        request = Request(input=prompt_tokens(_LONG_PROMPT, number), max_new_tokens=1)
        begin = time.perf_counter()
        model.infer(request)
        times.append(time.perf_counter() - begin)
    predicted_s = _costs(bare, model).predict(1, _LONG_PROMPT, _LONG_PROMPT).ttft_s
    return max(0.0, median(times[1:]) - predicted_s)  # the first one warms up


def _decoding_s(model: "LoadedModel", users: int) -> float:
    """A step of one token for each of `users`: the median."""
    requests = [
        Request(input=prompt_tokens(_PROMPT, user), max_new_tokens=_STEPS, ignore_eos=True)
        for user in range(users)
    ]
    with ExitStack() as stack:
        streams = model.stream_batch(requests)
        for stream in streams:
            stack.enter_context(closing(stream))
        times: list[float] = []
        for step in range(_STEPS - 1):
            begin = time.perf_counter()
            for stream in streams:
                next(stream)
            if step >= _WARM_STEPS:
                times.append(time.perf_counter() - begin)
    return median(times)


def _replayed_s(model: "LoadedModel") -> float:
    """A captured step of one token, repeated between those of a request that has not ended.

    Replays read and write the pages of its sequence.
    """
    ids = prompt_tokens(_PROMPT, 0)
    request = Request(input=ids, max_new_tokens=_LONG_ANSWER, ignore_eos=True)
    with closing(model.stream(request)) as stream:
        for _ in range(_STEPS):
            next(stream)
        return model.replayed_s(_REPLAYS)


def _costs(machine: Machine, model: "LoadedModel") -> CostModel:
    prepared = model.prepared
    return CostModel(workload_of(prepared.demand, prepared.plan), machine)
