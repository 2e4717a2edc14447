"""Checkpoints of compressed-tensors: integers, FP8, MXFP8, NVFP4 and MXFP4, by modules."""

from collections.abc import Mapping
from typing import Any

from hmt.base.errors import CheckpointError, ShapeError
from hmt.contracts.checkpoint import PublishedPart, TensorRecord
from hmt.formats.quantized.fp8 import is_tile
from hmt.formats.quantized.scan import Quantized, by_rows, matches, table, whole

_SCALES = ("F32", "F16", "BF16")
_SHAPES = ("I32", "I64")
_SPARE = (
    *("input_scale", "input_zero_point", "input_global_scale"),
    *("weight_shape", "k_scale", "v_scale", "q_scale"),
)


def find_compressed(found: Quantized) -> None:
    """Every module with a `weight_packed`, or a `weight` that has a `weight_scale`."""
    sparsity = table(found.config, "sparsity_config")
    if sparsity.get("format", "dense") != "dense":
        raise found.refuse(f"sparsity format {sparsity['format']!r}", "dense weights")
    _check_transforms(found)
    for module, suffix in list(found.modules("weight_packed", "weight")):
        if suffix == "weight" and f"{module}.weight_scale" not in found.records:
            continue
        args = _weights_of(module, found)
        codes = found.tensor(module, suffix)
        found.matrix(codes, "U8", "F8_E4M3", "I8", "I32")
        if codes.dtype == "U8":
            add_four_bit_floats(found, module, codes)
        elif codes.dtype == "F8_E4M3":
            scales = found.tensor(module, "weight_scale")
            tile = _tile(args, scales, codes, found)
            found.add_fp8(f"{module}.weight", codes, scales, tile)
        else:
            _add_integers(found, module, codes, args)
    found.set_aside(*_SPARE)


def _check_transforms(found: Quantized) -> None:
    """Raise CheckpointError where inputs or outputs are transformed, and not weights alone."""
    for scheme in table(table(found.config, "transform_config"), "config_groups").values():
        applied = scheme.get("apply") if isinstance(scheme, dict) else None
        for args in applied if isinstance(applied, list) else [None]:
            location = args.get("location") if isinstance(args, dict) else None
            if location not in ("weight_input", "weight_output"):
                asked = f"transform_config at location {location!r}"
                raise found.refuse(asked, "transforms that the weights already have")


def _weights_of(module: str, found: Quantized) -> Mapping[str, Any]:
    """What `config_groups` says of the module's weights: by its name, else of linear layers."""
    groups = table(found.config, "config_groups").values()
    targeted = [(group, group.get("targets")) for group in groups if isinstance(group, dict)]
    for means in (lambda target: matches(target, module), lambda target: target == "Linear"):
        for group, targets in targeted:
            if isinstance(targets, list) and any(means(target) for target in targets):
                return table(group, "weights")
    raise CheckpointError(
        f"{found.folder}: {module} has quantised weights, and no config_groups of the quantisation "
        "config names it in `targets`: download config.json again"
    )


def add_four_bit_floats(found: Quantized, module: str, codes: TensorRecord) -> None:
    """NVFP4 or MXFP4, as the dtype of MODULE.weight_scale says; `codes` is the matrix of pairs."""
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    scales = found.check(found.tensor(module, "weight_scale"), ("F8_E4M3", "U8"))
    group = 16 if scales.dtype == "F8_E4M3" else 32
    found.check(scales, (scales.dtype,), (rows, columns // group))
    parts = {"codes": by_rows(codes, rows), "scales": by_rows(scales, rows)}
    if scales.dtype == "U8":
        found.add(f"{module}.weight", "mxfp4", (rows, columns), parts)
        return
    factor = found.check(found.tensor(module, "weight_global_scale"), ("F32",))
    found.check(factor, ("F32",), factor.shape if factor.nbytes == 4 else (1,))
    parts["factor"] = whole(factor)
    found.add(f"{module}.weight", "nvfp4", (rows, columns), parts, divides=True)


def _tile(
    args: Mapping[str, Any], scales: TensorRecord, codes: TensorRecord, found: Quantized
) -> tuple[int, int]:
    """(rows, columns) that share a scale of FP8; 0 for all."""
    strategy = args.get("strategy")
    match strategy:
        case "tensor":
            return 0, 0
        case "channel":
            return 1, 0
        case "group" if type(args.get("group_size")) is int and args["group_size"] > 0:
            return 1, args["group_size"]
        case "block" if (block := _block(args.get("block_structure"))) is not None:
            return block
    raise found.refuse(
        f"strategy {strategy!r} for {codes.name}", "tensor, channel, group and block"
    )


def _block(given: Any) -> tuple[int, int] | None:
    """[rows, columns], which older versions write as "128x128"."""
    if isinstance(given, str):
        given = [int(size) for size in given.split("x") if size.isdecimal()]
    return (given[0], given[1]) if is_tile(given) else None


def _add_integers(
    found: Quantized, module: str, codes: TensorRecord, args: Mapping[str, Any]
) -> None:
    bits, packed = args.get("num_bits"), codes.name.endswith("_packed")
    found.check(codes, ("I32",) if packed else ("I8",))
    if type(bits) is not int or not 1 <= bits <= 8 or args.get("type", "int") != "int":
        asked = f"num_bits {bits!r} and type {args.get('type')!r} for {codes.name}"
        raise found.refuse(asked, "integers of 1 to 8 bits")
    if f"{module}.weight_g_idx" in found.records:
        raise found.refuse(f"{module}.weight_g_idx", "weights whose groups are in order")
    scales = found.check(found.tensor(module, "weight_scale"), _SCALES)
    columns = _packed_columns(found, module, codes, scales, args) if packed else codes.shape[1]
    rows = codes.shape[0]
    groups = _groups(found, scales, rows, columns, args)
    symmetric = args.get("symmetric", True)
    parts = {
        codes.name.rpartition(".")[2]: by_rows(codes, rows),
        "weight_scale": by_rows(scales, rows) if groups else whole(scales),
    }
    if not symmetric:
        parts["weight_zero_point"] = _zeros(found, module, rows, groups, bits if packed else 0)
    else:
        found.spare.add(f"{module}.weight_zero_point")
    found.add(
        f"{module}.weight",
        "compressed integers",
        (rows, columns),
        parts,
        bits=bits,
        packed=packed,
        scale_groups=groups,
        scale_dtype=scales.dtype,
        symmetric=bool(symmetric),
        all_rows=rows,
    )


def _packed_columns(
    found: Quantized,
    module: str,
    codes: TensorRecord,
    scales: TensorRecord,
    args: Mapping[str, Any],
) -> int:
    """Inputs of a weight in words, the last of which may have unused bits."""
    bits, size = args["num_bits"], args.get("group_size")
    columns = codes.shape[1] * 32 // bits
    shape = found.records.get(f"{module}.weight_shape")
    if args.get("strategy") == "group" and type(size) is int and len(scales.shape) == 2:
        columns = scales.shape[1] * size
    elif shape is not None and columns % 32 and shape.dtype in _SHAPES and shape.shape == (2,):
        content = found.content(shape, 16)
        columns = int.from_bytes(content[len(content) // 2 :], "little")
    if -(-columns * bits // 32) != codes.shape[1]:
        raise ShapeError(
            f"{found.folder}: {codes.name} has {codes.shape[1]} words in a row, and {columns} "
            f"inputs of {bits} bits take another number: download it again"
        )
    return columns


def _groups(
    found: Quantized, scales: TensorRecord, rows: int, columns: int, args: Mapping[str, Any]
) -> int:
    """Scales of a row; 0 for one scale in all."""
    size = args.get("group_size")
    match args.get("strategy"):
        case "tensor":
            found.check(scales, _SCALES, scales.shape if scales.nbytes <= 4 else (1,))
            return 0
        case "channel":
            found.check(scales, _SCALES, (rows,) if len(scales.shape) == 1 else (rows, 1))
            return 1
        case "group" if type(size) is int and size > 0 and columns % size == 0:
            found.check(scales, _SCALES, (rows, columns // size))
            return columns // size
    asked = f"strategy {args.get('strategy')!r} and group_size {size!r} for {scales.name}"
    raise found.refuse(asked, "tensor, channel, and groups that divide the inputs")


def _zeros(
    found: Quantized, module: str, rows: int, groups: int, packed_bits: int
) -> PublishedPart:
    record = found.tensor(module, "weight_zero_point")
    if packed_bits and groups:
        words = -(-rows * packed_bits // 32)
        return whole(found.check(record, ("I32",), (words, groups)))
    if not groups:
        return whole(found.check(record, ("I8",), record.shape if record.nbytes == 1 else (1,)))
    shape = (rows,) if len(record.shape) == 1 and groups == 1 else (rows, groups)
    return by_rows(found.check(record, ("I8",), shape), rows)
