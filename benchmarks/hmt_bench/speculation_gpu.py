"""Decoding on a GPU with and without draft tokens, interleaved, of models with random weights.

`dense`: a model that fits on the GPU.  Nothing drafts well for random weights: the proposer knows
the answer: a draft token is the right one with a chosen probability.  It pays what a prediction
layer costs: for each draft token a step of a model of the same sizes with one layer, on the same
GPU, with embedding and head (its projection of two hidden states to one is missing, 4% of that).

`moe`: experts that stay in host memory, and the engine's own proposer, on a text that repeats and
on one that is drawn, in which nothing does.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from torch import Tensor
from typing_extensions import override

from hmt.base.errors import HMTError
from hmt.bench.environment import describe
from hmt.contracts.request import Request, Sampling
from hmt.engine import Engine, LoadedModel
from hmt.engine.speculation.draft import Draft, Proposer, Worth
from hmt.engine.speculation.draft_model import DraftModel
from hmt.engine.speculation.model_proposers import DraftModelProposer, FirstOf
from hmt.profiling.random_model import Shape
from hmt_bench.aliased_pack import write_tiled_pack
from hmt_bench.gpu import SHAPES

_PROMPT_TOKENS: Final = 64
_DEPTHS: Final = 8  # classes of draft tokens, by place


@dataclass(frozen=True)
class Task:
    """What is measured.

    shape          of SHAPES
    quantization   of its pack; "none" keeps bf16
    memory         of the GPU, for the model
    host_memory    of the host
    accepted       share of draft tokens that are right; 0: the engine's own proposer
    tokens         of each answer
    """

    shape: str
    quantization: str
    memory: str
    host_memory: str
    accepted: float = 0.0
    tokens: int = 200
    rounds: int = 3


@dataclass(slots=True)
class _Rates:
    off: list[float] = field(default_factory=list)
    auto: list[float] = field(default_factory=list)
    proposed: int = 0
    accepted: int = 0
    steps: int = 0
    tokens: int = 0
    alike: bool = True


class PaidOracle(Proposer):
    """Knows how sequences go on, is wrong as often as it is told, and lets a layer compute."""

    needs_hidden = False
    is_slow = True

    def __init__(self, known: Sequence[int], accepted: float, layer: DraftModel) -> None:
        """`known`: a prompt and its answer."""
        self._known, self._accepted, self._layer = list(known), accepted, layer
        self._random = random.Random(1)

    @override
    def propose(
        self, number: int, scope: str, tokens: Sequence[int], most: int, worth: Worth
    ) -> Draft:
        chosen, classes = list[int](), list[str]()
        held = self._layer.tokens(number)
        common = min(len(held), len(tokens) - 1)
        while held[:common] != list(tokens[:common]):
            common -= 1
        self._layer.keep(number, common)
        following = list(tokens[common:])
        for right in self._known[len(tokens) : len(tokens) + most]:
            name = f"mtp {min(len(chosen), _DEPTHS)}"
            if chosen and not worth.may_be(name):  # as `decoded` does
                break
            if self._layer.feed(number, following) is None or not worth(name):
                break
            hit = self._random.random() < self._accepted
            following = [right if hit else (right + 1) % 100]
            chosen += following
            classes.append(name)
        return Draft(tuple(chosen), tuple(classes))

    @override
    def observe(self, number: int, tokens: Sequence[int], start: int, hidden: Tensor) -> None:
        """It looks at tokens alone."""

    @override
    def ended(self, number: int) -> None:
        self._layer.close(number)


def run(
    folder: Path, task: Task, progress: Callable[[str], None] = lambda what: None
) -> dict[str, Any]:
    """Tokens per second with and without draft tokens; packs are kept in `folder`.

    Raises HMTError where the answers of a model that fits differ.
    """
    shape = SHAPES[task.shape]
    pack = _pack(folder, task.shape, shape, task.quantization, progress)
    with ExitStack() as stack:
        options = {"gpu_memory": task.memory, "host_memory": task.host_memory}
        if task.accepted:
            one = _layer_of(shape)
            small = _pack(folder, f"{task.shape}-layer", one, task.quantization, progress)
            options["speculate"] = f"draft={small}"
        model = stack.enter_context(_opened(pack, options, progress))
        results = {
            name: _measured(model, task, request, progress)
            for name, request in _requests(task).items()
        }
        notes = list(model.summary().notes)
        machine = describe(model.prepared.machine)
    return {
        "benchmark": "speculation on a GPU",
        "machine": machine,
        "task": {name: getattr(task, name) for name in task.__dataclass_fields__},
        "notes": notes,
        "results": [_figures(name, rates) for name, rates in results.items()],
    }


def _prompt() -> list[int]:
    return [16 + (n * 37) % 480 for n in range(_PROMPT_TOKENS)]


def _requests(task: Task) -> dict[str, Request]:
    ids = _prompt()
    greedy = Request(ids, task.tokens, ignore_eos=True)
    if task.accepted:
        return {"greedy": greedy}
    drawn = Request(ids, task.tokens, sampling=Sampling(temperature=1.0, seed=7), ignore_eos=True)
    return {"greedy": greedy, "drawn": drawn}


def _measured(
    model: LoadedModel,
    task: Task,
    request: Request,
    progress: Callable[[str], None],
) -> _Rates:
    speculator = model._core.speculator
    own = speculator._proposer
    rates = _Rates()
    speculator._proposer = None
    wanted = model.infer(request).token_ids
    drafting = own
    if task.accepted:
        drafting = PaidOracle([*_prompt(), *wanted], task.accepted, _draft_model(own))
    for number in range(-1, task.rounds):  # the first captures, and lets the gate measure
        ways = ("off", "auto") if number % 2 else ("auto", "off")
        for way in ways:
            progress(f"{task.shape}: {way}, round {number + 1} of {task.rounds}")
            speculator._proposer = drafting if way == "auto" else None
            model.reset_summary()
            salted = Request(
                request.input, request.max_new_tokens, sampling=request.sampling,
                ignore_eos=True, cache_salt=f"round {number}",
            )  # fmt: skip
            rates.alike &= model.infer(salted).token_ids == wanted
            summary = model.summary()
            if number < 0:
                continue
            getattr(rates, way).append(summary.generation.tokens_per_s)
            if way == "auto":
                rates.proposed += summary.speculation.proposed
                rates.accepted += summary.speculation.accepted
                rates.steps += summary.generation.steps
                rates.tokens += summary.generation.tokens
    speculator._proposer = own
    if task.accepted and not rates.alike:
        raise HMTError("draft tokens changed an answer: please report it")
    return rates


def _draft_model(proposer: Proposer | None) -> DraftModel:
    """What a loaded model drafts with besides lookup."""
    assert isinstance(proposer, FirstOf), "nothing is drafted"
    [found] = (one for one in proposer._all if isinstance(one, DraftModelProposer))
    return found._model


def _figures(name: str, rates: _Rates) -> dict[str, Any]:
    return {
        "text": name,
        "off": median(rates.off),
        "auto": median(rates.auto),
        "ratio": median(auto / off for auto, off in zip(rates.auto, rates.off, strict=True)),
        "rounds_off": rates.off,
        "rounds_auto": rates.auto,
        "proposed": rates.proposed,
        "accepted": rates.accepted,
        "tokens_per_step": rates.tokens / max(1, rates.steps),
        "same_answers": rates.alike,
    }


def _layer_of(shape: Shape) -> Shape:
    return Shape(
        1, shape.hidden_size, shape.intermediate_size, shape.heads, shape.kv_heads,
        shape.head_dim, shape.vocab_size,
    )  # fmt: skip


def _pack(
    folder: Path, name: str, shape: Shape, quantization: str, progress: Callable[[str], None]
) -> Path:
    parent = folder / f"{name}-{quantization.replace(':', '-')}"
    if not (parent / "pack").exists():
        progress(f"writing {name}")
        write_tiled_pack(parent, shape, quantization, written_layers=1, progress=progress)
    return parent / "pack"


@contextmanager
def _opened(
    pack: Path, options: dict[str, str], progress: Callable[[str], None]
) -> Iterator[LoadedModel]:
    progress(f"loading {pack.parent.name}")
    given: dict[str, Any] = {"gpus": "0", "context": 1024, "max_batch": 4, "check_weights": False}
    with Engine(**given | options) as engine:
        yield engine.load_model(pack)
