"""What the CPU does for prompts on a GPU: it launches them kernel by kernel, and brings experts.

Models of few and of many layers answer by turns, so that a host that changes its pace changes it
for both: one after the other, a layer took 0.4 ms in one probe and 1.2 in the next.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hmt.base.errors import HMTError
from hmt.base.units import parse_bytes
from hmt.contracts.blocks import BlockKind
from hmt.contracts.plan import Tier
from hmt.contracts.request import Request
from hmt.engine.by_turns import middle_half
from hmt.engine.pace import pace_of
from hmt.engine.step_rates import text

if TYPE_CHECKING:
    from hmt.engine.engine import LoadedModel
    from hmt.engine.loading import Prepared

# A prompt of one step that the GPU computes sooner than it is launched.  Up to 64 tokens products
# have other kernels, and up to 256 experts are not brought all.
PIECE = 512
_ROUNDS = 5  # at least
_TRIES = 3
_OPTIONS = {"context": 16384, "check_weights": False, "prefill_chunk": PIECE}
_BRINGING = {"context": 4096}  # where experts are brought


@dataclass(frozen=True, slots=True)
class Launched:
    """In units of the CPU's pace meanwhile.

    first    a prompt of one step, without its layers
    layer    each of them
    expert   that is brought, beyond a layer; 0: not known
    """

    first: float
    layer: float
    expert: float = 0.0


@contextmanager
def opened(folder: Path, options: Mapping[str, Any]) -> "Iterator[LoadedModel]":
    """The model in `folder`, in an engine of its own.  Raises what loading it raises."""
    # Not above: an engine asks for its machine.
    from hmt.engine.engine import Engine

    with Engine(**{**_OPTIONS, **options}) as engine:
        yield engine.load_model(folder)


def beside(options: Mapping[str, Any], others: int) -> dict[str, Any]:
    """Options of an engine that has as much of the GPU beside `others` in this process."""
    return {**options, "gpu_memory": parse_bytes(options["gpu_memory"]) * (others + 1)}


def launched(
    few: "LoadedModel",
    many: "LoadedModel",
    seconds: float,
    folders: tuple[Path, Path] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Launched:
    """Of two models that differ by the number of their layers, which take turns for `seconds`.

    folders, options   of the same models, to measure what bringing their experts takes as well
    """
    with ExitStack() as stack:
        models = [few, many]
        for folder in folders or ():
            limit = _limit_that_brings(folder, options or {})
            if limit is not None:
                given = {**(options or {}), **_BRINGING, "gpu_memory": limit}
                models.append(stack.enter_context(opened(folder, given)))
        taken = _by_turns(models, seconds)
        layers = [_layers(model) for model in models[:2]]
        more = layers[1] - layers[0]
        layer = max(0.0, taken[1] - taken[0]) / more
        expert, bringing = 0.0, models[2:]
        if len(bringing) == 2 and all(_brings_experts(model.prepared) for model in bringing):
            each = len(bringing[0].prepared.demand.of_kind(BlockKind.EXPERT)) // layers[0]
            expert = max(0.0, (taken[3] - taken[2]) / more - layer) / each
        return Launched(max(0.0, taken[0] - layers[0] * layer), layer, expert)


def _by_turns(models: "Sequence[LoadedModel]", seconds: float) -> list[float]:
    """What a prompt takes, by model, in units of the pace meanwhile."""
    request = Request(input=text(PIECE), max_new_tokens=1, ignore_eos=True)
    for model in (*models, *models):  # kernels are compiled, and slots filled
        model.infer(request)
    times: list[list[float]] = [[] for _ in models]
    paces: list[float] = []
    end = time.perf_counter() + seconds
    while len(times[0]) < _ROUNDS or time.perf_counter() < end:
        for model, taken in zip(models, times, strict=True):
            paces.append(pace_of(model))
            begin = time.perf_counter()
            model.infer(request)
            taken.append(time.perf_counter() - begin)
    unit_s = middle_half(paces)
    return [middle_half(taken) / unit_s for taken in times]


def _limit_that_brings(folder: Path, options: Mapping[str, Any]) -> int | None:
    """A limit of GPU memory with which half of the experts, or about that, are brought.

    None where there is none.
    """
    from hmt.engine.device_loading import device_budget
    from hmt.engine.engine import Engine
    from hmt.engine.loading import prepare

    found = []
    with suppress(HMTError), Engine(**{**_OPTIONS, **options, **_BRINGING}) as engine:
        device, config = engine._device, engine.config
        assert device is not None and config.gpu_memory_bytes is not None
        whole = prepare(folder, config, None, device, engine._device_left())
        experts = sum(b.slot_bytes for b in whole.demand.of_kind(BlockKind.EXPERT))
        needed = sum(whole.plan.device.reserved.values())
        for eighths in range(1, 9):
            wanted, limit = needed - experts * eighths // 8, config.gpu_memory_bytes
            with suppress(HMTError):
                for _ in range(_TRIES):  # libraries have a share of every limit
                    limited = replace(config, gpu_memory_bytes=limit)
                    limit -= device_budget(device, limited) - wanted
                limited = replace(config, gpu_memory_bytes=limit)
                left = device_budget(device, limited)
                if _brings_experts(prepare(folder, limited, None, device, left)):
                    found.append(limit)
    return found[len(found) // 2] if found else None


def _brings_experts(prepared: "Prepared") -> bool:
    experts, plan = prepared.demand.of_kind(BlockKind.EXPERT), prepared.plan
    away = all(plan.homes[b.id] is Tier.HOST for b in experts)
    return bool(experts) and away and plan.device.staging_slots > 0


def _layers(model: "LoadedModel") -> int:
    return model.prepared.model.spec.layers
