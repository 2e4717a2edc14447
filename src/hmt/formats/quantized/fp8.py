"""Checkpoints in FP8.

quant_method "fp8" has scales per weight or in blocks, "fbgemm_fp8" per row, "mxfp8" per 32 inputs.
Beside FP8 in blocks, DeepSeek-V4 has experts in four bits, with powers of two per 32 inputs.
"""

from typing import Any, Final

from hmt.contracts.checkpoint import TensorRecord
from hmt.formats.quantized.scan import Quantized, by_rows

MXFP8_TILE: Final = (1, 32)  # OCP MX 1.0

# All multiply, whatever the first is called; DeepSeek-V4 has the last.
_SCALES = ("weight_scale_inv", "weight_scale", "scale")
_MXFP4_GROUP = 32
_SPARE = ("input_scale", "input_scale_ub", "activation_scale", "k_scale", "v_scale", "kv_scale")


def find_fp8(found: Quantized) -> None:
    """Every FP8 weight with its scales.

    One without scales is left to who looks for it, and says so.
    """
    mx = list(MXFP8_TILE) if found.method == "mxfp8" else None
    tile = found.config.get("weight_block_size", mx)
    if tile is not None and not is_tile(tile):
        raise found.refuse(f"weight_block_size {tile!r}", "blocks such as [128, 128]")
    for module, _ in list(found.modules("weight")):
        codes = found.records[f"{module}.weight"]
        name = next((name for name in _SCALES if f"{module}.{name}" in found.records), None)
        if codes.dtype == "I8" and name == _SCALES[2]:
            _add_mxfp4(found, codes, found.tensor(module, name))
            continue
        if codes.dtype != "F8_E4M3" or name is None or len(codes.shape) != 2:
            continue
        scales = found.tensor(module, name)
        if tile is not None and name == _SCALES[0] and scales.dtype == "F32":
            continue  # DeepSeek's blocks, which need no form of their own
        if tile is None:
            per_row = len(scales.shape) > 0 and scales.shape[0] == codes.shape[0] > 1
            found.add_fp8(f"{module}.weight", codes, scales, (1, 0) if per_row else (0, 0))
        else:
            found.add_fp8(f"{module}.weight", codes, scales, (tile[0], tile[1]))
    found.set_aside(*_SPARE)


def _add_mxfp4(found: Quantized, codes: TensorRecord, scales: TensorRecord) -> None:
    """Pairs of codes [rows, in / 2], the lower four bits first, and exponents [rows, in / 32]."""
    rows, pairs = found.matrix(codes, "I8")
    groups = -(-2 * pairs // _MXFP4_GROUP)
    found.check(scales, ("F8_E8M0", "U8"), (rows, groups))
    if 2 * pairs % _MXFP4_GROUP:
        raise found.refuse(f"{codes.name} of {2 * pairs} inputs in four bits", "multiples of 32")
    parts = {"codes": by_rows(codes, rows), "scales": by_rows(scales, rows)}
    found.add(codes.name, "mxfp4", (rows, 2 * pairs), parts)


def is_tile(tile: Any) -> bool:
    """Whether this is [rows, columns]."""
    return (
        isinstance(tile, list)
        and len(tile) == 2
        and all(type(size) is int and 1 <= size <= 1 << 20 for size in tile)
    )
