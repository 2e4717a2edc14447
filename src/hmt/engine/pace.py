"""How fast the CPU runs what launches a GPU's steps: Python, and calls into torch.

On a host that is shared, a core's other thread may be a neighbour's.  There the same loop took 3.0
and 5.5 ms, and changed from one to the other within a tenth of a second; and so did prompts, which
are launched kernel by kernel.  So the pace is measured together with what was measured at it, and
again before something is predicted from that.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, TypeVar

import torch

from hmt.contracts.machine import Machine

if TYPE_CHECKING:
    from hmt.engine.engine import LoadedModel

T = TypeVar("T")

_CALLS, _TIMES = 100, 9
_SAME = 1.15  # or less, from the beginning of a measurement to its end
_ATTEMPTS = 6
_OF_THE_CPU = (
    "step_s", "row_s", "draw_s", "draw_row_s", "logit_s", "prompt_s", "bring_s",
    "layer_s", "prompt_layer_s", "piece_s", "prompt_latent_s", "prompt_experts_s",
    "apart_layer_s", "apart_experts_s", "apart_latent_s", "apart_latent_row_s",
    "held_experts_s", "missed_expert_s", "lookup_s", "read_block_s",
)  # fmt: skip


def pace_s() -> float:
    """Seconds of some such work, here and now; takes about 5 ms."""
    times = []
    for _ in range(_TIMES):
        begin = time.perf_counter()
        python_work()
        times.append(time.perf_counter() - begin)
    return median(times)


def pace_of(model: "LoadedModel") -> float:
    """The same on the thread that computes the model's steps."""
    return model._loop.call(pace_s)


def steadily(
    model: "LoadedModel", measure: Callable[[], T], attempts: int = _ATTEMPTS
) -> tuple[float, T]:
    """What `measure` finds while the pace stays as it is, and the pace before it.

    What is found at last counts, if it never stays.
    """
    before, found = pace_of(model), measure()
    for _ in range(attempts - 1):
        after = pace_of(model)
        if 1 / _SAME <= after / before <= _SAME:
            break
        before, found = pace_of(model), measure()
    return before, found


def at_pace(machine: Machine, now_s: float) -> Machine:
    """The machine as it is at another pace than that at which it was measured."""
    if not machine.pace or not now_s:
        return machine
    times = now_s / machine.pace
    return replace(
        machine,
        pace=now_s,
        device_launches={name: each * times for name, each in machine.device_launches.items()},
        **{name: getattr(machine, name) * times for name in _OF_THE_CPU},
    )


def python_work(number: int = 0) -> None:
    """Such work, about 0.3 ms of it; `number` changes nothing."""
    seen = {}
    for place in range(_CALLS):
        tensor = torch.empty(4, 16)
        part = tensor[:, 4:12]
        seen[place, part.dtype, part.stride()] = part.data_ptr() % 16
