"""What modules are called with, brought to where their parameters lie.

What is around the layers runs on the CPU.  Layers run where their attention lies, and a child whose
block computes elsewhere is called there.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hmt.contracts.encoding import WeightTensor

CPU = torch.device("cpu")
Known = dict[int, tuple[Tensor, Tensor]]  # by id: a tensor, and what became of it


def place_of(params: Mapping[str, WeightTensor]) -> torch.device:
    """Where a block's parameters lie; they lie together."""
    return next((w.data.device for w in params.values()), CPU)


def moved_to(value: Any, where: torch.device, known: Known | None = None) -> Any:
    """`value` with its tensors on `where`, also those in tuples, lists and dictionaries.

    known   what was brought there before: layers are called with the same tensors
    """
    if isinstance(value, Tensor):
        return _moved(value, where, known)
    if type(value) in (tuple, list):
        return type(value)(moved_to(one, where, known) for one in value)
    if type(value) is dict:
        return {name: moved_to(one, where, known) for name, one in value.items()}
    return value


def first_place(*values: Any) -> torch.device | None:
    """Where the first tensor in `values` lies; None without one."""
    return next((tensor.device for tensor in _tensors(values)), None)


def _moved(tensor: Tensor, where: torch.device, known: Known | None) -> Tensor:
    if tensor.device == where:
        return tensor
    if known is None:
        return tensor.to(where)
    if id(tensor) not in known:
        known[id(tensor)] = tensor, tensor.to(where)
    return known[id(tensor)][1]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif type(value) in (tuple, list, dict):
        for one in value.values() if type(value) is dict else value:
            yield from _tensors(one)
