"""What steps cost on the CPU whatever they read: measured with small models, and a wider one.

Of a step, some time is spent in compiled kernels, which products predict, and the rest in what
calls them: scheduling, choosing tokens, Python.  Small models tell that rest apart by layers and by
users, and the one that comes with HMT has it all in the CPU's caches.  A wider model, of random
weights, shows how much longer it takes where each step reads so much that caches keep nothing (on a
Xeon 1.6 instead of 0.4 ms a step), and what a prompt's activations cost.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hmt.contracts.machine import Machine
from hmt.contracts.request import Request
from hmt.engine import probe_models as models
from hmt.engine.probe_models import FEW, MANY
from hmt.engine.product_rates import faster_half
from hmt.engine.step_rates import (
    LONG,
    OPTIONS,
    SHORT,
    USERS,
    StepRates,
    decoding_s,
    memory_for,
    process_bytes,
    without_fixed,
)
from hmt.planner.caches import Caches
from hmt.planner.cost import CostModel
from hmt.planner.loads import loads_of

if TYPE_CHECKING:
    from hmt.engine.engine import LoadedModel

_CONTEXT = 64  # of decoding, about
_HOST_MEMORY = "2GiB"
_STREAMED, _CONVERTED = (0.5, 0.1), {"quantization": "w4a8"}
_NO_WAIT = 1e15  # bytes per second
# Of the weights: hardly an expert is missing in its slot, and some are in each step.
_HELD, _MISSED = 0.9, 0.05
_PROMPTS = 3  # times the seconds: a prompt takes 0.2 of them


@dataclass(frozen=True, slots=True)
class _Decoded:
    """A step's seconds: in what calls kernels, and in them beyond what is predicted; its bytes.

    read_bytes   from the drive
    """

    calls_s: float
    beyond_s: float
    nbytes: float
    read_bytes: float = 0.0


def cpu_step_rates(machine: Machine, seconds: float, *, whole: bool = True) -> StepRates:
    """What steps cost on `machine`, beyond what its other rates tell; `seconds` for each of eight.

    whole   measure also with a wider model, layers one by one, and a process's memory

    Raises what loading raises.
    """
    bare = without_fixed(machine)
    layers, between = (FEW, MANY), MANY - FEW
    small = models.small_model
    few, many = (_decoded(bare, small(count), 1, seconds) for count in layers)
    several = _decoded(bare, small(FEW), USERS, seconds)
    row_s = max(0.0, (several.calls_s - few.calls_s) / (USERS - 1))
    found = StepRates(
        step_s=max(0.0, few.calls_s - row_s),
        row_s=row_s,
        layer_s=max(0.0, (many.beyond_s - few.beyond_s) / between),
    )
    prompts = _prompts(bare, small, seconds)
    layer_s, token_s = prompts.of_a_layer()
    number_s = token_s / prompts.width
    found = replace(found, number_s=number_s, prompt_layer_s=layer_s, piece_s=prompts.of_a_piece())
    if not whole:
        return found
    # Of a wide one, numbers are what counts; of a small one, layers.
    prompts = _prompts(bare, models.wide_model, _PROMPTS * seconds)
    number_s = prompts.of_a_layer()[1] / prompts.width
    latents = _prompts(bare, models.small_latent, seconds)
    latent_s, latent_token_s = latents.of_a_layer()
    found = replace(
        found,
        number_s=number_s,
        prompt_latent_s=max(0.0, latent_s - layer_s),
        latent_number_s=max(0.0, latent_token_s - number_s * latents.width) / models.LATENT_NUMBERS,
    )
    wide = _decoded(bare, models.wide_model(MANY), 1, seconds)
    dense, experts, latent = (
        max(0.0, (high - low) / between)
        for low, high in (
            [_decoded(bare, model(count), 1, seconds, None).calls_s for count in layers]
            for model in (small, models.small_experts, models.small_latent)
        )
    )
    missing = [_decoded(bare, models.small_experts(MANY), 1, seconds, k) for k in (_HELD, _MISSED)]
    alone = process_bytes({})
    # How the allocator's arenas are cut up is chance: the same run took 438 to 457 MiB.
    streaming = max(process_bytes({}, models.wide_experts, kept, MANY) for kept in _STREAMED)
    found = replace(
        found,
        apart_layer_s=dense,
        apart_experts_s=max(0.0, experts - dense),
        apart_latent_s=max(0.0, latent - dense),
        missed_expert_s=_missed_s(*missing),
        cold_times=_cold_times(machine, many, wide),
    )
    return replace(
        found,
        held_experts_s=_held_s(replace(machine, **asdict(found)), seconds),
        process_bytes=alone,
        streaming_bytes=max(0, streaming - alone),
        converting_bytes=max(0, process_bytes(_CONVERTED, models.wide_model, _STREAMED[0]) - alone),
    )


def _held_s(machine: Machine, seconds: float) -> float:
    """What a layer's experts take that are held in slots, beyond those that stay in memory.

    Of a wider model: kernels wake and leases are taken where caches keep neither.  The same model
    with all its experts in memory takes off what products are not predicted exactly.
    """
    # Hardly an expert is missing here, whatever the usual curve of hits says.
    machine = replace(machine, missed_expert_s=0.0, disk_read_rate=_NO_WAIT)
    beyond_s, nbytes = [], 0.0
    for kept in (1.0, _HELD):
        few, many = (
            _decoded(machine, models.wide_experts(count), 1, seconds, kept, waits=True)
            for count in (FEW, MANY)
        )
        beyond_s.append((many.calls_s + many.beyond_s - few.calls_s - few.beyond_s) / (MANY - FEW))
        nbytes = many.nbytes
    return max(0.0, beyond_s[1] - beyond_s[0]) / Caches(machine).slower(nbytes)


def _missed_s(held: _Decoded, missed: _Decoded) -> float:
    """What an expert takes that comes from the drive, beyond waiting for it."""
    experts = (missed.read_bytes - held.read_bytes) / models.EXPERT_BYTES
    return max(0.0, missed.calls_s - held.calls_s) / experts if experts >= 1 else 0.0


def _cold_times(machine: Machine, warm: _Decoded, cold: _Decoded) -> float:
    """How many times as long calls take when a step's bytes fill the caches."""
    if not machine.cache_bytes or not warm.calls_s:
        return 0.0
    share = min(1.0, cold.nbytes / machine.cache_bytes)
    return 1.0 + max(0.0, cold.calls_s / warm.calls_s - 1.0) / share


@dataclass(frozen=True, slots=True)
class _Prompts:
    """Seconds of prompts of one step, by layers and tokens.

    beyond_s   what is predicted
    calls_s    in what calls kernels
    width      numbers of a token
    """

    beyond_s: dict[tuple[int, int], float]
    calls_s: dict[tuple[int, int], float]
    width: int

    def of_a_layer(self) -> tuple[float, float]:
        """Beyond what is predicted: seconds of a layer, and of each token in it."""
        short_s, long_s = (
            (self.beyond_s[MANY, tokens] - self.beyond_s[FEW, tokens]) / (MANY - FEW)
            for tokens in (SHORT, LONG)
        )
        token_s = max(0.0, (long_s - short_s) / (LONG - SHORT))
        return max(0.0, short_s - SHORT * token_s), token_s

    def of_a_piece(self) -> float:
        """What a short one's calls take beside those of layers."""
        few, many = self.calls_s[FEW, SHORT], self.calls_s[MANY, SHORT]
        return max(0.0, few - FEW * (many - few) / (MANY - FEW))


def _prompts(
    machine: Machine, model: Callable[[int], AbstractContextManager[Path]], seconds: float
) -> _Prompts:
    """Of few and many layers, short and long, by turns: what changes meanwhile changes all."""
    taken: dict[tuple[int, int], list[tuple[float, float]]] = {}
    predicted, width = {}, 1
    with ExitStack() as stack:
        loaded = {}
        for count in (FEW, MANY):
            loaded[count] = stack.enter_context(_Loaded(stack.enter_context(model(count))))
            width = loaded[count].prepared.model.spec.hidden_size
            costs = _costs(loaded[count], machine)
            for tokens in (SHORT, LONG):
                predicted[count, tokens] = costs.prompt(tokens, tokens / 2).seconds
                _prompt(loaded[count], tokens)
        end = time.perf_counter() + 4 * seconds
        while not taken or time.perf_counter() < end:
            for place in predicted:
                taken.setdefault(place, []).append(_prompt(loaded[place[0]], place[1]))
    whole = {place: faster_half([each for each, _ in times]) for place, times in taken.items()}
    return _Prompts(
        {place: whole[place] - predicted[place] for place in whole},
        {place: faster_half([calls for _, calls in times]) for place, times in taken.items()},
        width,
    )


def _prompt(model: "LoadedModel", tokens: int) -> tuple[float, float]:
    """Seconds of a prompt of one step, and those of them outside of compiled kernels."""
    request = Request(input=[20] * tokens, max_new_tokens=1, ignore_eos=True)
    model.reset_summary()
    begin = time.perf_counter()
    model.infer(request)
    taken_s = time.perf_counter() - begin
    return taken_s, taken_s - model.summary().prompt.kernel_s


def _decoded(
    machine: Machine,
    model: AbstractContextManager[Path],
    users: int,
    seconds: float,
    kept: float | None = 1.0,
    *,
    waits: bool = False,
) -> _Decoded:
    """`kept` is the share of the weights that memory keeps; `waits` for others count, or do not.

    None: all, but layers are computed one by one.
    """
    with model as folder, _Loaded(folder, kept) as loaded:
        predicted = _costs(loaded, machine).decode(users, _CONTEXT)
        step_s = decoding_s(loaded, users, seconds)
        phase = loaded.summary().generation
        waited_s = 0.0 if waits else phase.waited_s
        step_s *= 1 - waited_s / phase.seconds if phase.seconds else 1.0
        working_s = phase.seconds - waited_s
        share = phase.kernel_s / working_s if working_s > 0 else 0.0
        nbytes, read_bytes = predicted.nbytes["CPU"], phase.disk_bytes / max(1, phase.tokens)
        if not share:  # without compiled kernels nothing tells both apart
            return _Decoded(max(0.0, step_s - predicted.seconds), 0.0, nbytes, read_bytes)
        kernels_s = share * step_s
        return _Decoded(step_s - kernels_s, kernels_s - predicted.seconds, nbytes, read_bytes)


def kernels_s(
    machine: Machine, model: AbstractContextManager[Path], seconds: float
) -> tuple[float, float]:
    """Bytes that a step of one token reads, and its seconds in compiled kernels; 0 without them."""
    with model as folder, _Loaded(folder) as loaded:
        nbytes = _costs(loaded, machine).decode(1, _CONTEXT).nbytes["CPU"]
        step_s = decoding_s(loaded, 1, seconds)
        phase = loaded.summary().generation
        return nbytes, step_s * phase.kernel_s / phase.seconds if phase.seconds else 0.0


def _costs(model: "LoadedModel", machine: Machine) -> CostModel:
    prepared = model.prepared
    return CostModel(loads_of(prepared.demand, prepared.plan), machine)


class _Loaded:
    """A model in an engine of its own."""

    def __init__(self, folder: Path, kept: float | None = 1.0) -> None:
        # Not above: an engine asks for its machine.
        from hmt.engine.engine import Engine

        given: dict[str, Any] = {**OPTIONS, "host_memory": _HOST_MEMORY}
        if kept is None:
            given["executor"] = "plain"
        elif kept < 1:
            given["host_memory"] = memory_for(folder, kept, given)
        else:
            given |= {"max_batch": USERS, "prefill_chunk": LONG}
        self._engine, self._folder = Engine(**given), folder

    def __enter__(self) -> "LoadedModel":
        return self._engine.load_model(self._folder)

    def __exit__(self, *error: object) -> None:
        self._engine.close()
