"""What steps on a GPU cost whatever they read: two chains, of the CPU and of the GPU.

The CPU schedules a step, launches it and chooses its tokens; the GPU computes it. The likeliest
tokens are known on the GPU, so the next step begins before the CPU has seen them: then the longer
chain counts. Tokens that are drawn are the CPU's, and the next step waits for them: then it is the
sum. So each chain is measured by itself, with small models: the GPU's by replaying a captured step,
the CPU's from steps whose GPU has less to do, and what drawing adds from what steps take beyond the
GPU's. Prompts are launched kernel by kernel while the GPU computes what was launched before: of
them, too, the longer chain counts. How many kernels a layer has, and of which kind, depends on its
encoding, on the number of users, and on experts: each is measured as it runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from hmt.contracts.machine import Machine
from hmt.contracts.request import Sampling
from hmt.engine.device_models import VOCABULARY, dense_model, expert_model
from hmt.engine.device_prompts import beside, launched, opened
from hmt.engine.own_device_memory import driver_bytes
from hmt.engine.pace import at_pace, pace_s, steadily
from hmt.engine.product_rates import usual_s
from hmt.engine.sampler import SamplerState
from hmt.engine.step_rates import decoding_s, process_bytes, slope
from hmt.kernels import ops
from hmt.planner.cost import CostModel
from hmt.planner.loads import loads_of

if TYPE_CHECKING:
    from hmt.engine.engine import LoadedModel

_USERS = (1, 8, 32)
_SCHEMES = {"bf16": None, "w8a8": "w8a8", "w4a16": "w4a16:32"}
_MODELS = {"": (dense_model, 2, 8), "experts": (expert_model, 2, 6)}  # of few and of more layers
_PROMPT = 16
_PROMPTS = 4  # times as long as the others
_REPLAYS = 24
_ATTEMPTS = 4
_LOGITS, _ROWS = 1 << 15, 8
_DRAWN = Sampling(temperature=1.0, seed=1)
_CPU = ("step_s", "row_s", "draw_s", "draw_row_s", "piece_s", "prompt_s", "bring_s")


@dataclass(frozen=True, slots=True)
class DeviceSteps:
    """See Machine; 0 or empty where nothing was measured."""

    step_s: float = 0.0
    row_s: float = 0.0
    draw_s: float = 0.0
    draw_row_s: float = 0.0
    logit_s: float = 0.0
    piece_s: float = 0.0
    prompt_s: float = 0.0
    device_step_s: float = 0.0
    device_layers: dict[str, float] = field(default_factory=dict)
    device_launches: dict[str, float] = field(default_factory=dict)
    bring_s: float = 0.0
    pace: float = 0.0
    process_bytes: int = 0
    context_bytes: int = 0

    def slower(self, factor: float) -> "DeviceSteps":
        """With times of the CPU that are so many times as long."""
        launches = {name: each * factor for name, each in self.device_launches.items()}
        times = {name: getattr(self, name) * factor for name in _CPU}
        return replace(self, device_launches=launches, **times)

    def completed(self, before: "DeviceSteps") -> "DeviceSteps":
        """With what was measured before, where only a `whole` measurement has it."""
        return replace(
            self,
            process_bytes=self.process_bytes or before.process_bytes,
            context_bytes=self.context_bytes or before.context_bytes,
        )

    def of(self, machine: Machine) -> Machine:
        """The machine with what is known; what the CPU does is at the pace it had then."""
        machine = at_pace(machine, self.pace)
        return replace(machine, **{name: value for name, value in asdict(self).items() if value})


@dataclass(slots=True)
class _Chains:
    """Seconds of steps, by the number of users.

    device             of the GPU, beyond what is predicted of what it reads
    likeliest, drawn   of the CPU, from one step's tokens to the next one's; where tokens are drawn
                       beyond what the GPU takes meanwhile

    The CPU's are in units of its pace meanwhile.
    """

    device: dict[int, float] = field(default_factory=dict)
    likeliest: dict[int, float] = field(default_factory=dict)
    drawn: dict[int, float] = field(default_factory=dict)


def device_steps(
    machine: Machine,
    seconds: float,
    options: Mapping[str, Any],
    *,
    whole: bool = True,
    schemes: Sequence[str] = tuple(_SCHEMES),
    kinds: Sequence[str] = tuple(_MODELS),
) -> DeviceSteps:
    """What steps cost on the GPU of `machine`, whose other rates are known.

    seconds   for each of two dozen measurements
    options   of an engine, with the GPU
    whole     measure also what a process takes of both memories, in one of its own (half a minute:
              kernels are loaded anew)
    schemes   encodings to measure, by the names of their kernels; in the last one experts are also
              brought
    kinds     of layers: "" is dense, "experts" are routed

    Raises what loading a small model raises.
    """
    layers: dict[str, float] = {}
    launches: dict[str, float] = {}
    host, begin_s = _Chains(), 0.0
    first = piece = bring = 0.0
    for kind in kinds:
        small, few, many = _MODELS[kind]
        with small(few) as of_few, small(many) as of_many:
            for kernel in schemes:
                given = {**options, "max_batch": max(_USERS), "quantization": _SCHEMES[kernel]}
                name, whole_host = f"{kernel} {kind}".strip(), not kind and kernel == schemes[0]
                with opened(of_few, given) as small_one, opened(of_many, beside(given, 1)) as large:
                    less = _chains(small_one, machine, seconds, whole=whole_host)
                    more = _chains(large, machine, seconds, whole=False)
                    away = (of_few, of_many) if kind and kernel == schemes[-1] else None
                    prompts = launched(small_one, large, _PROMPTS * seconds, away, beside(given, 3))
                launches[name], bring = prompts.layer, prompts.expert or bring
                for users in less.device:
                    each = max(0.0, (more.device[users] - less.device[users]) / (many - few))
                    layers[f"{name}@{users}" if users > 1 else name] = each
                if less.drawn:
                    host, first, piece = less, prompts.first, prompts.piece
                    begin_s = max(0.0, less.device[1] - few * layers[name])
    step_s, row_s = _line(host.likeliest)
    draw_s, draw_row_s = _line(host.drawn)
    unit_s = pace_s()
    # The steps themselves have drawn from so many: no more than all that users add.
    logit = min(_logit_s(seconds) / unit_s, draw_row_s / VOCABULARY)
    return DeviceSteps(
        step_s=step_s * unit_s,
        row_s=row_s * unit_s,
        draw_s=draw_s * unit_s,
        draw_row_s=max(0.0, draw_row_s - VOCABULARY * logit) * unit_s,
        logit_s=logit * unit_s,
        piece_s=piece * unit_s,
        prompt_s=first * unit_s,
        device_step_s=begin_s,
        device_layers=layers,
        device_launches={name: each * unit_s for name, each in launches.items()},
        bring_s=bring * unit_s,
        pace=unit_s,
        process_bytes=process_bytes(options) if whole else 0,
        context_bytes=driver_bytes(dict(options)) if whole else 0,
    )


def _line(taken: Mapping[int, float]) -> tuple[float, float]:
    """What a step takes, and what each user adds: on a straight line, and none below 0."""
    if len(taken) < 2:
        return max(0.0, *taken.values(), 0.0), 0.0
    row_s, begin = slope([*taken.items()])
    return max(0.0, begin), row_s


def _chains(model: "LoadedModel", machine: Machine, seconds: float, *, whole: bool) -> _Chains:
    """Of the `model`; `whole`: also the CPU's."""
    found, prepared = _Chains(), model.prepared
    costs = CostModel(loads_of(prepared.demand, prepared.plan), _bare(machine))
    for users in _USERS:
        replayed_s = 0.0

        def replay(model: "LoadedModel") -> None:
            nonlocal replayed_s
            replayed_s, _ = model.replayed_s(_REPLAYS)

        if whole:  # first: guesses that are right are made again and again
            greedy = partial(decoding_s, model, users, 2 * seconds, usual=fmean)
            unit_s, taken_s = steadily(model, greedy, _ATTEMPTS)
            found.likeliest[users] = taken_s / unit_s
        each_s = 4 * seconds * whole
        drawing = partial(decoding_s, model, users, each_s, _DRAWN, replay, fmean)
        unit_s, taken_s = steadily(model, drawing, _ATTEMPTS if whole else 1)
        if whole:
            found.drawn[users] = max(0.0, taken_s - replayed_s) / unit_s
        reads_s = costs.decode(users, 2 * _PROMPT).seconds
        found.device[users] = max(0.0, replayed_s - reads_s)
    return found


def _bare(machine: Machine) -> Machine:
    """What it reads and computes, and nothing else."""
    return replace(
        machine,
        step_s=0.0, row_s=0.0, layer_s=0.0, number_s=0.0, prompt_layer_s=0.0, launch_s=0.0,
        device_number_s=0.0, prompt_launch_s=0.0, draw_s=0.0, draw_row_s=0.0, logit_s=0.0,
        device_step_s=0.0, piece_s=0.0, prompt_s=0.0, sync_s=0.0, bring_s=0.0,
        device_layers={}, device_launches={},
    )  # fmt: skip


def _logit_s(seconds: float) -> float:
    """To draw a token, for each of the logits there are."""
    logits = torch.linspace(-8.0, 8.0, _LOGITS).repeat(_ROWS, 1)
    known = ops.survey(logits[0])
    sampler = SamplerState(_DRAWN, [20])
    return usual_s(lambda n: sampler.choose(logits[n % _ROWS], known), seconds) / _LOGITS
