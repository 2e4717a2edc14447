"""Where the experts of a layer lie, told to kernels by a table of addresses on the device."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hmt.contracts.encoding import Activations, Encoding, Packing, WeightTensor
from hmt.kernels.reference.experts import Expert, matrix_name

# Of each matrix, in the order of a table's rows; `expert_pairs` and `expert_tiles` count them.
PARTS = ("data", "scales", "extra", "factor", "bias")
_READ_WIDE = PARTS.index("factor")  # those before; the others number by number
MATRICES = ("gate_proj", "up_proj", "down_proj")
_ALIGNMENT = 16  # bytes; kernels load as many at a time where they can
_NUMBER = 4  # bytes, of scales and the widest weights


@dataclass(frozen=True, slots=True)
class ExpertMatrix:
    """One of the three matrices, the same for all experts of a layer but for its numbers.

    encoding, shape, group_size, tile, activations   as in WeightTensor
    scale_dtype    of the scales; of float encodings, None
    extra          what `extra` holds: "zeros", "minima" or ""
    bias_dtype     of the matrix' bias, or None
    offsets        bytes from an expert's address to PARTS; 0 for those that there are not
    aligned        bytes: data and scales begin at multiples of it, 16 or a smaller power of two
    """

    encoding: Encoding
    shape: tuple[int, int]
    group_size: int = 0
    tile: tuple[int, int] = (0, 0)
    activations: Activations = Activations.FLOAT
    scale_dtype: torch.dtype | None = None
    extra: str = ""
    bias_dtype: torch.dtype | None = None
    offsets: tuple[int, ...] = (0,) * len(PARTS)
    aligned: int = _ALIGNMENT

    @property
    def in_panels(self) -> bool:
        """True for 4-bit codes."""
        return self.encoding.packing is Packing.PANELS

    @property
    def in_blocks(self) -> bool:
        """True for ggml's blocks."""
        return self.encoding.packing is Packing.BLOCKS

    @property
    def has_kernel(self) -> bool:
        """False where groups are of a size that kernels do not have, or parts lie too oddly."""
        if self.aligned < (_ALIGNMENT if self.in_panels or self.in_blocks else _NUMBER):
            return False
        if self.extra and not self.in_panels:
            return False  # int8 with minima
        if not self.group_size:
            return True
        whole = self.shape[1] % self.group_size == 0 and self.group_size.bit_count() == 1
        return whole and self.group_size >= (16 if self.in_panels else 32)

    @property
    def takes_codes(self) -> bool:
        """True where it is multiplied with int8 activations."""
        return self.activations is Activations.INT8_TOKEN


@dataclass(frozen=True, slots=True)
class ExpertTable:
    """The experts of one layer on one device.

    addresses   int64 [experts] on the device: where an expert's bytes begin, a multiple of 16, or
                0 where it is not here.  Kernels read it when they run, so it may be changed in
                place between replays of a CUDA graph.  Or int64 [15, experts]: the parts of gate,
                up and down (PARTS) by themselves, to which the offsets are added as well
    gate, up    alike but for their offsets
    """

    addresses: Tensor
    gate: ExpertMatrix
    up: ExpertMatrix
    down: ExpertMatrix

    def __post_init__(self) -> None:
        """Refuses what kernels would compute wrongly."""
        alike = replace(self.gate, offsets=()) == replace(self.up, offsets=())
        assert alike, "gate and up differ by more than where they lie"
        assert all(matrix.has_kernel for matrix in (self.gate, self.down)), "no such groups"

    @property
    def experts(self) -> int:
        """How many there are, here or not."""
        return self.addresses.shape[-1]

    @property
    def part_stride(self) -> int:
        """Numbers from the addresses of one part to those of the next; 0 where all are in one."""
        return self.addresses.stride(0) if self.addresses.dim() == 2 else 0


def planes_of(matrix: ExpertMatrix, dtype: torch.dtype) -> int:
    """Bytes of each number of the activations, for the kernels of few tokens; 0 for plain rows."""
    if matrix.takes_codes:
        return 1
    if not matrix.in_panels:
        return 0
    return 3 if dtype is torch.float32 else 2


def describe(params: Mapping[str, WeightTensor], name: str, base: int = 0) -> ExpertMatrix:
    """What kernels have to know of a matrix whose expert begins at address `base`, or 0."""
    w, parts = params[matrix_name(params, name)], _parts(params, name)
    offsets = tuple(part.data_ptr() - base if base and part is not None else 0 for part in parts)
    bias = parts[-1]
    return ExpertMatrix(
        w.encoding,
        (w.shape[0], w.shape[1]),
        w.group_size,
        w.tile,
        w.activations,
        None if w.scales is None else w.scales.dtype,
        "zeros" if w.zeros is not None else "minima" if w.minima is not None else "",
        None if bias is None else bias.dtype,
        offsets,
    )


def make_table(given: Sequence[Expert], experts: int, device: torch.device) -> ExpertTable | None:
    """A table of experts 0 to `experts` - 1, of which some are given, wherever their parts lie.

    Copies addresses to the device, so it cannot be captured; keep the table.  None where kernels
    cannot compute on them: of different encodings, some with biases, or not aligned.
    """
    if not given:
        return None
    first = [describe(given[0][1], name) for name in MATRICES]
    if first[0] != first[1]:
        return None
    addresses = torch.zeros(len(MATRICES) * len(PARTS), experts, dtype=torch.int64)
    read = []
    for index, params in given:
        column = _addresses(params, first)
        if column is None or not 0 <= index < experts:
            return None
        addresses[:, index] = torch.tensor(column)
        read += [at for part, at in enumerate(column) if part % len(PARTS) < _READ_WIDE]
    # A checkpoint's tensors begin where its header ends: at any multiple of 8.
    matrices = [replace(matrix, aligned=_alignment(read)) for matrix in first]
    if not all(matrix.has_kernel for matrix in matrices):
        return None
    return ExpertTable(addresses.to(device), *matrices)


def block_table(addresses: Tensor, sample: Mapping[str, WeightTensor], base: int) -> ExpertTable:
    """A table of blocks that are laid out as the one of `sample`, which begins at address `base`.

    It holds `addresses` int64 [experts], multiples of 16, itself, not a copy.  Raises ValueError
    for matrices that no kernel takes.
    """
    matrices = [describe(sample, name, base) for name in MATRICES]
    if not all(replace(matrix, aligned=_ALIGNMENT).has_kernel for matrix in matrices):
        raise ValueError("no kernel has such groups")
    aligned = _alignment([at for matrix in matrices for at in matrix.offsets[:_READ_WIDE]])
    return ExpertTable(addresses, *(replace(matrix, aligned=aligned) for matrix in matrices))


def _alignment(places: Sequence[int]) -> int:
    """The largest power of two, up to 16, that divides all of them."""
    return math.gcd(_ALIGNMENT, *places)


def _parts(params: Mapping[str, WeightTensor], name: str) -> tuple[Tensor | None, ...]:
    name = matrix_name(params, name)
    w, bias = params[name], params.get(f"{name}_bias")
    extra = w.zeros if w.zeros is not None else w.minima
    return w.data, w.scales, extra, w.factor, None if bias is None else bias.data


def _addresses(
    params: Mapping[str, WeightTensor], wanted: Sequence[ExpertMatrix]
) -> list[int] | None:
    """Of all parts of an expert, or None where it is not as `wanted` or kernels cannot read it."""
    column = []
    for name, matrix in zip(MATRICES, wanted, strict=True):
        if describe(params, name) != matrix:
            return None
        for part in _parts(params, name):
            if part is not None and not part.is_contiguous():
                return None
            column.append(0 if part is None else part.data_ptr())
    return column
