"""Checkpoints of NVIDIA's ModelOpt: NVFP4, FP8 and MXFP8 (hf_quant_config.json)."""

from hmt.formats.quantized.fp8 import MXFP8_TILE
from hmt.formats.quantized.scan import Quantized, by_rows, whole

_KNOWN = ("nvfp4", "fp8", "mxfp8", "mixed_precision")
_SPARE = ("input_scale", "k_scale", "v_scale", "weight_scale", "weight_scale_2")


def find_modelopt(found: Quantized) -> None:
    """Every MODULE.weight that has a `weight_scale`: others are excluded from quantisation."""
    found.choose("quant_algo", "", *_KNOWN)
    for module, suffix in list(found.modules(*_SPARE, "pre_quant_scale")):
        if suffix == "pre_quant_scale":
            name = f"{module}.{suffix}"
            raise found.refuse(name, "weights whose inputs are not scaled")
        found.spare.add(f"{module}.{suffix}")
        if suffix == "weight_scale":
            _add(found, module)


def _add(found: Quantized, module: str) -> None:
    codes = found.tensor(module, "weight")
    rows, pairs = found.matrix(codes, "U8", "F8_E4M3")
    scales = found.tensor(module, "weight_scale")
    if codes.dtype == "F8_E4M3":
        tile = MXFP8_TILE if scales.dtype == "U8" else (0, 0)
        found.add_fp8(f"{module}.weight", codes, scales, tile)
        return
    columns = 2 * pairs
    found.check(scales, ("F8_E4M3",), (rows, columns // 16))
    factor = found.tensor(module, "weight_scale_2")
    found.check(factor, ("F32",), factor.shape if factor.nbytes == 4 else ())
    parts = {
        "codes": by_rows(codes, rows),
        "scales": by_rows(scales, rows),
        "factor": whole(factor),
    }
    found.add(f"{module}.weight", "nvfp4", (rows, columns), parts, divides=False)
