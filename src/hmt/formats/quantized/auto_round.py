"""Checkpoints of AutoRound, which packs as GPTQ, AWQ or compressed-tensors do (intel/auto-round).

`packing_format` says which.  Where it is missing, transformers takes it for GPTQ's.  `extra_config`
has what differs for a module, under its name or a regular expression.
"""

import re
from collections.abc import Mapping
from typing import Any

from hmt.formats.quantized.awq import add_awq
from hmt.formats.quantized.compressed_tensors import add_four_bit_floats
from hmt.formats.quantized.fp8 import MXFP8_TILE, find_fp8
from hmt.formats.quantized.gptq import add_gptq
from hmt.formats.quantized.scan import Quantized, table

_WORD_BYTES = 4
_UNSAID = "auto"
_LESS_ONE = ("auto_round:auto_gptq", "auto_round:gptq", _UNSAID)
_AS_IT_IS = ("auto_round", "auto_round:gptqmodel", "auto_round:exllamav2", "auto_round:tritonv2")
_AWQ = ("auto_round:auto_awq", "auto_round:awq")
_FLOATS = ("auto_round:llm_compressor",)
_ROTATIONS = ("rotation_config", "spinquant_config")
_FP8 = ("auto_round:fp8_static", "auto_round:fp8")


def find_auto_round(found: Quantized) -> None:
    """Every MODULE.qweight; of floats every weight that has a weight_scale."""
    packing = found.choose(
        "packing_format", _UNSAID, *_LESS_ONE, *_AS_IT_IS, *_AWQ, *_FLOATS, *_FP8
    )
    for field in _ROTATIONS:
        if found.config.get(field):
            raise found.refuse(field, "weights whose inputs are not rotated")
    if packing in _FP8:
        for module, suffix in found.modules("weight_zp"):
            raise found.refuse(f"{module}.{suffix}", "FP8 without zero points")
        find_fp8(found)
        return
    if packing in _FLOATS:
        _find_floats(found)
        return
    for module, _ in list(found.modules("qweight")):
        fields = _fields_of(module, found)
        if packing not in _AWQ:
            less_one = packing in _LESS_ONE
            if packing == _UNSAID and fields.get("sym", True) is True:
                less_one = not _stores_the_middle(found, module, fields.get("bits"))
            add_gptq(found, module, fields, less_one=less_one)
            continue
        if fields.get("bits", 4) != 4:
            raise found.refuse(f"bits {fields['bits']!r} for {module}", "AWQ's packing of 4 bits")
        add_awq(found, module, fields.get("group_size", 128))


def _fields_of(module: str, found: Quantized) -> Mapping[str, Any]:
    """The config as it is for `module`: by its name, else by the first pattern that it has."""
    extra = table(found.config, "extra_config")
    changes = extra.get(module)
    for pattern, other in extra.items():
        if changes:
            break
        try:
            changes = other if re.search(pattern, module) else None
        except re.error:  # AutoRound passes over it, too
            continue
    if not isinstance(changes, dict):
        return found.config
    return {**found.config, **{key: value for key, value in changes.items() if value is not None}}


def _stores_the_middle(found: Quantized, module: str, bits: Any) -> bool:
    """Whether symmetric weights have 2^(bits - 1) as their first zero point, and not one less."""
    record = found.check(found.tensor(module, "qzeros"), ("I32",))
    if type(bits) is not int or not 2 <= bits <= 8 or record.nbytes < _WORD_BYTES:
        return False
    word = int.from_bytes(found.content(record, record.nbytes, first=_WORD_BYTES), "little")
    return word & (1 << bits) - 1 == 1 << bits - 1


def _find_floats(found: Quantized) -> None:
    """NVFP4 and MXFP4 in `weight_packed`, MXFP8 in `weight`."""
    for module, suffix in list(found.modules("weight_packed", "weight")):
        codes = found.tensor(module, suffix)
        if suffix == "weight_packed":
            found.matrix(codes, "U8")
            add_four_bit_floats(found, module, codes)
        elif codes.dtype == "F8_E4M3":
            scales = found.check(found.tensor(module, "weight_scale"), ("U8", "F8_E8M0"))
            found.add_fp8(f"{module}.weight", codes, scales, MXFP8_TILE)
    found.set_aside("input_scale", "input_global_scale")
