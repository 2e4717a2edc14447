"""Checkpoints of optimum-quanto, as its QuantizedModelForCausalLM saves them.

config.json says nothing about them; the names of tensors do.
"""

from collections.abc import Iterable
from typing import Final

from hmt.contracts.checkpoint import TensorRecord
from hmt.formats.quantized.scan import Quantized, by_rows, whole

_BYTES: Final = ".weight._data"
_BITS: Final = ".weight._data._data"
_SCALES = ("F32", "F16", "BF16")
_SPARE = ("input_scale", "output_scale")


def is_quanto(names: Iterable[str]) -> bool:
    """Whether these tensors are those of quanto."""
    return any(name.endswith((_BYTES, _BITS)) for name in names)


def find_quanto(found: Quantized) -> None:
    """Every MODULE.weight._data, and with 2 or 4 bits MODULE.weight._data._data."""
    for name, record in list(found.records.items()):
        if name.endswith(_BITS):
            _add_bits(found, name.removesuffix(_BITS), record)
        elif name.endswith(_BYTES):
            _add_bytes(found, name.removesuffix(_BYTES), record)
    found.set_aside(*_SPARE)


def _add_bytes(found: Quantized, module: str, codes: TensorRecord) -> None:
    if codes.dtype in ("F8_E5M2", "F8_E4M3FNUZ"):
        raise found.refuse(f"{codes.name} in {codes.dtype}", "qint8 and qfloat8_e4m3fn")
    rows, _ = found.matrix(codes, "I8", "F8_E4M3")
    scales = found.check(found.tensor(module, "weight._scale"), _SCALES, (rows, 1))
    if codes.dtype == "F8_E4M3":
        found.add_fp8(f"{module}.weight", codes, scales, (1, 0))
        return
    parts = {"weight": by_rows(codes, rows), "weight_scale": by_rows(scales, rows)}
    found.add_int8(f"{module}.weight", codes, parts, bits=8, groups=1, scale_dtype=scales.dtype)


def _add_bits(found: Quantized, module: str, codes: TensorRecord) -> None:
    words, group = found.matrix(codes, "U8")
    scales = found.check(found.tensor(module, "weight._scale"), _SCALES)
    lines = scales.shape[0] if scales.shape else 0
    found.check(scales, (scales.dtype,), (lines, 1))
    shifts = found.tensor(module, "weight._shift")
    found.check(shifts, (scales.dtype, "U8", "I8"), (lines, 1))
    bits = next((bits for bits in (4, 2) if -(-lines * bits // 8) == words), None)
    if bits is None:
        found.check(codes, ("U8",), (-(-lines // 2), group))
    parts = {"data": whole(codes), "scale": whole(scales), "shift": whole(shifts)}
    found.add(
        f"{module}.weight",
        "quanto",
        (lines * group,),
        parts,
        bits=bits,
        lines=lines,
        group_size=group,
        dtype=scales.dtype,
        integers=shifts.dtype in ("U8", "I8"),
    )
