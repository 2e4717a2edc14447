"""What is done to weights before they are rounded, without a change of what the model computes."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hmt.quantizing.structure import Folding, ParamId

Change = Callable[[Tensor], Tensor]

_HOST = torch.device("cpu")


class Changes:
    """Functions of parameters, by place; each gets and gives numbers of one shape and dtype.

    What rows of matrices become does not depend on other rows where their block belongs to no
    layer: tables can be changed some rows at a time.
    """

    def __init__(self, where: torch.device = _HOST) -> None:
        """None yet; they are computed on the device `where`."""
        self.where = where
        self._functions: dict[ParamId, tuple[Change, ...]] = {}

    def __contains__(self, place: object) -> bool:
        return place in self._functions

    def add(self, place: ParamId, change: Change) -> None:
        """Behind what is done to it already."""
        self._functions[place] = (*self._functions.get(place, ()), change)

    def of(self, place: ParamId, numbers: Tensor) -> Tensor:
        """What numbers of a parameter become, on the changes' device."""
        numbers = numbers.to(self.where)
        for change in self._functions.get(place, ()):
            numbers = change(numbers)
        return numbers


def fold(changes: Changes, folding: Folding, factors: Tensor, made: Mapping[str, Tensor]) -> None:
    """Let the weights behind have `factors` [inputs] more, and what is in front of them less.

    made   parameters of the block in front, as they are stored.  A norm is divided as exactly as
           its dtype allows, and what that lacks the weights behind make up for
    """
    before = folding.before
    stored = made[before.name].to(changes.where)
    if stored.dim() == 1:
        now = changes.of(before, stored.to(factors.dtype))
        divided = (now / factors).to(stored.dtype).to(factors.dtype)
        factors = torch.where(divided == 0, 1, now / divided)
        changes.add(before, lambda _: divided)
    else:
        divisors = factors  # bound to this name alone
        changes.add(before, lambda weight: weight / divisors[:, None])
        if f"{before.name}_bias" in made:
            bias = ParamId(before.block, f"{before.name}_bias")
            changes.add(bias, lambda numbers: numbers / divisors)
    for place in folding.behind:
        changes.add(place, lambda weight: weight * factors)
