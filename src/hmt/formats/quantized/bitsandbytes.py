"""Checkpoints of bitsandbytes: int8 with a scale per row, and 4 bits by a table."""

import json
from typing import Any

from hmt.base.errors import CheckpointError
from hmt.contracts.checkpoint import TensorRecord
from hmt.formats.quantized.scan import Quantized, by_rows, whole

_STATES = ("bitsandbytes__nf4", "bitsandbytes__fp4")
_STATE_BYTES = 1 << 16  # of a JSON object with a dozen fields
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def find_bitsandbytes(found: Quantized) -> None:
    """Every weight with SCB (int8), or with a quant_state (4 bits)."""
    for module, suffix in list(found.modules("SCB", *_STATES)):
        if suffix == "SCB":
            _add_int8(found, module)
        else:
            _add_table(found, module.removesuffix(".weight.quant_state"), suffix)


def _add_int8(found: Quantized, module: str) -> None:
    codes = found.tensor(module, "weight")
    rows, _ = found.matrix(codes, "I8")
    scales = found.check(found.tensor(module, "SCB"), ("F32",), (rows,))
    found.spare.add(f"{module}.weight_format")
    parts = {"weight": by_rows(codes, rows), "SCB": by_rows(scales, rows)}
    found.add(f"{module}.weight", "bitsandbytes int8", codes.shape, parts)


def _add_table(found: Quantized, module: str, kind: str) -> None:
    name = f"weight.quant_state.{kind}"
    state = _state(found.check(found.tensor(module, name), ("U8",)), found)
    rows, columns = state["shape"]
    blocks = -(-rows * columns // state["blocksize"])
    codes = found.tensor(module, "weight")
    nested = "nested_blocksize" in state
    scales = found.tensor(module, "weight.absmax")
    found.check(scales, ("U8",) if nested else ("F32",), (blocks,))
    if codes.nbytes != rows * columns // 2 or columns % 2:
        found.check(codes, ("U8",), (rows * columns // 2, 1))
    parts = {
        "weight": by_rows(codes, rows),
        "quant_map": whole(found.check(found.tensor(module, "weight.quant_map"), ("F32",), (16,))),
        "absmax": whole(scales),
    }
    options: dict[str, Any] = {"block": state["blocksize"], "dtype": _DTYPES[state["dtype"]]}
    if nested:
        size = state["nested_blocksize"]
        table = found.tensor(module, "weight.nested_quant_map")
        outer = found.tensor(module, "weight.nested_absmax")
        parts["nested_quant_map"] = whole(found.check(table, ("F32",), (256,)))
        parts["nested_absmax"] = whole(found.check(outer, ("F32",), (-(-blocks // size),)))
        options |= {"nested_block": size, "nested_offset": float(state.get("nested_offset", 0))}
    found.spare.add(f"{module}.{name}")
    found.add(f"{module}.weight", "bitsandbytes table", (rows, columns), parts, **options)


def _state(record: TensorRecord, found: Quantized) -> dict[str, Any]:
    """The JSON object that a quant_state is; it has shape, dtype and sizes of blocks."""
    try:
        state = json.loads(found.content(record, _STATE_BYTES))
        sizes = [*state["shape"], state["blocksize"], state.get("nested_blocksize", 1)]
        sound = len(sizes) == 4 and all(type(n) is int and n > 0 for n in sizes)
        if not sound or state["dtype"] not in _DTYPES:
            raise ValueError("sizes or dtype")
        float(state.get("nested_offset", 0))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(
            f"{found.folder}: {record.name} is not a quant_state of a weight [out, in] ({error}): "
            "download it again"
        ) from None
    checked: dict[str, Any] = state
    return checked
