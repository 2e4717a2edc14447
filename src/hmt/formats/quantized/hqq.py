"""HQQ checkpoints as transformers saves them (mobiusml/hqq): every module says how it is packed."""

import math

from hmt.contracts.checkpoint import TensorRecord
from hmt.formats.quantized.scan import Quantized, whole

# Bits of a code, codes of a word, bytes of a word.
_PACKINGS = {
    "8bit_u8": (8, 1, 1),
    "4bit_u8": (4, 2, 1),
    "3bit_32": (3, 10, 4),
    "2bit_u8": (2, 4, 1),
    "1bit_u8": (1, 8, 1),
}
_FLOATS = ("F32", "F16", "BF16")
_STATE_BYTES = 64  # of a number, or the name of a packing
_SPARE = (
    *("nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype", "view_as_float"),
    *("quant_scale", "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict"),
    *("stores_quant_config", "channel_wise", "optimize", "round_zero"),
)


def find_hqq(found: Quantized) -> None:
    """Every MODULE.W_q with its scale and zero, and what else is written beside it."""
    for module, _ in list(found.modules("W_q")):
        _add(found, module)
        found.spare.update(f"{module}.{suffix}" for suffix in _SPARE)


def _add(found: Quantized, module: str) -> None:
    shape = _integers(found, found.check(found.tensor(module, "shape"), ("I64",), (2,)))
    axis = _integers(found, found.check(found.tensor(module, "axis"), ("I32",), ()))[0]
    name = found.check(found.tensor(module, "packing"), ("U8",))
    packing = found.content(name, _STATE_BYTES).decode("latin-1")
    if min(shape) < 1 or axis not in (0, 1) or packing not in _PACKINGS:
        asked = f"shape {list(shape)}, axis {axis} and packing {packing!r} for {module}"
        raise found.refuse(asked, f"matrices, axis 0 or 1, and {', '.join(_PACKINGS)}")
    rows, columns = shape
    group = _group(found, module, (rows, columns), axis)
    bits, per_word, word_bytes = _PACKINGS[packing]
    # Groups are the rows of a matrix (axis 1), or its columns (axis 0).
    groups = rows * columns // group
    lines, width = (groups, group) if axis else (group, groups)
    codes = found.tensor(module, "W_q")
    if codes.nbytes != -(-lines // per_word) * width * word_bytes:
        word = "U8" if word_bytes == 1 else "I32"
        found.check(codes, (word,), (-(-lines // per_word), width))
    wanted = (groups, 1) if axis else (1, groups)
    scales = found.check(found.tensor(module, "scale"), _FLOATS, wanted)
    zeros = found.check(found.tensor(module, "zero"), (scales.dtype,), wanted)
    parts = {"W_q": whole(codes), "scale": whole(scales), "zero": whole(zeros)}
    found.add(
        f"{module}.weight",
        "hqq",
        (rows, columns),
        parts,
        bits=bits,
        per_word=per_word,
        group_size=group,
        axis=axis,
        lines=lines,
        dtype=scales.dtype,
    )


def _group(found: Quantized, module: str, shape: tuple[int, int], axis: int) -> int:
    """Numbers that share a scale: without a group_size, those of a row, or of a column."""
    rows, columns = shape
    group = columns if axis else rows
    if f"{module}.group_size" in found.records:
        record = found.check(found.tensor(module, "group_size"), ("I32",), ())
        group = _integers(found, record)[0]
    if f"{module}.channel_wise" in found.records:
        record = found.check(found.tensor(module, "channel_wise"), ("U8",), ())
        if found.content(record, 1) == b"\0":
            raise found.refuse(f"one scale for all of {module}", "groups of numbers")
    if group < 1 or rows * columns % group or (axis and columns % group):
        asked = f"group_size {group} for {module} {list(shape)}"
        raise found.refuse(asked, "groups that divide its rows")
    return group


def _integers(found: Quantized, record: TensorRecord) -> list[int]:
    content = found.content(record, _STATE_BYTES)
    size = len(content) // max(1, math.prod(record.shape))
    return [
        int.from_bytes(content[at : at + size], "little", signed=True)
        for at in range(0, len(content), size)
    ]
