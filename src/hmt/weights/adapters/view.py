"""Weights as a step has them of which some rows have adapters."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from hmt.base.errors import AdapterError
from hmt.contracts.adapter import (
    AdaptedParams,
    AdaptedWeight,
    AdapterRows,
    LowRank,
    StepAdapters,
)
from hmt.contracts.blocks import BlockId, BlockKind
from hmt.contracts.encoding import WeightTensor
from hmt.contracts.step import Step
from hmt.contracts.store import LeasedGroup, MoeBackend, Weights
from hmt.weights.adapters.store import AdapterStore

Params = Mapping[str, WeightTensor]


class AdaptedView:
    """Implements Weights over others, for steps whose rows have these adapters."""

    def __init__(self, weights: Weights, adapters: StepAdapters) -> None:
        self.adapters = adapters
        self._weights = weights
        rows, parts = adapters.rows, adapters.parts
        self._rows, self._parts = rows, parts
        self._expert_rows: dict[int, AdapterRows] = {}
        with_experts: dict[int, set[int]] = {}
        for block, names in parts.items():
            if block.kind is BlockKind.EXPERT:
                own = with_experts.setdefault(block.layer, set())
                own.update(number for by_adapter in names.values() for number in by_adapter)
        for layer, numbers in with_experts.items():
            chosen = (number if number in numbers else 0 for number in rows.numbers)
            self._expert_rows[layer] = AdapterRows(chosen)
        self._leased: set[tuple[BlockId, str]] = set()
        self._applied: set[tuple[BlockId, str]] = set()
        self._known: dict[BlockId, AdaptedParams] = {}
        self.count = weights.count
        self.rows = weights.rows
        self.resident = weights.resident
        self.request = weights.request
        self.request_rows = weights.request_rows
        self.routed = weights.routed

    @contextmanager
    def lease(self, block: BlockId) -> Iterator[Params]:
        """Implements Weights."""
        with self._weights.lease(block) as params:
            yield self._adapted(block, params)

    @contextmanager
    def lease_each(self, blocks: Sequence[BlockId]) -> Iterator[Iterator[LeasedGroup]]:
        """Implements Weights."""
        with self._weights.lease_each(blocks) as groups:
            yield ([(b, self._adapted(b, params)) for b, params in group] for group in groups)

    def moe_backend(self, layer: int) -> MoeBackend | None:
        """Implements Weights: experts that adapters change are leased."""
        return None if layer in self._expert_rows else self._weights.moe_backend(layer)

    def check(self) -> None:
        """Raise AdapterError where what was leased was multiplied with as if without adapters."""
        missing = self._leased - self._applied
        if missing:
            block, name = min(missing, key=str)
            raise AdapterError(
                f"the adapter changes {name} of {block}, which this model computes in a way that "
                "takes no adapters: leave it out"
            )

    def _adapted(self, block: BlockId, params: Params) -> Params:
        own = self._parts.get(block, {})
        is_expert = block.kind is BlockKind.EXPERT and block.layer in self._expert_rows
        if not own and not is_expert:
            return params
        known = self._known.get(block)
        # A store makes new weights when it moves or loads a block, of all of its parameters.
        first = next(iter(params))
        if known is None or known.base[first] is not params[first]:
            rows = self._expert_rows[block.layer] if is_expert else self._rows
            weights = {
                name: AdaptedWeight.of(
                    params[name], rows, added, partial(self._applied.add, (block, name))
                )
                for name, added in own.items()
            }
            known = AdaptedParams(params, weights, rows if is_expert else None)
            self._known[block] = known
        self._leased.update((block, name) for name in own)
        return known


class AdapterViews:
    """Weights with adapters, one view at a time: steps that decode mostly have those of the last.

    For the thread that computes.

    used   whether any step had adapters
    """

    def __init__(self, weights: Weights, adapters: AdapterStore) -> None:
        self._weights, self._adapters = weights, adapters
        self._last: tuple[tuple[int, ...], AdaptedView] | None = None
        self.used = False
        adapters.watch(self._forget)

    @property
    def in_use(self) -> bool:
        """Whether requests that have not ended have adapters."""
        return self._adapters.in_use

    def of(self, step: Step) -> AdaptedView:
        """Weights for a step that has adapters.  Each is held by a request."""
        numbers = tuple(run.adapter for run in step.segments for _ in range(run.length))
        self.used = True
        last = self._last
        if last is None or last[0] != numbers:
            parts: dict[BlockId, dict[str, dict[int, LowRank]]] = {}
            rows = AdapterRows(numbers)
            for number in rows.present:
                for block, names in self._adapters.parts(number).items():
                    for name, added in names.items():
                        parts.setdefault(block, {}).setdefault(name, {})[number] = added
            last = self._last = numbers, AdaptedView(self._weights, StepAdapters(rows, parts))
        return last[1]

    def _forget(self) -> None:
        self._last = None
