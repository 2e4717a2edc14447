"""A checkpoint's tensors as byte ranges of files.  Nothing is loaded to know these."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes [offset, offset + nbytes) of a file."""

    path: Path
    offset: int
    nbytes: int


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

    def rows(self, first: int, count: int) -> "TensorRecord":
        """Rows [first, first + count) of it, under its name."""
        each = self.nbytes // self.shape[0]
        shape, at = (count, *self.shape[1:]), self.offset + first * each
        return replace(self, shape=shape, offset=at, nbytes=count * each)


@dataclass(frozen=True, slots=True)
class PublishedPart:
    """One array of a parameter as published: codes, scales, zero points.

    tensor       of the records, that it is, or is a part of
    file         its bytes, for all rows of the parameter
    row_bytes    that each `row_step` rows of the parameter take in it, in order; 0 where it belongs
                 to all rows at once, and is read whole for any of them
    row_step     rows that share `row_bytes`: 1, or the height of a tile of scales
    """

    tensor: str
    file: FileRange
    row_bytes: int
    row_step: int = 1


@dataclass(frozen=True, slots=True)
class FormName:
    """How a parameter is published, as data: hmt.quant.repacking has the code for it.

    scheme    such as "gguf" or "awq"
    options   what else has to be known, as arguments of that code: (name, value)
    """

    scheme: str
    options: tuple[tuple[str, Hashable], ...] = ()


@dataclass(frozen=True, slots=True)
class Published:
    """A parameter that is published in a form of its own, and not as a tensor of numbers.

    shape   of the numbers: [out, in], or how many they are where the file says no more
    parts   its arrays, by the names that the form's code knows them by
    """

    form: FormName
    shape: tuple[int, ...]
    parts: Mapping[str, PublishedPart]


@dataclass(frozen=True, slots=True)
class Joined:
    """A parameter that is published as several tensors, one after the other.

    pieces   in the order of their rows
    shape    of the numbers; rows of all its dimensions but the last are counted together
    """

    pieces: tuple[TensorRecord | Published, ...]
    shape: tuple[int, ...]


Form = TensorRecord | Published | Joined


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint.

    path        its folder, or the file where it is one
    config      the parsed config.json
    records     every tensor of every shard, by its name there
    fp8_tile    (rows, columns) of one scale where `NAME_scale_inv` tensors accompany FP8 weights
    forms       parameters by the name that models know them by, where they are not records of that
                name: as a tensor of another name, or a part of one, or several; or in a form of
                their own
    vocabulary  what a GGUF file says of its tokenizer, by its keys; None where there are files
    spare       records that are known and that no model needs, such as scales of activations
    processor   what preprocessor_config.json would say, and video_preprocessor_config.json in its
                "video"; None where there are these files, or no images
    images_refused   why images cannot be encoded, where it is known without opening a model
    mmproj      the other file, which has the encoder of images; None where there is none
    """

    path: Path
    config: Mapping[str, Any]
    records: Mapping[str, TensorRecord]
    fp8_tile: tuple[int, int] | None = None
    forms: Mapping[str, Form] = field(default_factory=dict)
    vocabulary: Mapping[str, Any] | None = None
    spare: frozenset[str] = frozenset()
    processor: Mapping[str, Any] | None = None
    images_refused: str = ""
    mmproj: Path | None = None
