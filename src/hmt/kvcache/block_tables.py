"""Sequences' block tables as tensors, in the memory where kernels read them."""

from collections.abc import Collection

import torch

from hmt.kvcache.page_table import Ints
from hmt.memory.device import sent


class BlockTables:
    """Keeps the int64 tensor of a sequence's pages or slots until they are others.

    A table is a new tensor each time: a step on the device's queue may still read the old one.
    """

    def __init__(self, where: torch.device) -> None:
        self._where = where
        self._tables: dict[int, tuple[Ints, torch.Tensor]] = {}

    def table(self, sequence: int, numbers: Ints) -> torch.Tensor:
        """`numbers` [n], which the caller replaces and never changes in place."""
        known = self._tables.get(sequence)
        if known is None or known[0] is not numbers:
            known = numbers, sent(torch.tensor(numbers, dtype=torch.int64), self._where)
            self._tables[sequence] = known
        return known[1]

    def keep(self, sequences: Collection[int]) -> None:
        """Forget the tables of all others."""
        for sequence in self._tables.keys() - sequences:
            del self._tables[sequence]
