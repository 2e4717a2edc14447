"""What kernels have to know of a matrix at compile time."""

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from hmt.contracts.encoding import Encoding
from hmt.kernels.triton.moe.weight_table import ExpertMatrix

_KINDS: dict[torch.dtype, Any] = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.uint8: tl.uint8,
}
_NAMES = {
    Encoding.INT4_GROUP: "int4",
    Encoding.NVFP4: "nvfp4",
    Encoding.MXFP4: "mxfp4",
    Encoding.INT8_CHANNEL: "int8",
    Encoding.INT8_GROUP: "int8-group",
    Encoding.FP8_BLOCK: "fp8",
    Encoding.F32: "float",
    Encoding.F16: "float",
    Encoding.BF16: "float",
}
_DATA = {
    "int8": tl.int8,
    "int8-group": tl.int8,
    "fp8": tl.float8e4nv,
    Encoding.F32: tl.float32,
    Encoding.F16: tl.float16,
    Encoding.BF16: tl.bfloat16,
}


@dataclass(frozen=True, slots=True)
class MatrixForm:
    """Constants of a matrix that kernels are compiled for."""

    constants: dict[str, Any]

    @property
    def in_panels(self) -> bool:
        """True for 4-bit codes."""
        return bool(self.constants["PANELS"])

    @staticmethod
    def kind_of(dtype: torch.dtype) -> Any:
        """Triton's name of a dtype."""
        return _KINDS[dtype]


def matrix_form(matrix: ExpertMatrix) -> MatrixForm:
    """Of one matrix."""
    kind = _NAMES[matrix.encoding]
    return MatrixForm(
        {
            "PANELS": matrix.in_panels,
            "KIND": kind,
            "DATA": tl.int32 if matrix.in_panels else _DATA.get(kind, _DATA.get(matrix.encoding)),
            "SCALE": None if matrix.scale_dtype is None else _KINDS[matrix.scale_dtype],
            "EXTRA": matrix.extra,
            "GROUP": matrix.group_size or 1,
            "TILE_ROWS": matrix.tile[0] or 1,
            "TILE_COLUMNS": matrix.tile[1] or 1,
            "ALIGNED": matrix.aligned,
            "BIAS": None if matrix.bias_dtype is None else _KINDS[matrix.bias_dtype],
        }
    )
