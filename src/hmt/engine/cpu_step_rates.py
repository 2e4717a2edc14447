"""What steps cost on the CPU whatever they read: measured with small models, and a wider one.

Of a step, some time is spent in compiled kernels, which products predict, and the rest in what
calls them: scheduling, choosing tokens, Python.  Small models tell that rest apart by layers and by
users, and the one that comes with HMT has it all in the CPU's caches.  A wider model, of random
weights, shows how much longer it takes where each step reads so much that caches keep nothing (on a
Xeon 1.6 instead of 0.4 ms a step), and what a prompt's activations cost.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hmt.base.units import MIB
from hmt.contracts.machine import Machine
from hmt.contracts.request import Request
from hmt.engine import probe_models as models
from hmt.engine.by_turns import middle_half
from hmt.engine.cpu_pace import CpuPace, at_cpu_pace, pace_at, usual_pace
from hmt.engine.pace import pace_of
from hmt.engine.probe_models import FEW, MANY
from hmt.engine.step_rates import (
    LONG,
    OPTIONS,
    SHORT,
    TWO_PIECES,
    USERS,
    StepRates,
    decoding_s,
    memory_for,
    process_bytes,
    slope,
    text,
    without_fixed,
)
from hmt.planner.cost import CostModel
from hmt.planner.loads import loads_of

if TYPE_CHECKING:
    from hmt.engine.engine import LoadedModel

_SMALL = models.small_model, models.small_experts, models.small_latent
_CONTEXT = 64  # of decoding, about
_HOST_MEMORY = "2GiB"
# By which the same run takes more one time than another: 1 to 5 MiB were seen, and of runs that
# stream 7 to 31.
_CHANCE_BYTES, _STREAMING_CHANCE_BYTES = 8 * MIB, 40 * MIB
_STREAMED, _CONVERTED = (0.1, 0.1), {"quantization": "w4a8"}
# Of the weights: hardly an expert is missing in its slot, and some are in each step.
_HELD, _MISSED = 0.9, 0.05
_ROUNDS, _QUICK_ROUNDS, _WARM_STEPS = 4, 3, 10
_SCHEMES = {"bf16": None, "w8a8": "w8a8", "w4a8": "w4a8"}  # by kernel
_MOST_TIMES = 2.0  # or more is chance
_PROMPTS = 1.5  # times the seconds: a prompt takes 0.2 of them
_IN_LAYERS = 0.6  # and steps of 10 ms take less
_WARM_BYTES = 14 * MIB
_NOTHING: Mapping[float, float] = {}


@dataclass(frozen=True, slots=True)
class Case:
    """A model that decodes for so many users.

    kept    the share of the weights that memory keeps; None: all, but each layer is computed alone
    scheme  how weights are encoded; None: as they come
    """

    model: AbstractContextManager[Path]
    users: int = 1
    kept: float | None = 1.0
    scheme: str | None = None


@dataclass(frozen=True, slots=True)
class Decoded:
    """A step's seconds: in what calls kernels, and in them beyond what is predicted; its bytes.

    kernels_s    in compiled kernels; 0 without them
    read_bytes   from the drive
    read_blocks  dense ones that lie there
    waited_s     for it, beside all these
    """

    calls_s: float
    beyond_s: float
    nbytes: float
    read_bytes: float = 0.0
    kernels_s: float = 0.0
    waited_s: float = 0.0
    read_blocks: float = 0.0


def cpu_step_rates(
    machine: Machine,
    seconds: float,
    *,
    whole: bool = True,
    pace: Callable[[], CpuPace] = CpuPace,
    calls_s: Mapping[float, float] = _NOTHING,
) -> StepRates:
    """What steps cost on `machine`, beyond what its other rates tell; `seconds` for each of many.

    whole     measure also with a wider model, layers one by one, and a process's memory
    pace      measures that of the moment; what is found is that of the machine's own
    calls_s   what calls kernels in steps that read so many bytes, where that was measured

    Raises what loading raises.
    """
    bare = without_fixed(machine)
    small, experts, latent = _SMALL
    cases = [Case(small(FEW)), Case(small(MANY)), Case(small(FEW), USERS), Case(small(FEW), 1, 0)]
    if whole:
        cases += [Case(model(n), 1, None) for model in _SMALL for n in (FEW, MANY)]
        cases += [Case(experts(n), 1, _HELD) for n in (FEW, MANY)]
        cases.append(Case(experts(MANY), 1, _MISSED))
        cases += [Case(latent(n), USERS, None) for n in (FEW, MANY)]
    rounds = _ROUNDS if whole else _QUICK_ROUNDS
    few, many, several, read, *others = decoded(bare, cases, seconds, pace, rounds)
    row_s = max(0.0, (several.calls_s - few.calls_s) / (USERS - 1))
    prompts = _prompts(bare, small, seconds, pace)
    (layer_s, token_s), (piece_s, prompt_s) = prompts.of_a_layer(), prompts.of_a_piece()
    found = StepRates(
        step_s=max(0.0, few.calls_s - row_s),
        row_s=row_s,
        layer_s=max(0.0, (many.beyond_s - few.beyond_s) / (MANY - FEW)),
        number_s=token_s / prompts.width,
        prompt_layer_s=layer_s,
        piece_s=piece_s,
        prompt_s=prompt_s,
    )
    if not whole:
        return _of_a_block(found, machine, few, read)
    *apart, held_few, held_many, missed, rows_few, rows_many = others
    dense_s, experts_s, latent_s, held_s = (
        max(0.0, (many.calls_s - few.calls_s) / (MANY - FEW))
        for few, many in (*zip(apart[::2], apart[1::2], strict=True), (held_few, held_many))
    )
    rows_s = (rows_many.calls_s - rows_few.calls_s) / (MANY - FEW) - latent_s
    lookup_s = _lookup_s(apart[2], held_few)
    found = _of_a_block(found, machine, few, read, FEW * dense_s, lookup_s)
    return replace(
        _of_prompts(found, bare, seconds, pace),
        apart_layer_s=dense_s,
        apart_experts_s=max(0.0, experts_s - dense_s),
        apart_latent_s=max(0.0, latent_s - dense_s),
        apart_latent_row_s=max(0.0, rows_s) / (USERS - 1),
        held_experts_s=max(0.0, held_s - dense_s),
        missed_expert_s=_missed_s(held_many, missed),
        lookup_s=lookup_s,
        cold_calls=_cold_calls(calls_s, row_s),
        cpu_in_layers=_in_layers(bare, _IN_LAYERS * seconds, pace),
        **_memory(),
    )


def _of_prompts(
    found: StepRates, machine: Machine, seconds: float, pace: Callable[[], CpuPace]
) -> StepRates:
    """With what numbers take; and beside a layer that is `found` latent attention, and experts."""

    def beyond(
        model: Callable[[int], AbstractContextManager[Path]], seconds: float
    ) -> tuple[float, float]:
        """Of a layer, and of a number of a token's hidden state in it."""
        prompts = _prompts(machine, model, seconds, pace)
        layer_s, token_s = prompts.of_a_layer()
        return layer_s - found.prompt_layer_s, token_s / prompts.width

    # Of wide models, numbers are what counts; of small ones, layers.
    _, number_s = beyond(models.wide_model, _PROMPTS * seconds)
    _, experts_number_s = beyond(models.wide_experts, _PROMPTS * seconds)
    experts_s, _ = beyond(models.small_experts, seconds)
    latent_s, latent_number_s = beyond(models.small_latent, seconds)
    per_number = models.WIDTH / models.LATENT_NUMBERS
    return replace(
        found,
        number_s=number_s,
        prompt_experts_s=max(0.0, experts_s),
        expert_number_s=max(0.0, experts_number_s - number_s) / models.CHOSEN,
        prompt_latent_s=max(0.0, latent_s),
        latent_number_s=max(0.0, latent_number_s - number_s) * per_number,
    )


def _memory() -> dict[str, Any]:
    """Of processes, which time nothing: they run side by side."""
    # How the allocator's arenas are cut up is chance: the same run took 438 to 457 MiB.
    kept = [partial(process_bytes, {}, model) for model in (_SMALL[0], _SMALL[-1])]
    streamed = [partial(process_bytes, {}, models.wide_experts, k, MANY) for k in _STREAMED]
    converted = partial(process_bytes, _CONVERTED, models.wide_model, _STREAMED[0])
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda measure: measure(), (*kept, *streamed, converted)))
    alone, streaming = max(found[: len(kept)]), max(found[len(kept) : -1])
    return {
        "process_bytes": alone + _CHANCE_BYTES if alone else 0,
        "streaming_bytes": max(0, streaming - alone) + _STREAMING_CHANCE_BYTES,
        "converting_bytes": max(0, found[-1] - alone),
    }


def _in_layers(machine: Machine, seconds: float, pace: Callable[[], CpuPace]) -> dict[str, float]:
    """See Machine.cpu_in_layers."""
    with models.wide_model(MANY) as folder:
        model = nullcontext(folder)
        cases = [
            Case(model, users, scheme=scheme)
            for scheme in _SCHEMES.values()
            for users in (1, USERS)
        ]
        found = iter(decoded(machine, cases, seconds, pace))
        times = {}
        for name in _SCHEMES:
            for at in ("", f"@{USERS}"):
                one = next(found)
                if one.kernels_s > one.beyond_s:
                    share = one.kernels_s / (one.kernels_s - one.beyond_s)
                    times[name + at] = min(_MOST_TIMES, max(1 / _MOST_TIMES, share))
        return times


def _lookup_s(kept: Decoded, held: Decoded) -> float:
    """What a step takes that reads its tokens' rows from the drive: kernels wake behind it, too."""
    return held.waited_s + max(0.0, held.beyond_s - kept.beyond_s) if held.waited_s else 0.0


def _of_a_block(
    found: StepRates,
    machine: Machine,
    kept: Decoded,
    read: Decoded,
    layers_s: float = 0.0,
    lookup_s: float = 0.0,
) -> StepRates:
    """With what a block takes that is read by itself: of calls, and of waiting beyond its bytes.

    layers_s, lookup_s   of a step, where they are known for themselves
    """
    if not read.read_blocks or not machine.disk_read_rate:
        return found
    bytes_s = read.read_bytes / machine.disk_read_rate
    return replace(
        found,
        read_block_s=max(0.0, read.calls_s - kept.calls_s - layers_s) / read.read_blocks,
        read_alone_s=max(0.0, read.waited_s - lookup_s - bytes_s) / read.read_blocks,
    )


def _missed_s(held: Decoded, missed: Decoded) -> float:
    """What an expert takes that comes from the drive, beyond waiting for it."""
    experts = (missed.read_bytes - held.read_bytes) / models.EXPERT_BYTES
    return max(0.0, missed.calls_s - held.calls_s) / experts if experts >= 1 else 0.0


def _cold_calls(calls_s: Mapping[float, float], row_s: float) -> dict[str, float]:
    """See Machine: steps that read up to 14 MiB are warm; users' rows take what they take.

    Of single steps half is chance, and models differ.  On two Zen 4 cores beside 32 MiB of a cache
    calls took 0.34 ms in steps of 5 MB, 0.37 of 15, 0.7 of 40 and 1.3 of 260: level, and then a
    straight line over the logarithm, the one from which all differ least, each by its share.
    """
    beyond = {size: each_s - row_s for size, each_s in calls_s.items()}
    if len(beyond) < 2 or min(beyond.values()) <= 0:
        return {}
    most = max(beyond)
    if most <= _WARM_BYTES:
        return {}
    more, warm_s = slope(
        [(max(0.0, log(size / _WARM_BYTES)), each_s) for size, each_s in beyond.items()]
    )
    if warm_s <= 0:
        return {}
    times = 1.0 + more * log(most / _WARM_BYTES) / warm_s
    return {f"{_WARM_BYTES // MIB}MiB": 1.0, f"{round(most) // MIB}MiB": times}


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

    def of_a_piece(self) -> tuple[float, float]:
        """What calls take beside those of layers: of a piece, and of the last one."""
        one, two = self.calls_s[FEW, LONG], self.calls_s[FEW, TWO_PIECES]
        layers_s = FEW * (self.calls_s[MANY, LONG] - one) / (MANY - FEW)
        return max(0.0, two - one - layers_s), max(0.0, one - layers_s)


def _prompts(
    machine: Machine,
    model: Callable[[int], AbstractContextManager[Path]],
    seconds: float,
    pace: Callable[[], CpuPace] = CpuPace,
) -> _Prompts:
    """Of few and many layers, short and long, by turns: what changes meanwhile changes all."""
    taken: dict[tuple[int, int], list[tuple[float, float]]] = {}
    paces = list[CpuPace]()
    with ExitStack() as stack:
        loaded = {}
        for count in (FEW, MANY):
            loaded[count] = stack.enter_context(_Loaded(stack.enter_context(model(count))))
            for tokens in (SHORT, LONG, TWO_PIECES) if count == FEW else (SHORT, LONG):
                taken[count, tokens] = []
                _prompt(loaded[count], tokens)
        end = time.perf_counter() + 4 * seconds
        while not paces or time.perf_counter() < end:
            paces.append(_pace_beside(loaded[FEW], pace))
            for (count, tokens), times in taken.items():
                times.append(_prompt(loaded[count], tokens))
        now = usual_pace(paces)
        slower, bare = now.over(pace_at(machine)), at_cpu_pace(machine, now)
        beyond_s, calls_s = {}, {}
        for (count, tokens), found in taken.items():
            predicted_s = _costs(loaded[count], bare).predict(1, tokens, tokens).ttft_s
            whole_s = middle_half([each for each, _ in found])
            beyond_s[count, tokens] = (whole_s - predicted_s) / slower.arithmetic_s
            calls_s[count, tokens] = middle_half([calls for _, calls in found]) / slower.calls_s
        return _Prompts(beyond_s, calls_s, loaded[FEW].prepared.model.spec.hidden_size)


def _prompt(model: "LoadedModel", tokens: int) -> tuple[float, float]:
    """Seconds of a prompt of one step, and those of them outside of compiled kernels."""
    request = Request(input=text(tokens), max_new_tokens=1, ignore_eos=True)
    model.reset_summary()
    begin = time.perf_counter()
    model.infer(request)
    taken_s = time.perf_counter() - begin
    return taken_s, taken_s - model.summary().prompt.kernel_s


def decoded(
    machine: Machine,
    cases: Sequence[Case],
    seconds: float,
    pace: Callable[[], CpuPace] = CpuPace,
    rounds: int = _ROUNDS,
) -> list[Decoded]:
    """Steps of each, by turns, at the machine's own pace; `seconds` for each."""
    with ExitStack() as stack:
        models = _loaded(stack, cases)
        turns: list[list[_Turn]] = [[] for _ in cases]
        paces: list[list[CpuPace]] = [[] for _ in cases]
        for _ in range(rounds):
            for case, model, taken, seen in zip(cases, models, turns, paces, strict=True):
                # Right before: what memory gives has changed by a seventh from case to case.
                seen.append(_pace_beside(model, pace))
                taken.append(_turn(model, case, seconds / rounds))
        return [
            _decoded(machine, case, model, taken, usual_pace(seen))
            for case, model, taken, seen in zip(cases, models, turns, paces, strict=True)
        ]


def _pace_beside(model: "LoadedModel", pace: Callable[[], CpuPace]) -> CpuPace:
    """That of the moment; Python's on the thread of steps, as it is looked at in runs.

    And first: behind what keeps all cores busy it was twice as slow, and what calls took came out
    as a half.
    """
    calls_s = pace_of(model)
    return replace(pace(), calls_s=calls_s)


def _loaded(stack: ExitStack, cases: Sequence[Case]) -> "list[LoadedModel]":
    """The model of each; cases of the same one, and of another number of users, share it."""
    found: dict[tuple[int, float | None, str | None], LoadedModel] = {}
    for case in cases:
        key = id(case.model), case.kept, case.scheme
        if key not in found:
            folder = stack.enter_context(case.model)
            found[key] = stack.enter_context(_Loaded(folder, case.kept, case.scheme))
    return [found[id(case.model), case.kept, case.scheme] for case in cases]


def _decoded(
    machine: Machine,
    case: Case,
    model: "LoadedModel",
    taken: "Sequence[_Turn]",
    now: CpuPace,
) -> Decoded:
    """Of turns at the pace `now`."""
    times, there = now.over(pace_at(machine)), at_cpu_pace(machine, now)
    turn = _Turn(*map(middle_half, zip(*taken, strict=True)))
    predicted = _costs(model, there).decode(case.users, _CONTEXT)
    calls_s, beyond_s = turn.calls_s, turn.kernels_s - predicted.seconds
    if not turn.kernels_s:  # nothing tells both apart
        calls_s, beyond_s = max(0.0, calls_s - predicted.seconds), 0.0
    return Decoded(
        calls_s / times.calls_s,
        beyond_s / times.reading_s,
        predicted.nbytes["CPU"],
        turn.read_bytes,
        turn.kernels_s / times.reading_s,
        turn.waited_s / times.calls_s,
        _read_blocks(model),
    )


class _Turn(NamedTuple):
    """Of a step: seconds in what calls kernels, in compiled kernels, and waiting for the drive."""

    calls_s: float
    kernels_s: float
    waited_s: float
    read_bytes: float


def _turn(model: "LoadedModel", case: Case, seconds: float) -> _Turn:
    model.reset_summary()
    step_s = decoding_s(model, case.users, seconds, warm=_WARM_STEPS)
    phase = model.summary().generation
    kernels_s, waited_s = (
        step_s * part_s / phase.seconds if phase.seconds else 0.0
        for part_s in (phase.kernel_s, phase.waited_s)
    )
    read_bytes = phase.disk_bytes / max(1, phase.tokens)
    return _Turn(step_s - kernels_s - waited_s, kernels_s, waited_s, read_bytes)


def _costs(model: "LoadedModel", machine: Machine) -> CostModel:
    prepared = model.prepared
    return CostModel(loads_of(prepared.demand, prepared.plan), machine)


def _read_blocks(model: "LoadedModel") -> float:
    return loads_of(model.prepared.demand, model.prepared.plan).read_blocks


class _Loaded:
    """A model in an engine of its own."""

    def __init__(self, folder: Path, kept: float | None = 1.0, scheme: str | None = None) -> None:
        # Not above: an engine asks for its machine.
        from hmt.engine.engine import Engine

        given = {**OPTIONS, "host_memory": _HOST_MEMORY, "quantization": scheme}
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
