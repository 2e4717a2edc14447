"""A layer's linear layers with what they are given: plain torch that tells of every product."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from hmt.contracts.blocks import BlockId
from hmt.contracts.encoding import WeightTensor
from hmt.kernels import reference
from hmt.kernels.backend_registry import Backend, register
from hmt.quantizing.structure import ParamId, leaders

See = Callable[[ParamId, Tensor], None]

_HOST = torch.device("cpu")


class Observer:
    """Knows which leased parameters are whose, and tells of the inputs that come to them."""

    def __init__(self, wanted: Callable[[ParamId], bool], see: See) -> None:
        """`see(place, inputs [tokens, in])` is called for every `wanted` one, and each product."""
        self._wanted = wanted
        self._see = see
        self._places: dict[int, ParamId] = {}  # by address
        self._leaders: dict[int, ParamId] = {}
        self._seen: dict[ParamId, tuple[int, torch.Size]] = {}

    @contextmanager
    def leased(self, block: BlockId, params: Mapping[str, WeightTensor]) -> Iterator[None]:
        """Parameters of `block` are at these addresses until the context ends."""
        leading = leaders(list(params))
        addresses = []
        for name, weight in params.items():
            if len(weight.shape) == 2:
                address = weight.data.data_ptr()
                self._places[address] = ParamId(block, name)
                self._leaders[address] = ParamId(block, leading[name])
                addresses.append(address)
        try:
            yield
        finally:
            for address in addresses:
                del self._places[address], self._leaders[address]
            self._seen = {place: x for place, x in self._seen.items() if place.block != block}

    def product(self, inputs: Tensor, weight: WeightTensor) -> None:
        """Hear of a product.  Rows of a weight that are not its first ones count for nothing."""
        address = weight.data.data_ptr()
        place = self._places.get(address)
        if place is None:
            return
        leader = self._leaders[address]
        given = (inputs.data_ptr(), inputs.shape)
        if place == leader:
            self._seen[leader] = given
            if self._wanted(place):
                self._see(place, inputs)
        elif self._seen.get(leader) != given:
            raise AssertionError(f"{place} is multiplied with other activations than {leader}")


class _Operations:
    """The reference's linear layers, of which an observer hears."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def linear(self, x: Tensor, w: WeightTensor, bias: Tensor | None = None) -> Tensor:
        """See the reference."""
        self._observer.product(x, w)
        return reference.linear(x, w, bias)

    def linear_many(
        self, x: Tensor, params: Mapping[str, WeightTensor], names: tuple[str, ...]
    ) -> Tensor:
        """See the reference."""
        for name in names:
            self._observer.product(x, params[name])
        return reference.linear_many(x, params, names)


@contextmanager
def observed(observer: Observer | None, where: torch.device) -> Iterator[None]:
    """Compute in plain torch on devices like `where`, and let `observer` hear of products.

    The whole process does.
    """
    operations = reference if observer is None else _Operations(observer)
    on_host = where == _HOST
    before = register(where.type, lambda: Backend("plain torch", operations, on_host=on_host))
    try:
        yield
    finally:
        register(where.type, before)
