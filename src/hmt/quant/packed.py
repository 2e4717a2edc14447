"""How an encoded parameter lies in memory: the sizes of its components, and views of them."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hmt.contracts.encoding import Activations, Encoding, WeightTensor

_DTYPES = {
    Encoding.F32: torch.float32,
    Encoding.F16: torch.float16,
    Encoding.BF16: torch.bfloat16,
    Encoding.FP8_BLOCK: torch.float8_e4m3fn,
    Encoding.INT8_CHANNEL: torch.int8,
    Encoding.INT4_GROUP: torch.uint8,
}


@dataclass(frozen=True, slots=True)
class Format:
    """Everything about an encoded parameter except its shape and its numbers.

    group_size    inputs that share a scale (INT4_GROUP)
    tile          (rows, columns) that share a scale (FP8_BLOCK)
    activations   what it is multiplied with; does not change the bytes
    """

    encoding: Encoding
    group_size: int = 0
    tile: tuple[int, int] = (0, 0)
    activations: Activations = Activations.FLOAT

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers or codes."""
        return _DTYPES[self.encoding]

    def data_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the numbers or codes of a parameter of `shape`."""
        if self.encoding is not Encoding.INT4_GROUP:
            return shape
        rows, columns = shape
        assert columns % self.group_size == 0 and self.group_size % 2 == 0
        return rows, columns // 2

    def scales_shape(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Shape of the f32 scales of a parameter of `shape`; None where there are none."""
        match self.encoding:
            case Encoding.FP8_BLOCK:
                return -(-shape[0] // self.tile[0]), -(-shape[1] // self.tile[1])
            case Encoding.INT8_CHANNEL:
                return (shape[0],)
            case Encoding.INT4_GROUP:
                return shape[0], shape[1] // self.group_size
            case _:
                return None


def component_bytes(form: Format, shape: tuple[int, ...]) -> tuple[int, int]:
    """Bytes of (numbers, scales) of a parameter of `shape`, without padding."""
    scales = form.scales_shape(shape)
    data_bytes = math.prod(form.data_shape(shape)) * form.dtype.itemsize
    return data_bytes, 0 if scales is None else 4 * math.prod(scales)


def view_weight(
    form: Format, shape: tuple[int, ...], data: Tensor, scales: Tensor | None = None
) -> WeightTensor:
    """A parameter of `shape` in two buffers: uint8 [data bytes], uint8 [scale bytes].

    Nothing is copied, so both must start at a multiple of their element size; 64 is best.
    """
    scales_shape = form.scales_shape(shape)
    if scales_shape is not None:
        assert scales is not None
        scales = scales.view(torch.float32).view(scales_shape)
    return WeightTensor(
        form.encoding,
        shape,
        data.view(form.dtype).view(form.data_shape(shape)),
        None if scales_shape is None else scales,
        form.group_size,
        form.tile,
        form.activations,
    )


def empty_weight(form: Format, shape: tuple[int, ...]) -> WeightTensor:
    """A parameter of `shape` in fresh memory, not initialised."""
    data, scales = (torch.empty(n, dtype=torch.uint8) for n in component_bytes(form, shape))
    return view_weight(form, shape, data, scales)
