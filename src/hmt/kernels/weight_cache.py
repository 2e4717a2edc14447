"""What kernels make of a weight once and use in every call: descriptions, addresses, parts."""

from typing import Generic, TypeVar

from hmt.contracts.encoding import WeightTensor

T = TypeVar("T")


class WeightCache(Generic[T]):
    """One value of a kind for each weight, by its WeightTensor.

    A value lives as long as the WeightTensor that it is kept with, and no longer.  A store makes
    new ones whenever a block is loaded, moved or copied, so a value may hold addresses of the
    weight's memory: none of an old place is ever found.  It may hold addresses of other weights
    only where these are of the same block, whose weights move together.

    For the thread that computes.  Each kind is a constant of the module that makes its values.
    """

    def __getitem__(self, weight: WeightTensor) -> T:
        """The value of `weight`.  Raises KeyError where none was set."""
        value: T = weight.kernel_cache[self]
        return value

    def __setitem__(self, weight: WeightTensor, value: T) -> None:
        weight.kernel_cache[self] = value

    def get(self, weight: WeightTensor) -> T | None:
        """The value of `weight`; None where none was set."""
        return weight.kernel_cache.get(self)
