"""What a quantised checkpoint is looked through with, and what is found in it."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from hmt.base.errors import CheckpointError, MissingFileError, ShapeError, os_reason
from hmt.contracts.checkpoint import (
    FileRange,
    Form,
    FormName,
    Published,
    PublishedPart,
    TensorRecord,
)
from hmt.contracts.encoding import Encoding


@dataclass(frozen=True)
class Quantized:
    """A checkpoint's quantisation config and its tensors.

    folder   for messages
    config   the section: `quantization_config` of config.json, or that of hf_quant_config.json
    method   its `quant_method`, for messages
    forms    found so far: parameters by the names of their modules' weights
    spare    tensors that are known and not needed, such as scales of activations
    """

    folder: Path
    config: Mapping[str, Any]
    method: str
    records: Mapping[str, TensorRecord]
    forms: dict[str, Form] = field(default_factory=dict)
    spare: set[str] = field(default_factory=set)

    def modules(self, *suffixes: str) -> Iterator[tuple[str, str]]:
        """(module, suffix) of every tensor called MODULE.SUFFIX."""
        for name in self.records:
            module, _, last = name.rpartition(".")
            if last in suffixes:
                yield module, last

    def tensor(self, module: str, suffix: str) -> TensorRecord:
        """MODULE.SUFFIX; MissingFileError where there is none."""
        record = self.records.get(f"{module}.{suffix}")
        if record is None:
            raise MissingFileError(
                f"{self.folder}: {module} is quantised as {self.method}, but its {suffix} is not "
                "in the checkpoint: a shard may be missing; download it again"
            )
        return record

    def check(
        self, record: TensorRecord, dtypes: tuple[str, ...], shape: tuple[int, ...] | None = None
    ) -> TensorRecord:
        """`record`; ShapeError unless its dtype is one of `dtypes`, and its shape as given."""
        if record.dtype not in dtypes or shape not in (None, record.shape):
            wanted = f" {list(shape)}" if shape is not None else ""
            raise ShapeError(
                f"{self.folder}: {record.name} is {record.dtype} {list(record.shape)}; as part of "
                f"a weight quantised as {self.method} it must be {' or '.join(dtypes)}{wanted}"
            )
        return record

    def matrix(self, record: TensorRecord, *dtypes: str) -> tuple[int, int]:
        """Its shape; ShapeError unless that is [rows, columns], and its dtype one of `dtypes`."""
        if record.dtype not in dtypes or len(record.shape) != 2 or 0 in record.shape:
            raise ShapeError(
                f"{self.folder}: {record.name} is {record.dtype} {list(record.shape)}; as part of "
                f"a weight quantised as {self.method} it must be {' or '.join(dtypes)} and a matrix"
            )
        return record.shape[0], record.shape[1]

    def content(self, record: TensorRecord, most: int, *, first: int | None = None) -> bytes:
        """The bytes of a tensor that says how others are to be read, of at most `most` bytes.

        first   so many of them are wanted
        """
        if record.nbytes > most:
            raise CheckpointError(
                f"{self.folder}: {record.name} has {record.nbytes} bytes, at most {most} are read: "
                "download it again"
            )
        wanted = record.nbytes if first is None else min(first, record.nbytes)
        try:
            with record.file.open("rb") as file:
                file.seek(record.offset)
                content = file.read(wanted)
        except OSError as error:
            raise CheckpointError(f"{record.file} cannot be read ({os_reason(error)})") from error
        if len(content) < wanted:
            raise CheckpointError(
                f"{record.file} ends within {record.name}, after {len(content)} of its first "
                f"{wanted} bytes: download it again"
            )
        return content

    def refuse(self, what: str, wanted: str) -> CheckpointError:
        """That HMT does not read `what`, but `wanted`."""
        return CheckpointError(
            f"{self.folder} is quantised as {self.method} with {what}, which HMT does not read; it "
            f"reads {wanted}: take another version of this model"
        )

    def choose(self, name: str, default: Any, *allowed: Any) -> Any:
        """Field `name` of the config; CheckpointError unless it is one of `allowed`."""
        value = self.config.get(name, default)
        value = value.lower() if isinstance(value, str) else value
        if value not in allowed or isinstance(value, bool) != isinstance(default, bool):
            raise self.refuse(f"{name} {value!r}", " or ".join(map(repr, allowed)))
        return value

    def set_aside(self, *suffixes: str) -> None:
        """Note that no tensor called MODULE.SUFFIX is needed."""
        self.spare.update(f"{module}.{suffix}" for module, suffix in self.modules(*suffixes))

    def add(
        self,
        name: str,
        scheme: str,
        shape: tuple[int, ...],
        parts: Mapping[str, PublishedPart],
        **options: Any,
    ) -> None:
        """A parameter called `name`, in the form of `scheme`."""
        form = FormName(scheme, tuple(sorted(options.items())))
        self.forms[name] = Published(form, shape, parts)

    def add_int8(
        self,
        name: str,
        codes: TensorRecord,
        parts: Mapping[str, PublishedPart],
        *,
        bits: int,
        groups: int,
        scale_dtype: str,
        symmetric: bool = True,
    ) -> None:
        """Signed codes [rows, in], one in a byte; `groups` of a row, 0 for one scale in all."""
        self.add(
            name,
            "compressed integers",
            codes.shape,
            parts,
            bits=bits,
            packed=False,
            scale_groups=groups,
            scale_dtype=scale_dtype,
            symmetric=symmetric,
            all_rows=codes.shape[0],
        )

    def add_fp8(
        self, name: str, codes: TensorRecord, scales: TensorRecord, tile: tuple[int, int]
    ) -> None:
        """FP8 with scales that multiply; tile: (rows, columns) of each, 0 for all.

        Scales in U8 are powers of two, which is what MXFP8 has.
        """
        rows, columns = self.matrix(codes, "F8_E4M3")
        shape = (-(-rows // (tile[0] or rows)), -(-columns // (tile[1] or columns)))
        self.check(scales, ("F32", "F16", "BF16", "F8_E8M0", "U8"))
        if prod(scales.shape) != prod(shape) or scales.shape[:1] not in ((), (1,), shape[:1]):
            self.check(scales, (scales.dtype,), shape)
        its_scales = by_rows(scales, shape[0], tile[0]) if tile[0] else whole(scales)
        if scales.dtype == "F32":
            parts = {"data": by_rows(codes, rows), "scales": its_scales}
            self.add(name, "in place", codes.shape, parts, encoding=Encoding.FP8_BLOCK, tile=tile)
            return
        parts = {"weight": by_rows(codes, rows), "scales": its_scales}
        dtype = "F8_E8M0" if scales.dtype == "U8" else scales.dtype
        self.add(name, "fp8", codes.shape, parts, tile=tile, scale_dtype=dtype)


def by_rows(record: TensorRecord, count: int, step: int = 1) -> PublishedPart:
    """A part that has `count` rows, each for `step` rows of the parameter."""
    return PublishedPart(record.name, whole(record).file, record.nbytes // max(1, count), step)


def whole(record: TensorRecord) -> PublishedPart:
    """A part that belongs to all rows at once."""
    return PublishedPart(record.name, FileRange(record.file, record.offset, record.nbytes), 0)


def table(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Field `name` where it is an object; else an empty one."""
    value = fields.get(name)
    return value if isinstance(value, dict) else {}


def matches(pattern: Any, module: str) -> bool:
    """Whether an entry of a list of modules means `module`: "re:REGEX", or a name."""
    if isinstance(pattern, str) and pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error:
            return False
    return pattern == module
