"""Layers in plain torch through which gradients pass, of weights that stay by lease alone.

A product keeps none of its weight for the backward pass, but leases the weight's block again.  So
weights take two slots however many layers a gradient passes through.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hmt.base.errors import ConfigError
from hmt.contracts.blocks import BlockId, BlockKind, Role
from hmt.contracts.encoding import WeightTensor
from hmt.contracts.model import ModelSpec
from hmt.contracts.store import LeasedGroup
from hmt.finetuning.adapters import Place, Trained
from hmt.kernels import reference
from hmt.kernels.backend_registry import Backend, register
from hmt.quantizing import LayerWeights
from hmt.weights import WeightStore
from hmt.weights.adapters import is_adapted

_CHUNK_BYTES = 512 << 10  # of a weight's numbers at once: they stay in the cache
_PANEL_ROWS = 128  # a multiple of those of every packing


@dataclass(frozen=True, slots=True, eq=False)
class FrozenWeight(WeightTensor):
    """A leased weight of which a product keeps nothing.

    again    leases its block anew, and gives the weight
    added    what is trained; None for nothing
    applied  is to be called by what multiplies with it
    """

    again: Callable[[], AbstractContextManager[WeightTensor]] = None  # type: ignore[assignment]
    added: Trained | None = None
    applied: Callable[[], None] = lambda: None


def chunk_bytes(shape: tuple[int, ...]) -> int:
    """Of as many numbers in f32 of a weight of this shape as are made at once."""
    return 4 * shape[1] * min(shape[0], _chunk_rows(shape[1]))


def _chunk_rows(width: int) -> int:
    return max(1, _CHUNK_BYTES // (4 * width * _PANEL_ROWS)) * _PANEL_ROWS


def _chunks(weight: WeightTensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows of a weight, and these in f32 [rows, in]."""
    out, width = weight.shape
    rows = _chunk_rows(width)
    for first in range(0, out, rows):
        part = slice(first, min(first + rows, out))
        yield part, reference.dequantize(weight, torch.float32, part)


class _Product(torch.autograd.Function):
    """`reference.linear` in f32, without a bias; the gradient is of x alone.

    Weights that the engine multiplies with rounded activations are multiplied with them as they
    are: rounding has no gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: FrozenWeight) -> Tensor:
        ctx.again = weight.again
        out = x.new_empty(len(x), weight.shape[0])
        for part, numbers in _chunks(weight):
            torch.mm(x, numbers.T, out=out[:, part])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        with ctx.again() as weight:
            total = grad.new_zeros(len(grad), weight.shape[1])
            for part, numbers in _chunks(weight):
                total.addmm_(grad[:, part], numbers)
        return total, None


class _Operations:
    """The reference's operations that multiply with weights, for FrozenWeight."""

    def linear(self, x: Tensor, w: WeightTensor, bias: Tensor | None = None) -> Tensor:
        """`reference.linear`, with what is trained."""
        if not isinstance(w, FrozenWeight):
            return reference.linear(x, w, bias)
        w.applied()
        out: Tensor = _Product.apply(x, w)  # type: ignore[no-untyped-call]
        if bias is not None:
            out = out + bias.to(out.dtype)
        return out if w.added is None else out + w.added(x)

    def linear_many(
        self, x: Tensor, params: Mapping[str, WeightTensor], names: tuple[str, ...]
    ) -> Tensor:
        """`reference.linear_many`."""
        biases = (params.get(f"{name}_bias") for name in names)
        parts = [
            self.linear(x, params[name], None if bias is None else bias.data)
            for name, bias in zip(names, biases, strict=True)
        ]
        return torch.cat(parts, dim=1)


@contextmanager
def differentiable() -> Iterator[None]:
    """Compute in plain torch on the CPU, the whole process."""
    before = register("cpu", lambda: Backend("plain torch", _Operations(), on_host=True))
    try:
        yield
    finally:
        register("cpu", before)


class TrainingWeights(LayerWeights):
    """Implements Weights: linear layers are FrozenWeight, and all other parameters copies."""

    def __init__(
        self, spec: ModelSpec, store: WeightStore, trained: Mapping[Place, Trained]
    ) -> None:
        super().__init__(store)
        self._architecture = spec.architecture
        self._trained = trained
        self._frozen = {
            (block.id, param.name)
            for block in spec.blocks
            for param in block.params
            if param.role is Role.LINEAR and len(param.shape) == 2
            if block.id.kind is BlockKind.HEAD or is_adapted(block.id, param)
        }
        # Not by block: of experts some are leased that no token goes to.
        self._leased: set[tuple[BlockKind, str]] = set()
        self._applied: set[tuple[BlockKind, str]] = set()

    def check(self) -> None:
        """Raise ConfigError where a leased weight was used in another way than `ops.linear`."""
        if missing := self._leased - self._applied:
            kind, name = min(missing)
            raise ConfigError(
                f"{self._architecture} computes {name} of {kind} blocks in a way through which "
                "training passes no gradients"
            )

    @contextmanager
    def lease(self, block: BlockId) -> Iterator[Mapping[str, WeightTensor]]:
        """See Weights."""
        with self._store.lease(block) as stored:
            yield {name: self._kept(block, name, weight) for name, weight in stored.items()}

    @contextmanager
    def lease_each(self, blocks: Sequence[BlockId]) -> Iterator[Iterator[LeasedGroup]]:
        """See Weights: groups of one block."""

        def groups() -> Iterator[LeasedGroup]:
            for block in blocks:
                with self.lease(block) as params:
                    yield [(block, params)]

        yield groups()

    def _kept(self, block: BlockId, name: str, weight: WeightTensor) -> WeightTensor:
        own: dict[str, Any] = {
            one.name: getattr(weight, one.name) for one in fields(WeightTensor) if one.init
        }
        if (block, name) not in self._frozen:
            copied: dict[str, Any] = {
                n: v.clone() if isinstance(v, Tensor) else v for n, v in own.items()
            }
            return WeightTensor(**copied)
        use = block.kind, name
        self._leased.add(use)

        @contextmanager
        def again() -> Iterator[WeightTensor]:
            with self._store.lease(block) as stored:
                yield stored[name]

        return FrozenWeight(
            **own,
            again=again,
            added=self._trained.get((block, name)),
            applied=partial(self._applied.add, use),
        )
