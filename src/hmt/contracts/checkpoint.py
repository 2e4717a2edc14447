"""A checkpoint's tensors as byte ranges of files.  Nothing is loaded to know these."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """Where one tensor's bytes lie.

    Validated: the range is inside the file and fits shape and dtype.

    dtype   safetensors' name: "F32", "F16", "BF16", "F8_E4M3", ...
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint.

    config      the parsed config.json
    records     every tensor of every shard, by name
    fp8_tile    (rows, columns) of one scale where `NAME_scale_inv` tensors accompany FP8 weights
    """

    path: Path
    config: Mapping[str, Any]
    records: Mapping[str, TensorRecord]
    fp8_tile: tuple[int, int] | None = None
