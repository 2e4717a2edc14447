"""Checkpoints in FP8.

quant_method "fp8" has scales per weight or in blocks, "fbgemm_fp8" per row, "mxfp8" per 32 inputs.
"""

from typing import Any, Final

from hmt.formats.quantized.scan import Quantized

MXFP8_TILE: Final = (1, 32)  # OCP MX 1.0

_SCALES = ("weight_scale_inv", "weight_scale")  # both multiply, whatever the first is called
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


def is_tile(tile: Any) -> bool:
    """Whether this is [rows, columns]."""
    return (
        isinstance(tile, list)
        and len(tile) == 2
        and all(type(size) is int and 1 <= size <= 1 << 20 for size in tile)
    )
