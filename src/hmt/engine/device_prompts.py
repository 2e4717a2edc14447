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
    piece    a step before a prompt's last, without its layers
    layer    each of them
    expert   that is brought, beyond a layer; 0: not known
    """

    first: float
    piece: float
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
        prompts = [(few, PIECE), (many, PIECE), (few, 2 * PIECE)]
        for folder in folders or ():
            limit = _limit_that_brings(folder, options or {})
            if limit is not None:
                given = {**(options or {}), **_BRINGING, "gpu_memory": limit}
                prompts.append((stack.enter_context(opened(folder, given)), PIECE))
        one, more, two, *bringing = _by_turns(prompts, seconds)
        layers = _layers(few)
        layer = max(0.0, more - one) / (_layers(many) - layers)
        brought = [_brought(model.prepared) for model, _ in prompts[3:]]
        expert = 0.0
        if len(brought) == 2 and all(brought):
            # Of both together: they have other numbers of slots, and so of groups that are copied.
            expert = max(0.0, sum(bringing) - one - more) / sum(brought)
        first, piece = (max(0.0, each - layers * layer) for each in (one, two - one))
        return Launched(first, piece, layer, expert)


def _by_turns(prompts: "Sequence[tuple[LoadedModel, int]]", seconds: float) -> list[float]:
    """What prompts of so many tokens take, each of a model, in units of the pace meanwhile."""
    requests = [
        (model, Request(input=text(tokens), max_new_tokens=1, ignore_eos=True))
        for model, tokens in prompts
    ]
    for model, request in (*requests, *requests):  # kernels are compiled, and slots filled
        model.infer(request)
    times: list[list[float]] = [[] for _ in requests]
    end = time.perf_counter() + seconds
    while len(times[0]) < _ROUNDS or time.perf_counter() < end:
        for (model, request), taken in zip(requests, times, strict=True):
            # Of just then: where the pace went from 0.35 to 0.62 ms and back, a layer took 1.8 to
            # 2.8 units of the usual one.
            before_s, begin = pace_of(model), time.perf_counter()
            model.infer(request)
            took = time.perf_counter() - begin
            taken.append(2 * took / (before_s + pace_of(model)))
    return list(map(middle_half, times))


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


def _brought(prepared: "Prepared") -> int:
    """Experts that a prompt's step brings: all that no cache has.  0: none."""
    if not _brings_experts(prepared):
        return 0
    experts = len(prepared.demand.of_kind(BlockKind.EXPERT))
    return experts - prepared.plan.device.expert_slots * prepared.model.spec.layers


def _layers(model: "LoadedModel") -> int:
    return model.prepared.model.spec.layers
