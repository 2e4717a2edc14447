"""The modules that take the place of transformers' own: each takes its weights by lease.

None of them holds a number.  What surrounds them (residual sums, rotary positions, scalings, the
order of everything) is transformers' code, as it is.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hmt.contracts.blocks import TRUNK, BlockId, BlockKind
from hmt.contracts.encoding import WeightTensor
from hmt.kernels import ops
from hmt.kernels.backend_registry import backend_on
from hmt.models.fallback.call_context import StoppedError, current_context
from hmt.models.fallback.device_cache import CPU, first_place, moved_to, place_of


@dataclass(frozen=True, slots=True)
class Value:
    """A parameter that a module reads as a tensor.

    names   of its rows in its block, in order: a checkpoint may hold them in several tensors
    order   of those rows, which each row of the parameter is
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    order: Tensor | None = None

    def of(self, params: Mapping[str, WeightTensor]) -> Tensor:
        """The tensor, valid as long as the lease."""
        rows = joined(params, self.names).to(self.dtype)
        if self.order is not None:
            rows = rows[self.order.to(rows.device)]
        return rows.reshape(self.shape)


def joined(params: Mapping[str, WeightTensor], names: tuple[str, ...]) -> Tensor:
    """Unquantised numbers, of which several parameters may hold the rows."""
    parts = [params[name].data for name in names]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class LeasedLinear(nn.Module):
    """In place of a Linear, of which the checkpoint may hold the rows in several tensors."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.weight.dtype
        self.block: BlockId | None = None
        self.names: tuple[str, ...] = ()
        self.bias_names: tuple[str, ...] = ()

    @property
    def weight(self) -> Tensor:
        """The matrix itself, for code that does not call the module: a copy."""
        work = current_context()
        if work.weights is None:
            return torch.zeros(self.out_features, self.in_features, dtype=self.dtype)
        assert self.block is not None
        params = work.use(self.block)
        return torch.cat([ops.dequantize(params[name], self.dtype) for name in self.names])

    @property
    def bias(self) -> Tensor | None:
        """What is added, for code that does not call the module."""
        work = current_context()
        if not self.bias_names:
            return None
        if work.weights is None:
            return torch.zeros(self.out_features, dtype=self.dtype)
        assert self.block is not None
        return joined(work.use(self.block), self.bias_names).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out]."""
        work = current_context()
        if work.weights is None:
            work.record.linear(self.out_features)
            return _stand_in(x, self.out_features)
        assert self.block is not None
        params = work.use(self.block)
        flat = x.reshape(-1, self.in_features).to(place_of(params))
        parts = [ops.linear(flat, params[name]) for name in self.names]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if self.bias_names:
            out = out + joined(params, self.bias_names).to(out.dtype)
        return out.view(*x.shape[:-1], self.out_features).to(x.device)


class LazyTable(Tensor):
    """Looks like an Embedding's weight; its rows are looked up where they lie.

    Only `embedding` computes with it: the module around it, which may scale or shift, stays.
    """

    block: BlockId

    @staticmethod
    def replace(module: nn.Embedding, number: int) -> BlockId:
        """Take the place of a module's table, which holds no numbers, as the given one."""
        block = BlockId(TRUNK, BlockKind.EMBEDDING, number)
        table = module.weight
        del module.weight
        lazy = table.detach().as_subclass(LazyTable)
        lazy.block = block
        object.__setattr__(module, "weight", lazy)
        return block

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of int64 ids [...]: [..., width]."""
        work = current_context()
        if work.weights is None:
            work.record.table(self.block)
            waves = ids[..., None] + torch.arange(1, self.shape[1] + 1)
            return waves.sin().to(self.dtype)
        flat = ids.reshape(-1).cpu()
        found = work.weights.rows(self.block, "weight", flat).to(self.dtype)
        return found.view(*ids.shape, found.shape[1]).to(ids.device)

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Look up rows; all else is as for any tensor without numbers."""
        if func is F.embedding and isinstance(args[1], LazyTable):
            return args[1].rows(args[0])
        if func is Tensor.__getitem__ and isinstance(args[0], LazyTable):
            row = args[1][0] if isinstance(args[1], tuple) else args[1]  # of padding, say
            return args[0].rows(torch.as_tensor(row))
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return CPU  # where code brings token ids
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class LeasedHead(nn.Module):
    """In place of the output layer: its rows are in several blocks.

    chunks  blocks, and how many rows each has
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.weight.dtype
        self.biased = linear.bias is not None
        self.chunks: tuple[tuple[BlockId, int], ...] = ()

    @property
    def weight(self) -> Tensor:
        """For code that asks for its dtype or shape: it holds no numbers."""
        return torch.empty(self.out_features, self.in_features, dtype=self.dtype, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., vocabulary].  StoppedError if only x was wanted."""
        work = current_context()
        if work.stops:
            work.seen = x
            raise StoppedError
        if work.weights is None:
            work.record.head = True
            return x.new_zeros(*x.shape[:-1], self.out_features)
        flat = x.reshape(-1, self.in_features)
        out = flat.new_empty(len(flat), self.out_features)
        first = 0
        for block, rows in self.chunks:
            params, part = work.use(block), out[:, first : first + rows]
            ops.linear_into(part, flat, params["weight"])
            if self.biased:
                part += params["bias"].data.to(part.dtype)
            first += rows
        return out.view(*x.shape[:-1], self.out_features)


class Unit(nn.Module):
    """In place of a child of a layer: calls it with the parameters of one block.

    values   by the child's own names: parameters that no replaced module reads
    lends    the child reads them by itself (`lent`)
    """

    def __init__(self, inner: nn.Module, name: str) -> None:
        super().__init__()
        self.inner = inner
        self.name = name
        self.block: BlockId | None = None
        self.follows_attention = False
        self.lends = False
        self.values: dict[str, Value] = {}
        self._buffers_by_place: dict[torch.device, dict[str, Tensor]] = {}

    def __getattr__(self, name: str) -> Any:
        """What the layer asks its child for."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the child's."""
        work = current_context()
        if work.weights is None:
            with work.record.unit(self.name):
                stand_ins = {} if self.lends else _stand_ins(self.values)
                return call_with(self.inner, stand_ins, args, kwargs)
        if self.follows_attention:
            work.residual = args[0] if args else next(iter(kwargs.values()))
        if self.lends:
            return self.inner(*args, **kwargs)
        assert self.block is not None
        params = work.use(self.block)
        where, came_from = place_of(params), first_place(args, kwargs)
        found = self._buffers_on(where)
        found |= {name: value.of(params) for name, value in self.values.items()}
        if came_from is None or came_from == where:
            return call_with(self.inner, found, args, kwargs)
        args, kwargs = moved_to((args, kwargs), where)
        return moved_to(call_with(self.inner, found, args, kwargs), came_from)

    def _buffers_on(self, where: torch.device) -> dict[str, Tensor]:
        """Buffers that no checkpoint has, where they lie elsewhere than the child computes."""
        if backend_on(where).on_host:  # as they were made
            return {}
        if where not in self._buffers_by_place:
            self._buffers_by_place[where] = {
                name: buffer.to(where)
                for name, buffer in self.inner.named_buffers()
                if not buffer.is_meta
            }
        return dict(self._buffers_by_place[where])


class Layer(nn.Module):
    """A layer with its own parameters, those that belong to none of its children."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.block: BlockId | None = None
        self.values: dict[str, Value] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the layer's."""
        work = current_context()
        if not self.values:
            return self.inner(*args, **kwargs)
        if work.weights is None:
            return call_with(self.inner, _stand_ins(self.values), args, kwargs)
        assert self.block is not None
        params = work.use(self.block)
        # Copies: the layer's children use other blocks.
        found = {name: value.of(params).clone() for name, value in self.values.items()}
        return call_with(self.inner, found, args, kwargs)


class Stage(nn.Module):
    """In place of a layer where what is around the layers is run without them.

    answer   makes of hidden states what the layer returns
    """

    def __init__(self, layer: nn.Module, index: int, answer: Callable[[Tensor], Any]) -> None:
        super().__init__()
        object.__setattr__(self, "_layer", layer)  # not a child: what is around has no layers
        self.index = index
        self.answer = answer

    def __getattr__(self, name: str) -> Any:
        """What the model asks its layer for."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "_layer"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The hidden states that came, or those that the work has instead."""
        work = current_context()
        work.calls[self.index] = args, kwargs
        if self.index == work.ends:
            raise StoppedError
        hidden = args[0] if args else kwargs["hidden_states"]
        return self.answer(hidden if work.instead is None else work.instead)


def call_with(
    inner: nn.Module, found: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `inner` with tensors in the place of parameters and buffers, by their names.

    torch's functional_call does the same with more checks: around a layer of an encoder with 12
    parameters it takes 0.15 ms of a Xeon core, and this 0.09.
    """
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for name, tensor in found.items():
            path, _, own = name.rpartition(".")
            module = inner.get_submodule(path)
            held: dict[str, Any] = module._parameters
            if own not in held:
                held = module._buffers
            before.append((held, own, held[own]))
            held[own] = tensor
        return inner(*args, **kwargs)
    finally:
        for held, own, tensor in before:
            held[own] = tensor


def _stand_in(x: Tensor, width: int) -> Tensor:
    """Numbers for a linear layer's while a model is looked at: of each token its own."""
    return x[..., torch.arange(width) * 7 % x.shape[-1]]


def _stand_ins(values: Mapping[str, Value]) -> dict[str, Tensor]:
    """Numbers for parameters while a model is looked at."""
    return {name: stand_in(value.shape, value.dtype) for name, value in values.items()}


def stand_in(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Numbers for a parameter: all rows the same, without memory of their own."""
    row = torch.arange(shape[-1] if shape else 1, dtype=torch.float32).sin() * 0.2 + 0.5
    return (row if shape else row[0]).to(dtype).expand(shape)
