"""Checkpoints of torchao as transformers saves them: safetensors with metadata for each weight.

A weight's arrays are called MODULE._weight_ARRAY.  The file's metadata says of MODULE.weight which
of torchao's classes it is, and that class's attributes.
"""

import json
from collections.abc import Mapping
from typing import Any

from hmt.base.errors import CheckpointError
from hmt.contracts.checkpoint import PublishedPart, TensorRecord
from hmt.formats.quantized.fp8 import MXFP8_TILE
from hmt.formats.quantized.scan import Quantized, by_rows, table, whole
from hmt.formats.safetensors import read_metadata

_READ = (
    "Int8Tensor, IntxUnpackedToInt8Tensor, Int4Tensor, Float8Tensor, NVFP4Tensor, and MXTensor of "
    "float8_e4m3fn"
)
_SCALES = ("F32", "F16", "BF16")
_QDATA = "_weight_qdata"
# Of zero points; a weight that has others than 0 has one among these.
_LOOKED_AT = 1 << 16


def find_torchao(found: Quantized) -> None:
    """Every MODULE._weight_qdata, by what the metadata of any shard says."""
    about: dict[str, str] = {}
    for file in sorted({record.file for record in found.records.values()}):
        about |= read_metadata(file)
    for module, _ in list(found.modules(_QDATA)):
        codes = found.tensor(module, _QDATA)
        kind, fields = _class_of(found, module, about.get(f"{module}.weight"))
        for unread in ("act_pre_scale", "act_quant_scale"):
            if f"{module}._weight_{unread}" in found.records:
                name = f"{module}._weight_{unread}"
                raise found.refuse(name, "weights whose inputs are not scaled")
        match kind:
            case "Int8Tensor":
                _add_bytes(found, module, codes, fields, 8)
            case "IntxUnpackedToInt8Tensor":
                _add_bytes(found, module, codes, fields, _bits(found, module, fields))
            case "Int4Tensor":
                _add_int4(found, module, codes, fields)
            case "Float8Tensor":
                tile = _block(found, module, fields)
                found.add_fp8(f"{module}.weight", codes, _array(found, module, "scale"), tile)
            case "NVFP4Tensor":
                _add_nvfp4(found, module, codes, fields)
            case "MXTensor" if codes.dtype == "F8_E4M3":
                _add_mxfp8(found, module, codes, fields)
            case _:
                raise found.refuse(f"{module}.weight as {kind}", _READ)


def _class_of(found: Quantized, module: str, text: str | None) -> tuple[Any, Mapping[str, Any]]:
    """(name of the class, its attributes)."""
    try:
        entry = json.loads(text or "")
        return entry["_type"], table(entry, "_data")
    except (ValueError, TypeError, KeyError, RecursionError):
        raise CheckpointError(
            f"{found.folder}: the metadata of {found.tensor(module, _QDATA).file.name} does not "
            f"say what {module}.weight is, as torchao's does: save the model again with "
            "transformers' save_pretrained, or take another version of it"
        ) from None


def _array(found: Quantized, module: str, name: str) -> TensorRecord:
    return found.tensor(module, f"_weight_{name}")


def _block(found: Quantized, module: str, fields: Mapping[str, Any]) -> tuple[int, int]:
    """(rows, columns) that share a scale."""
    block = fields.get("block_size")
    if (
        isinstance(block, list)
        and len(block) == 2
        and all(type(size) is int and size > 0 for size in block)
    ):
        return block[0], block[1]
    raise found.refuse(f"block_size {block!r} for {module}.weight", "blocks [rows, inputs]")


def _bits(found: Quantized, module: str, fields: Mapping[str, Any]) -> int:
    dtype = table(fields, "target_dtype").get("_data")
    if dtype not in [f"int{bits}" for bits in range(1, 9)]:
        raise found.refuse(f"target_dtype {dtype!r} for {module}.weight", "int1 to int8")
    return int(dtype[3:])


def _add_bytes(
    found: Quantized, module: str, codes: TensorRecord, fields: Mapping[str, Any], bits: int
) -> None:
    """A byte for each code, whatever its bits; (code - zero point) * scale."""
    rows, columns = found.matrix(codes, "I8")
    high, wide = _block(found, module, fields)
    scales = found.check(_array(found, module, "scale"), _SCALES)
    if high == rows > 1 and wide == columns:
        high, groups = 0, 0  # one scale for all
        found.check(scales, (scales.dtype,), scales.shape if scales.nbytes <= 4 else (1, 1))
    else:
        groups = columns // wide
        if high != 1 or columns % wide:
            asked = f"block_size {[high, wide]} for {module}.weight {[rows, columns]}"
            raise found.refuse(asked, "groups of inputs that divide a row, or one scale for all")
        found.check(scales, (scales.dtype,), (rows, groups))
    parts = {
        "weight": by_rows(codes, rows),
        "weight_scale": by_rows(scales, rows) if groups else whole(scales),
    }
    symmetric = True
    if f"{module}._weight_zero_point" in found.records:
        zeros = found.check(_array(found, module, "zero_point"), ("I8",), scales.shape)
        symmetric = not any(found.content(zeros, zeros.nbytes, first=_LOOKED_AT))
        parts["weight_zero_point"] = by_rows(zeros, rows) if groups else whole(zeros)
    found.add_int8(
        f"{module}.weight",
        codes,
        parts,
        bits=bits,
        groups=groups,
        scale_dtype=scales.dtype,
        symmetric=symmetric,
    )


def _add_int4(
    found: Quantized, module: str, codes: TensorRecord, fields: Mapping[str, Any]
) -> None:
    """Two codes in a byte; code * scale + zero point."""
    rows, pairs = found.matrix(codes, "U8", "I8")
    columns = 2 * pairs
    high, wide = _block(found, module, fields)
    if high != 1 or columns % wide:
        asked = f"block_size {[high, wide]} for {module}.weight {[rows, columns]}"
        raise found.refuse(asked, "groups of inputs that divide a row")
    shape = (columns // wide, rows)
    scales = found.check(_array(found, module, "scale"), _SCALES, shape)
    zeros = found.check(_array(found, module, "zero_point"), (scales.dtype,), shape)
    parts = {
        "qdata": by_rows(codes, rows),
        "scale": whole(scales),
        "zero_point": whole(zeros),
    }
    options = {"groups": shape[0], "dtype": scales.dtype}
    found.add(f"{module}.weight", "torchao int4", (rows, columns), parts, **options)


def _add_nvfp4(
    found: Quantized, module: str, codes: TensorRecord, fields: Mapping[str, Any]
) -> None:
    rows, pairs = found.matrix(codes, "U8")
    factor = _array(found, module, "per_tensor_scale")
    found.check(factor, ("F32",), factor.shape if factor.nbytes == 4 else ())
    parts = {"codes": by_rows(codes, rows), "factor": whole(factor)}
    groups = 2 * pairs // 16
    scales = found.check(_array(found, module, "scale"), ("F8_E4M3",))
    if fields.get("is_swizzled_scales") is not False:
        _add_swizzled(found, module, (rows, 2 * pairs), parts, scales, 16)
        return
    parts["scales"] = by_rows(found.check(scales, ("F8_E4M3",), (rows, groups)), rows)
    found.add(f"{module}.weight", "nvfp4", (rows, 2 * pairs), parts, divides=False)


def _add_mxfp8(
    found: Quantized, module: str, codes: TensorRecord, fields: Mapping[str, Any]
) -> None:
    rows, columns = found.matrix(codes, "F8_E4M3")
    scales = found.check(_array(found, module, "scale"), ("F8_E8M0", "U8"))
    if fields.get("block_size") != MXFP8_TILE[1]:
        asked = f"block_size {fields.get('block_size')!r} for {module}.weight"
        raise found.refuse(asked, "MXFP8 in blocks of 32")
    if fields.get("is_swizzled_scales") is not False:
        parts = {"weight": by_rows(codes, rows)}
        _add_swizzled(found, module, (rows, columns), parts, scales, MXFP8_TILE[1])
        return
    found.add_fp8(f"{module}.weight", codes, scales, MXFP8_TILE)


def _add_swizzled(
    found: Quantized,
    module: str,
    shape: tuple[int, int],
    parts: dict[str, PublishedPart],
    scales: TensorRecord,
    group_size: int,
) -> None:
    """Scales of groups of 16 (NVFP4) or 32 (MXFP8) that lie in blocks of 128 rows and 4 groups."""
    groups, left = divmod(shape[1], group_size)
    high, wide = -(-shape[0] // 128), -(-groups // 4)
    if scales.nbytes != 512 * high * wide or left:
        found.check(scales, (scales.dtype,), (32 * high, 16 * wide))
        asked = f"{module}.weight {list(shape)}"
        raise found.refuse(asked, f"rows of whole groups of {group_size}")
    parts["scales"] = whole(scales)
    nvfp4 = group_size != MXFP8_TILE[1]
    found.add(f"{module}.weight", "torchao blocks", shape, parts, groups=groups, nvfp4=nvfp4)
