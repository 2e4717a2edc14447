"""Which tensors of a checkpoint hold which parameters of transformers' modules.

transformers renames, splits and stacks tensors while it loads them, and undoes that when it saves.
Here it undoes it for tensors without numbers: what it makes of a parameter is a view of it, or a
concatenation, and tells by its offset which rows it holds.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.core_model_loading import PermuteForRope, revert_weight_conversion

from hmt.contracts.blocks import ParamSpec, Role


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Rows [first, end) of a parameter are rows [at, at + end - first) of a checkpoint's tensor.

    Rows are counted with all dimensions but the last one taken together.

    names   of the tensor; a checkpoint has one of them
    rows    of the tensor in all
    shape   of the tensor
    """

    first: int
    end: int
    names: tuple[str, ...]
    at: int
    rows: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Published:
    """Where parameters are published.

    slices  by parameter, in the order of its rows
    shapes  by parameter
    orders  of those whose rows are published in another order: which published row each is
    """

    slices: Mapping[str, tuple[TensorSlice, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    orders: Mapping[str, Tensor] = field(default_factory=dict)

    def whole(self, param: str, *, ordered: bool = False) -> bool:
        """Whether it is known where all of `param` is; `ordered`: or its rows in another order."""
        if param in self.orders and not ordered:
            return False
        covered = 0
        for piece in self.slices.get(param, ()):
            if piece.first != covered:
                return False
            covered = piece.end
        return covered == _rows(self.shapes[param])

    def specs(
        self, param: str, name: str, role: Role, rows: tuple[int, int] | None = None
    ) -> tuple[ParamSpec, ...]:
        """Parameters of a block called `name`, that are rows [first, end) of `param`; None: all.

        As many as there are tensors that hold them; their names then have a number behind.
        """
        shape = self.shapes[param]
        first, end = rows or (0, _rows(shape))
        parts = [p for p in self.slices[param] if p.first < end and p.end > first]
        if len(parts) == 1 and rows is None and (parts[0].at, parts[0].rows) == (0, end):
            return (ParamSpec(name, shape, parts[0].names, role),)
        specs = []
        for number, piece in enumerate(parts):
            low, high = max(first, piece.first), min(end, piece.end)
            begin = piece.at + low - piece.first
            taken: tuple[int, int] | None = (begin, begin + high - low)
            if taken == (0, piece.rows) and piece.rows == piece.end - piece.first:
                taken = None
            own = name if len(parts) == 1 else f"{name}.{number}"
            size = (high - low, *shape[-1:]) if len(shape) > 1 else (high - low,)
            if taken is None:
                size = piece.shape
            specs.append(ParamSpec(own, size, piece.names, role, rows=taken))
        return tuple(specs)


class _Aliases(TorchDispatchMode):
    """Copies are what they are copies of; concatenations of rows are noted."""

    def __init__(self) -> None:
        super().__init__()
        self.joined: dict[int, list[Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.clone.default:
            return args[0]
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.cat.default and (args[1:] or (0,))[0] == 0:
            self.joined[_storage(out)] = list(args[0])
        return out


def find(model: PreTrainedModel) -> Published:
    """Where the parameters of `model` (on the meta device) are in checkpoints; empty if unknown."""
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    probes = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    owners = {_storage(probe): name for name, probe in probes.items()}
    aliases = _Aliases()
    orders: dict[str, Tensor] = {}
    try:
        with _orders_noted(owners, orders), torch.no_grad(), aliases:
            tensors = revert_weight_conversion(model, dict(probes))
    except Exception:  # of operations that a view cannot be followed through
        tensors = {}
    pieces: dict[str, list[TensorSlice]] = defaultdict(list)
    prefix = f"{model.base_model_prefix}."
    tied = _tied(model)
    for name, tensor in tensors.items():
        for param, first, end, at, rows in _parts(tensor, owners, shapes, aliases):
            names = [name, name.removeprefix(prefix)]
            if (end - first, at) == (rows, 0) and rows == _rows(shapes[param]):
                names += [param, param.removeprefix(prefix), *tied.get(param, ())]
            own = tuple(dict.fromkeys(names))
            pieces[param].append(TensorSlice(first, end, own, at, rows, tuple(tensor.shape)))
    for param in shapes.keys() - pieces.keys():  # one of several names of the same numbers
        for other in tied.get(param, ()):
            if other in pieces:
                pieces[param] = pieces[other]
    found = {p: tuple(sorted(parts, key=lambda x: x.first)) for p, parts in pieces.items()}
    return Published(found, shapes, orders)


@contextmanager
def _orders_noted(owners: Mapping[int, str], orders: dict[str, Tensor]) -> Iterator[None]:
    """Until left, rows of heads are not put in another order; which one it is, is noted instead."""
    permute = PermuteForRope._permute_for_rope
    noted: list[tuple[str, PermuteForRope, int, Any]] = []

    def note(operation: PermuteForRope, tensor: Tensor, config: Any) -> Tensor:
        noted.append((owners[_storage(tensor)], operation, tensor.shape[0], config))
        return tensor

    PermuteForRope._permute_for_rope = note  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        PermuteForRope._permute_for_rope = permute  # type: ignore[method-assign]
    for name, operation, rows, config in noted:
        orders[name] = permute(operation, torch.arange(rows, device="cpu"), config).argsort()


def _tied(model: PreTrainedModel) -> dict[str, tuple[str, ...]]:
    """Other names of parameters that have several, but for matrices: `head` and tables see to them.

    A checkpoint has one of them.
    """
    names = defaultdict(list)
    for name, param in model.named_parameters(remove_duplicate=False):
        if param.dim() < 2:
            names[id(param)].append(name)
    return {
        name: tuple(other for other in same if other != name)
        for same in names.values()
        for name in same
    }


def _parts(
    tensor: Tensor,
    owners: Mapping[int, str],
    shapes: Mapping[str, tuple[int, ...]],
    aliases: _Aliases,
) -> Iterable[tuple[str, int, int, int, int]]:
    """(parameter, its first and last row, and where: at which of how many) for each part."""
    joined = aliases.joined.get(_storage(tensor))
    inputs = [tensor] if joined is None else joined
    rows = _rows(tuple(tensor.shape))
    at = 0
    for part in inputs:
        count = _rows(tuple(part.shape))
        param = owners.get(_storage(part))
        if param is not None and part.is_contiguous():
            width = shapes[param][-1] if len(shapes[param]) > 1 else 1
            own_width = part.shape[-1] if part.dim() > 1 else 1
            if width == own_width and part.storage_offset() % max(1, width) == 0:
                first = part.storage_offset() // max(1, width)
                yield param, first, first + count, at, rows
        at += count


def _rows(shape: tuple[int, ...]) -> int:
    return prod(shape[:-1]) if len(shape) > 1 else prod(shape)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
