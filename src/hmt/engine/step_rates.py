"""What steps cost whatever they read: what was measured, and how small models are run for it.

The CPU is measured in cpu_step_rates, a GPU in device_steps.
"""

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hmt.base.errors import HMTError
from hmt.contracts.machine import Machine
from hmt.contracts.request import Request, Sampling
from hmt.engine.by_turns import middle_half
from hmt.engine.probe_models import FEW, small_model
from hmt.planner import PlanOptions, smallest_budget

if TYPE_CHECKING:
    from hmt.engine.engine import LoadedModel

USERS = 8
_PROMPT = 24
_LONG_CONTEXT = 1536  # two pieces or more
SHORT, LONG = 64, 512  # prompts of one step
TWO_PIECES = 2 * LONG
_WARM_STEPS = 16
_LIKELIEST = Sampling()
_MOST_STEPS = 400
_SLOWLY_MEASURED = (
    "process_bytes", "apart_layer_s", "apart_experts_s", "apart_latent_s", "cold_calls",
    "apart_latent_row_s",
    "held_experts_s", "missed_expert_s", "streaming_bytes", "converting_bytes", "cpu_in_layers",
    "lookup_s",
    "prompt_latent_s", "latent_number_s", "prompt_experts_s", "expert_number_s",
)  # fmt: skip
# Better known where layers one by one and a wider model were measured, too.
_BY_A_WHOLE_PROBE = ("number_s", "read_block_s", "read_alone_s")
OPTIONS: dict[str, Any] = {"host_memory": "256MiB", "context": 8192, "check_weights": False}


@dataclass(frozen=True, slots=True)
class StepRates:
    """See Machine; 0 where nothing was measured."""

    step_s: float = 0.0
    row_s: float = 0.0
    layer_s: float = 0.0
    number_s: float = 0.0
    prompt_layer_s: float = 0.0
    piece_s: float = 0.0
    prompt_s: float = 0.0
    prompt_experts_s: float = 0.0
    expert_number_s: float = 0.0
    prompt_latent_s: float = 0.0
    latent_number_s: float = 0.0
    process_bytes: int = 0
    apart_layer_s: float = 0.0
    apart_experts_s: float = 0.0
    apart_latent_s: float = 0.0
    apart_latent_row_s: float = 0.0
    cold_calls: dict[str, float] = field(default_factory=dict)
    read_block_s: float = 0.0
    read_alone_s: float = 0.0
    held_experts_s: float = 0.0
    missed_expert_s: float = 0.0
    lookup_s: float = 0.0
    streaming_bytes: int = 0
    converting_bytes: int = 0
    cpu_in_layers: dict[str, float] = field(default_factory=dict)


def without_fixed(machine: Machine) -> Machine:
    """The machine as if steps cost nothing but what they read and compute."""
    return replace(
        machine,
        step_s=0.0, row_s=0.0, layer_s=0.0, number_s=0.0, prompt_layer_s=0.0,
        launch_s=0.0, device_number_s=0.0, prompt_launch_s=0.0,
        apart_layer_s=0.0, apart_experts_s=0.0, apart_latent_s=0.0, apart_latent_row_s=0.0,
        held_experts_s=0.0, missed_expert_s=0.0, lookup_s=0.0, read_block_s=0.0, read_alone_s=0.0,
        piece_s=0.0, prompt_s=0.0, prompt_latent_s=0.0, latent_number_s=0.0,
        prompt_experts_s=0.0, expert_number_s=0.0, cpu_in_layers={},
    )  # fmt: skip


def completed(found: StepRates, before: StepRates) -> StepRates:
    """With what was measured before, where only a `whole` measurement has it, or has it better."""
    kept = {name: getattr(before, name) for name in _SLOWLY_MEASURED if not getattr(found, name)}
    if before.cold_calls and not found.cold_calls:
        kept |= {name: getattr(before, name) for name in _BY_A_WHOLE_PROBE}
    return replace(found, **kept)


def process_bytes(
    options: Mapping[str, Any],
    model: Callable[[int], AbstractContextManager[Path]] = small_model,
    kept: float = 1.0,
    layers: int = FEW,
) -> int:
    """The most memory of a process that runs a model, beside its weights; 0 where it fails.

    What else the plan reserves may not have been touched: all of it counts as the process's.
    kept   the share of the weights that memory keeps; the others are streamed, and prompts are so
           long that the whole plan is touched, and does not count
    """
    streams = kept < 1
    module, given = "hmt.engine.own_memory", {**OPTIONS, **options}
    given |= {"context": _LONG_CONTEXT} if streams else {}
    tokens = _LONG_CONTEXT - 2 * _PROMPT if streams else _PROMPT
    try:
        with model(layers) as folder:
            if streams:
                given["host_memory"] = memory_for(folder, kept, given)
            command = [sys.executable, "-m", module, str(folder), json.dumps(given), str(tokens)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return int(done.stdout.split()[streams])
    except (HMTError, OSError, ValueError, subprocess.SubprocessError):
        return 0


def memory_for(folder: Path, kept: float, options: Mapping[str, Any]) -> int:
    """Bytes of host memory that keep a share of the weights."""
    from hmt.engine.config import EngineConfig
    from hmt.engine.loading import prepare

    given = {name: value for name, value in options.items() if name != "host_memory"}
    config = EngineConfig.resolve(**given)
    demand = prepare(folder, config).demand
    return int(smallest_budget(demand, PlanOptions(0, config.context)) + kept * demand.weight_bytes)


def decoding_s(
    model: "LoadedModel",
    users: int,
    seconds: float,
    sampling: Sampling = _LIKELIEST,
    before: Callable[["LoadedModel"], None] = lambda model: None,
    usual: Callable[[Many[float]], float] = middle_half,
    warm: int = _WARM_STEPS,
) -> float:
    """A step of one token for each of `users`; `before` is called when they have begun.

    usual   which of the times it is
    warm    steps that are not counted
    """
    tokens = warm + _MOST_STEPS
    requests = [
        Request(
            input=text(_PROMPT, user), max_new_tokens=tokens, ignore_eos=True, sampling=sampling
        )
        for user in range(users)
    ]
    with ExitStack() as stack:
        streams = model.stream_batch(requests)
        for stream in streams:
            stack.enter_context(closing(stream))
        for _ in range(warm):
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


def slope(taken: Many[tuple[float, float]]) -> tuple[float, float]:
    """How much each unit adds, 0 or more, and what there is at none of them, of (units, amount).

    Of the straight line nearest to all of them, of which relative errors count: of a step of one
    user a tenth is as much as of one of many.
    """
    weights = [1 / max(amount, 1e-9) ** 2 for _, amount in taken]
    x, y = (sum(w * each for w, each in zip(weights, axis, strict=True)) / sum(weights)
            for axis in zip(*taken, strict=True))  # fmt: skip
    spread = sum(w * (at - x) ** 2 for w, (at, _) in zip(weights, taken, strict=True))
    both = sum(w * (at - x) * (s - y) for w, (at, s) in zip(weights, taken, strict=True))
    each = max(0.0, both / spread)
    return each, y - each * x


def text(tokens: int, user: int = 0) -> list[int]:
    """Different tokens, since routers send the same one to the same experts; so for each user."""
    numbers = random.Random(1000 * tokens + user)
    return [numbers.randrange(20, 500) for _ in range(tokens)]
