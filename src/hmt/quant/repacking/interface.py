"""What the code of a published form can do."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from hmt.contracts.encoding import Encoding, WeightTensor
from hmt.quant.packed import Format


@runtime_checkable
class WeightImporter(Protocol):
    """How one parameter is published, as code: a frozen dataclass made of a FormName's options."""

    def format(self, shape: tuple[int, ...]) -> Format:
        """What it becomes in memory, without loss, where its shape (after rows are taken) is this.

        Raises CheckpointError for a shape that the form cannot have.
        """
        ...

    def unpack(self, parts: Mapping[str, Tensor], target: WeightTensor, first: int) -> None:
        """Write rows [first, first + target.shape[0]) of the parameter to `target`.

        parts    uint8 [bytes] by name, at any address: of parts made of rows those of these rows
                 alone (of tiles that they lie in); of others everything
        target   in the format that `format` says, or rows of it, which then begin at a multiple
                 of 16 and lie one after the other
        Raises CheckpointError for numbers that contradict the configuration.
        """
        ...


@dataclass(frozen=True, slots=True)
class InPlaceImporter:
    """Lies in memory as published: its parts are the components of the format, by their names.

    tile   of FP8_BLOCK: (rows, columns) that share a scale; 0 for all of them
    """

    encoding: Encoding
    tile: tuple[int, int] = (0, 0)

    def format(self, shape: tuple[int, ...]) -> Format:
        """The format it is in, published and in memory."""
        if self.encoding is not Encoding.FP8_BLOCK:
            return Format(self.encoding)
        return Format(self.encoding, tile=(self.tile[0] or shape[0], self.tile[1] or shape[1]))
