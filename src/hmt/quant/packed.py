"""How an encoded parameter lies in memory: its components, their sizes, and views of them."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hmt.base.units import round_up
from hmt.contracts.encoding import (
    ACTIVATION_GROUP,
    BLOCK_SHAPES,
    PANEL_BLOCK,
    PANEL_ROWS,
    Activations,
    Encoding,
    Packing,
    WeightTensor,
)

_DTYPES = {
    Encoding.F32: torch.float32,
    Encoding.F16: torch.float16,
    Encoding.BF16: torch.bfloat16,
    Encoding.FP8_BLOCK: torch.float8_e4m3fn,
    Encoding.INT8_CHANNEL: torch.int8,
    Encoding.INT8_GROUP: torch.int8,
    Encoding.INT4_GROUP: torch.uint8,
    Encoding.NVFP4: torch.uint8,
}
_SCALE_DTYPES = {
    # Eight bits of mantissa are enough: codes are chosen for the scale as it was rounded.  Four
    # bytes would make a weight with groups of 32 a tenth larger, and so a tenth slower.
    Encoding.INT4_GROUP: torch.bfloat16,
    Encoding.NVFP4: torch.float8_e4m3fn,
    Encoding.MXFP4: torch.uint8,
}


@dataclass(frozen=True, slots=True)
class Component:
    """One array of an encoded parameter, by its name in WeightTensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes, without padding."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Format:
    """Everything about an encoded parameter except its shape and its numbers.

    group_size    inputs that share a scale (groups; 16 for NVFP4 and 32 for MXFP4)
    tile          (rows, columns) that share a scale (FP8_BLOCK)
    activations   what it is multiplied with; does not change the bytes
    scale_dtype   of INT4_GROUP: bfloat16 (None), float16 or float32
    zeros         INT4_GROUP with a zero point per group
    minima        INT4_GROUP or INT8_GROUP with a minimum per group
    """

    encoding: Encoding
    group_size: int = 0
    tile: tuple[int, int] = (0, 0)
    activations: Activations = Activations.FLOAT
    scale_dtype: torch.dtype | None = None
    zeros: bool = False
    minima: bool = False

    @property
    def kernel(self) -> str:
        """The kernels that compute with it, as rates are known by: "bf16", "fp8", "w4a8", ..."""
        bits = "8" if self.activations.are_integers else "16"
        if self.encoding in BLOCK_SHAPES:
            return f"{self.encoding}a{bits}"
        match self.encoding:
            case Encoding.FP8_BLOCK:
                return "fp8"
            case Encoding.INT8_CHANNEL | Encoding.INT8_GROUP:
                return f"w8a{bits}"
            case Encoding.INT4_GROUP:
                return f"w4a{bits}"
            case Encoding.NVFP4 | Encoding.MXFP4:
                return f"{self.encoding}a{bits}"
            case _:
                return str(self.encoding)

    def with_activations(self, activations: Activations) -> "Format":
        """The same bytes multiplied with `activations`: as integers in the form it has them in.

        Floats and FP8 are multiplied with floats whatever is asked for.
        """
        if not activations.are_integers or self.encoding.is_float:
            return replace(self, activations=Activations.FLOAT)
        if self.encoding is Encoding.FP8_BLOCK:
            return replace(self, activations=Activations.FLOAT)
        own = Activations.INT8_TOKEN
        if self.encoding.packing is Packing.BLOCKS:
            grouped = BLOCK_SHAPES[self.encoding].numbers == ACTIVATION_GROUP
            own = Activations.INT8_GROUP if grouped else Activations.INT8_BLOCK
        elif self.encoding.packing is Packing.PANELS and self.group_size == ACTIVATION_GROUP:
            own = Activations.INT8_GROUP
        return replace(self, activations=own)

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers or codes."""
        return _DTYPES.get(self.encoding, torch.uint8)

    def components(self, shape: tuple[int, ...]) -> tuple[Component, ...]:
        """The arrays of a parameter of `shape`: data first, then scales if there are any."""
        match self.encoding.packing:
            case Packing.PANELS:
                return self._panels(shape)
            case Packing.BLOCKS:
                return self._blocks(shape)
        data = Component("data", self.dtype, shape)
        scales: tuple[int, ...]
        match self.encoding:
            case Encoding.FP8_BLOCK:
                scales = (-(-shape[0] // self.tile[0]), -(-shape[1] // self.tile[1]))
            case Encoding.INT8_CHANNEL:
                scales = shape[:1]
            case Encoding.INT8_GROUP:
                assert shape[1] % self.group_size == 0
                scales = (shape[0], shape[1] // self.group_size)
            case _:
                return (data,)
        parts = [data, Component("scales", torch.float32, scales)]
        if self.minima:
            parts.append(Component("minima", torch.float32, scales))
        return tuple(parts)

    def _panels(self, shape: tuple[int, ...]) -> tuple[Component, ...]:
        rows, columns = shape
        assert columns % PANEL_BLOCK == 0 and columns % self.group_size == 0
        panels = -(-rows // PANEL_ROWS)
        groups = (panels, columns // self.group_size, PANEL_ROWS)
        scale_dtype = self.scale_dtype or _SCALE_DTYPES[self.encoding]
        parts = [
            Component("data", torch.uint8, (panels, columns // PANEL_BLOCK, 4, PANEL_ROWS, 4)),
            Component("scales", scale_dtype, groups),
        ]
        if self.zeros:
            parts.append(Component("zeros", torch.uint8, groups))
        if self.minima:
            parts.append(Component("minima", scale_dtype, groups))
        if self.encoding is Encoding.NVFP4:
            parts.append(Component("factor", torch.float32, (1,)))
        return tuple(parts)

    def _blocks(self, shape: tuple[int, ...]) -> tuple[Component, ...]:
        rows, columns = shape
        block = BLOCK_SHAPES[self.encoding]
        assert columns % block.numbers == 0
        panels, blocks = -(-rows // PANEL_ROWS), columns // block.numbers
        data = Component("data", torch.uint8, (panels, blocks, block.words, PANEL_ROWS, 4))
        if block.scale_at is None:
            return (data,)
        return data, Component("scales", torch.float16, (panels, blocks, PANEL_ROWS))


def component_bytes(form: Format, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Bytes of each component of a parameter of `shape`, without padding."""
    return tuple(part.nbytes for part in form.components(shape))


def view_weight(form: Format, shape: tuple[int, ...], *buffers: Tensor) -> WeightTensor:
    """A parameter of `shape` in buffers uint8 [bytes], one for each component.

    Nothing is copied, so each must start at a multiple of its element size; 64 is best.
    """
    views = {
        part.name: buffer.view(part.dtype).view(part.shape)
        for part, buffer in zip(form.components(shape), buffers, strict=True)
    }
    return WeightTensor(
        form.encoding,
        shape,
        group_size=form.group_size,
        tile=form.tile,
        activations=form.activations,
        **views,
    )


def empty_weight(form: Format, shape: tuple[int, ...]) -> WeightTensor:
    """A parameter of `shape` in fresh memory, not initialised."""
    buffers = (torch.empty(size, dtype=torch.uint8) for size in component_bytes(form, shape))
    return view_weight(form, shape, *buffers)


def row_slice(w: WeightTensor, first: int, end: int) -> WeightTensor:
    """Rows [first, end) of a parameter, as a view; `first` is a multiple of 16, and of tiles."""

    def rows(part: Tensor | None, height: int) -> Tensor | None:
        return None if part is None else part[first // height : -(-end // height)]

    panel_rows = w.encoding.panel_rows
    data = rows(w.data, panel_rows)
    assert data is not None
    return replace(
        w,
        shape=(end - first, *w.shape[1:]),
        data=data,
        scales=rows(w.scales, w.tile[0] or panel_rows),
        zeros=rows(w.zeros, panel_rows),
        minima=rows(w.minima, panel_rows),
    )


def pack_groups(values: Tensor) -> Tensor:
    """Numbers per group [rows, groups] in panels: [ceil(rows / 16), groups, 16]."""
    rows, groups = values.shape
    padded = values.new_zeros(round_up(rows, PANEL_ROWS), groups)
    padded[:rows] = values
    return padded.view(-1, PANEL_ROWS, groups).transpose(1, 2).contiguous()
