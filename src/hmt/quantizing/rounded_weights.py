"""A layer's weights, some of which are rounded, to measure what that does to its output."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from hmt.contracts.blocks import BlockId
from hmt.contracts.encoding import Encoding, WeightTensor
from hmt.contracts.store import Weights
from hmt.kernels import ops
from hmt.quant.methods.interface import Target
from hmt.quantizing.changes import Changes
from hmt.quantizing.memory_plan import ROWS_NUMBERS
from hmt.quantizing.stores import LayerWeights, on_device
from hmt.quantizing.structure import ParamId
from hmt.quantizing.units import Unit
from hmt.weights import WeightStore


class RoundedWeights(LayerWeights):
    """A layer's weights, some of which are rounded whenever they are leased."""

    def __init__(
        self,
        store: WeightStore,
        targets: Mapping[ParamId, Target],
        rounded: Callable[[Tensor, Target], Tensor],
        changes: Changes,
    ) -> None:
        super().__init__(store, changes=changes)
        self._targets, self._rounded = targets, rounded

    @contextmanager
    def lease(self, block: BlockId) -> Iterator[Mapping[str, WeightTensor]]:
        """See Weights."""
        with super().lease(block) as params:
            yield {name: self._of(ParamId(block, name), weight) for name, weight in params.items()}

    def _of(self, place: ParamId, weight: WeightTensor) -> WeightTensor:
        target = self._targets.get(place)
        if target is None:
            return weight
        numbers = torch.empty(weight.shape, device=weight.data.device)
        step = max(1, ROWS_NUMBERS // weight.shape[1])
        for start in range(0, weight.shape[0], step):
            rows = slice(start, min(start + step, weight.shape[0]))
            numbers[rows] = self._rounded(ops.dequantize(weight, torch.float32, rows), target)
        return WeightTensor(Encoding.F32, weight.shape, numbers)


def weight_rows(unit: Unit, weights: Weights, changes: Changes, *, apart: bool) -> Iterator[Tensor]:
    """The weight in f32, all [outputs, inputs] of it, or some rows after the other.

    It is on the device of `changes`.
    Rows that are changed must come all together.
    """
    step = max(1, ROWS_NUMBERS // unit.shape[1])
    whole = []
    for place in unit.places:
        with weights.lease(place.block) as params:
            weight = on_device(params[place.name], changes.where)
            if not apart:
                numbers = ops.dequantize(weight, torch.float32)
                whole.append(changes.of(place, numbers) if place in changes else numbers.clone())
                continue
            for start in range(0, weight.shape[0], step):
                rows = slice(start, min(start + step, weight.shape[0]))
                yield ops.dequantize(weight, torch.float32, rows).clone()
    if not apart:
        yield whole[0] if len(whole) == 1 else torch.cat(whole)
