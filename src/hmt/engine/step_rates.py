"""What steps cost whatever they read: measured with the small model that comes with HMT.

Its layers are so small that most of a step's time is what every step of every model pays:
scheduling, choosing tokens, calls, and passing over activations.  What the model of cost predicts
without them is taken off; of the rest two numbers of layers tell a step's part from a layer's, and
two numbers of users a user's.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hmt.contracts.machine import Machine
from hmt.contracts.request import Request, Sampling
from hmt.engine.layer_rates import FEW, MANY, LayerRates, layer_rates, small_model
from hmt.engine.product_rates import faster_half
from hmt.planner.cost import CostModel
from hmt.planner.loads import loads_of

if TYPE_CHECKING:
    from hmt.engine.engine import LoadedModel

_USERS = 8
_PROMPT = 16
_SHORT, _LONG = 64, 512  # prompts of one step
_WARM_STEPS = 16
_MOST_STEPS = 400
_LIKELIEST = Sampling()
_SLOWLY_MEASURED = ("process_bytes", "apart_layer_s", "apart_experts_s", "apart_latent_s")
_OPTIONS: dict[str, Any] = {"host_memory": "256MiB", "context": 8192, "check_weights": False}


@dataclass(frozen=True, slots=True)
class StepRates:
    """See Machine; 0 where nothing was measured."""

    step_s: float = 0.0
    row_s: float = 0.0
    layer_s: float = 0.0
    number_s: float = 0.0
    prompt_layer_s: float = 0.0
    process_bytes: int = 0
    apart_layer_s: float = 0.0
    apart_experts_s: float = 0.0
    apart_latent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Beyond:
    """Seconds beyond what is predicted: of a token for one user, for several, and of prompts."""

    one: float
    several: float
    short: float
    long: float


def step_rates(
    machine: Machine,
    seconds: float,
    options: Mapping[str, Any] = MappingProxyType({}),
    *,
    whole: bool = True,
) -> StepRates:
    """What steps cost on `machine`, beyond what its other rates tell; `seconds` for each of eight.

    options   of an engine
    whole     measure also a process's memory (3 s), and without `options` layers one by one (3 s)

    Raises what loading raises.
    """
    bare = replace(
        machine,
        step_s=0.0, row_s=0.0, layer_s=0.0, number_s=0.0, prompt_layer_s=0.0,
        launch_s=0.0, device_number_s=0.0, prompt_launch_s=0.0,
        apart_layer_s=0.0, apart_experts_s=0.0, apart_latent_s=0.0,
    )  # fmt: skip
    few, _ = _measured(bare, FEW, seconds, options)
    many, width = _measured(bare, MANY, seconds, options)
    layers = MANY - FEW
    layer_s = max(0.0, (many.one - few.one) / layers)
    row_s = max(0.0, (few.several - few.one) / (_USERS - 1))
    short_s, long_s = (many.short - few.short) / layers, (many.long - few.long) / layers
    numbers_s = max(0.0, (long_s - short_s) / (_LONG - _SHORT))  # of a token
    apart = LayerRates()
    if whole and not options:
        apart = layer_rates(lambda folder: _apart_s(bare, folder, seconds))
    return StepRates(
        step_s=max(0.0, few.one - FEW * layer_s - row_s),
        row_s=row_s,
        layer_s=layer_s,
        number_s=numbers_s / width,
        prompt_layer_s=max(0.0, short_s - _SHORT * numbers_s),
        apart_layer_s=apart.apart_layer_s,
        apart_experts_s=apart.apart_experts_s,
        apart_latent_s=apart.apart_latent_s,
        process_bytes=process_bytes(options) if whole else 0,
    )


def _measured(
    machine: Machine, layers: int, seconds: float, options: Mapping[str, Any]
) -> tuple[_Beyond, int]:
    """With them: the width of the model."""
    # Not above: an engine asks for its machine.
    from hmt.engine.engine import Engine

    given = {**_OPTIONS, **options}
    with (
        small_model(layers) as folder,
        Engine(max_batch=_USERS, prefill_chunk=_LONG, **given) as engine,
    ):
        model = engine.load_model(folder)
        prepared = model.prepared
        costs = CostModel(loads_of(prepared.demand, prepared.plan), machine)
        beyond = _Beyond(
            decoding_s(model, 1, seconds) - costs.decode(1, 2 * _PROMPT).seconds,
            decoding_s(model, _USERS, seconds) - costs.decode(_USERS, 2 * _PROMPT).seconds,
            *(
                prompt_s(model, tokens, seconds) - costs.prompt(tokens, tokens / 2).seconds
                for tokens in (_SHORT, _LONG)
            ),
        )
        return beyond, prepared.model.spec.hidden_size


def completed(found: StepRates, before: StepRates) -> StepRates:
    """With what was measured before, where only a `whole` measurement has it."""
    kept = {name: getattr(before, name) for name in _SLOWLY_MEASURED if not getattr(found, name)}
    return replace(found, **kept)


def _apart_s(machine: Machine, folder: Path, seconds: float) -> float:
    """Seconds of a token beyond what is predicted, where layers are computed one by one."""
    from hmt.engine.engine import Engine

    with Engine(executor="plain", **_OPTIONS) as engine, engine.load_model(folder) as model:
        prepared = model.prepared
        costs = CostModel(loads_of(prepared.demand, prepared.plan), machine)
        return decoding_s(model, 1, seconds) - costs.decode(1, 2 * _PROMPT).seconds


def process_bytes(options: Mapping[str, Any]) -> int:
    """The most memory of a process that runs the model, beside its weights; 0 where it fails.

    What else the plan reserves may not have been touched: all of it counts as the process's.
    """
    module, given = "hmt.engine.own_memory", json.dumps({**_OPTIONS, **options})
    try:
        with small_model(FEW) as folder:
            command = [sys.executable, "-m", module, str(folder), given]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return int(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0


def decoding_s(
    model: "LoadedModel",
    users: int,
    seconds: float,
    sampling: Sampling = _LIKELIEST,
    before: Callable[["LoadedModel"], None] = lambda model: None,
    usual: Callable[[Many[float]], float] = faster_half,
) -> float:
    """A step of one token for each of `users`; `before` is called when they have begun.

    usual   which of the times it is
    """
    tokens = _WARM_STEPS + _MOST_STEPS
    request = Request(
        input=[20] * _PROMPT, max_new_tokens=tokens, ignore_eos=True, sampling=sampling
    )
    with ExitStack() as stack:
        streams = model.stream_batch([request] * users)
        for stream in streams:
            stack.enter_context(closing(stream))
        for _ in range(_WARM_STEPS):
            for stream in streams:
                next(stream)
        before(model)
        times: list[float] = []
        end = time.perf_counter() + seconds
        while not times or (len(times) < _MOST_STEPS - 1 and time.perf_counter() < end):
            begin = time.perf_counter()
            for stream in streams:
                next(stream)
            times.append(time.perf_counter() - begin)
    return usual(times)


def prompt_s(model: "LoadedModel", tokens: int, seconds: float) -> float:
    """A prompt of one step."""
    request = Request(input=[20] * tokens, max_new_tokens=1, ignore_eos=True)
    model.infer(request)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        begin = time.perf_counter()
        model.infer(request)
        times.append(time.perf_counter() - begin)
    return faster_half(times)
