"""What steps on a GPU cost whatever they read: two chains, of the CPU and of the GPU.

The CPU schedules a step, launches it and chooses its tokens; the GPU computes it.  The likeliest
tokens are known on the GPU, so the next step begins before the CPU has seen them: then the longer
chain counts.  Tokens that are drawn are the CPU's, and the next step waits for them: then it is the
sum.  So each chain is measured by itself, with the small model that comes with HMT: the GPU's by
replaying a captured step, the CPU's from steps whose GPU has less to do, and what drawing adds from
what steps take beyond the GPU's.  Prompts are launched kernel by kernel while the GPU computes what
was launched before: of them, too, the longer chain counts.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hmt.contracts.machine import Machine
from hmt.contracts.request import Sampling
from hmt.engine.layer_rates import FEW, MANY, small_experts, small_model
from hmt.engine.own_device_memory import driver_bytes
from hmt.engine.product_rates import usual_s
from hmt.engine.sampler import SamplerState
from hmt.engine.step_rates import decoding_s, process_bytes, prompt_s
from hmt.kernels import ops
from hmt.planner.cost import CostModel
from hmt.planner.loads import loads_of

if TYPE_CHECKING:
    from hmt.engine.engine import LoadedModel

_USERS = 8
_PROMPT = 16
_SHORT = 64  # a prompt of one step that the GPU computes sooner than it is launched
_REPLAYS = 24
_LOGITS, _ROWS = 1 << 15, 8
_DRAWN = Sampling(temperature=1.0, seed=1)
_CPU = ("step_s", "row_s", "draw_s", "draw_row_s", "prompt_s", "prompt_launch_s")
_GPU = ("device_step_s", "launch_s", "expert_launch_s", "expert_prompt_launch_s")
_FIXED = (*_CPU, *_GPU)


@dataclass(frozen=True, slots=True)
class DeviceSteps:
    """See Machine; 0 where nothing was measured.

    step_s, row_s, draw_s, draw_row_s, prompt_s   of the CPU that steps a GPU
    """

    step_s: float = 0.0
    row_s: float = 0.0
    draw_s: float = 0.0
    draw_row_s: float = 0.0
    logit_s: float = 0.0
    device_step_s: float = 0.0
    launch_s: float = 0.0
    expert_launch_s: float = 0.0
    prompt_s: float = 0.0
    prompt_launch_s: float = 0.0
    expert_prompt_launch_s: float = 0.0
    process_bytes: int = 0
    context_bytes: int = 0

    def slower(self, factor: float) -> "DeviceSteps":
        """With times that are so many times as long; those of logits are as long."""
        times = {name: getattr(self, name) * factor for name in _FIXED}
        return replace(self, **times)

    def of(self, machine: Machine) -> Machine:
        """The machine with what is known."""
        known = {name: value for name, value in asdict(self).items() if value}
        gpu = dict.fromkeys(_GPU, 0.0)
        return replace(machine, **(gpu | known))


@dataclass(frozen=True, slots=True)
class _Chains:
    """Of a small model: seconds for one user, and for several.

    device    of the GPU for a step, beyond what is predicted of what it reads
    likeliest, drawn   from one step's tokens to the next one's
    replayed  as `device`, and nothing taken off
    prompt    of a short one
    """

    device: tuple[float, float]
    replayed: tuple[float, float]
    likeliest: tuple[float, float]
    drawn: tuple[float, float]
    prompt: float
    vocabulary: int


def device_steps(
    machine: Machine, seconds: float, options: Mapping[str, Any], *, whole: bool = True
) -> DeviceSteps:
    """What steps cost on the GPU of `machine`, whose other rates are known.

    seconds   for each of a dozen measurements
    options   of an engine, with the GPU
    whole     measure also what the process takes of both memories, in one of its own (half a
              minute: kernels are loaded anew)

    Raises what loading a small model raises.
    """
    few = _chains(small_model, FEW, machine, seconds, options)
    many = _chains(small_model, MANY, machine, seconds, options)
    sparse = _chains(small_experts, FEW, machine, seconds, options)
    launch_s = max(0.0, (many.device[0] - few.device[0]) / (MANY - FEW))
    prompt_launch_s = max(0.0, (many.prompt - few.prompt) / (MANY - FEW))
    logit_s = _logit_s(seconds)
    # Of the CPU's chain a GPU with little to do hides nothing.
    step_s, row_s = _first_and_more(few.likeliest)
    waits = tuple(all_s - gpu_s for all_s, gpu_s in zip(few.drawn, few.replayed, strict=True))
    draw_s, draw_row_s = _first_and_more((waits[0], waits[1]))
    return DeviceSteps(
        step_s=step_s,
        row_s=row_s,
        draw_s=draw_s,
        draw_row_s=max(0.0, draw_row_s - few.vocabulary * logit_s),
        logit_s=logit_s,
        device_step_s=max(0.0, few.device[0] - FEW * launch_s),
        launch_s=launch_s,
        expert_launch_s=max(0.0, (sparse.device[0] - few.device[0]) / FEW),
        prompt_s=max(0.0, few.prompt - FEW * prompt_launch_s),
        prompt_launch_s=prompt_launch_s,
        expert_prompt_launch_s=max(0.0, (sparse.prompt - few.prompt) / FEW),
        process_bytes=process_bytes(options) if whole else 0,
        context_bytes=driver_bytes(dict(options)) if whole else 0,
    )


def _first_and_more(taken: tuple[float, float]) -> tuple[float, float]:
    """What steps take, and what each user adds, from steps of one user and of several."""
    row_s = max(0.0, (taken[1] - taken[0]) / (_USERS - 1))
    return max(0.0, taken[0] - row_s), row_s


def _chains(
    small: Callable[[int], AbstractContextManager[Path]],
    layers: int,
    machine: Machine,
    seconds: float,
    options: Mapping[str, Any],
) -> _Chains:
    # Not above: an engine asks for its machine.
    from hmt.engine.engine import Engine

    given = {"context": 8192, "check_weights": False, "max_batch": _USERS} | dict(options)
    with small(layers) as folder, Engine(**given) as engine, engine.load_model(folder) as model:
        prepared = model.prepared
        costs = CostModel(loads_of(prepared.demand, prepared.plan), _bare(machine))
        replayed: list[float] = []

        def replays(model: "LoadedModel") -> None:
            replayed.append(model.replayed_s(_REPLAYS)[0])

        likeliest = [decoding_s(model, users, seconds) for users in (1, _USERS)]
        drawn = [decoding_s(model, users, seconds, _DRAWN, replays) for users in (1, _USERS)]
        reads = (costs.decode(users, 2 * _PROMPT).seconds for users in (1, _USERS))
        device = [max(0.0, all_s - s) for all_s, s in zip(replayed, reads, strict=True)]
        return _Chains(
            (device[0], device[1]),
            (replayed[0], replayed[1]),
            (likeliest[0], likeliest[1]),
            (drawn[0], drawn[1]),
            prompt_s(model, _SHORT, seconds),
            prepared.model.spec.vocab_size,
        )


def _bare(machine: Machine) -> Machine:
    """What it reads and computes, and nothing else."""
    return replace(
        machine,
        step_s=0.0, row_s=0.0, layer_s=0.0, number_s=0.0, prompt_layer_s=0.0, launch_s=0.0,
        device_number_s=0.0, prompt_launch_s=0.0, draw_s=0.0, draw_row_s=0.0, logit_s=0.0,
        device_step_s=0.0, expert_launch_s=0.0, prompt_s=0.0, expert_prompt_launch_s=0.0,
    )  # fmt: skip


def _logit_s(seconds: float) -> float:
    """To draw a token, for each of the logits there are."""
    logits = torch.linspace(-8.0, 8.0, _LOGITS).repeat(_ROWS, 1)
    known = ops.survey(logits[0])
    sampler = SamplerState(_DRAWN, [20])
    return usual_s(lambda n: sampler.choose(logits[n % _ROWS], known), seconds) / _LOGITS
