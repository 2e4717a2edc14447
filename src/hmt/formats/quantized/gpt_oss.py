"""gpt-oss: experts of a layer in one tensor, in MXFP4 as OpenAI publishes them, or in 16 bits.

Gate and up projections share a tensor, their rows interleaved: even ones are the gate's.
"""

from dataclasses import replace

from hmt.contracts.checkpoint import FileRange, PublishedPart, TensorRecord
from hmt.formats.quantized.scan import Quantized

_TWO = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_FLOATS = ("F32", "F16", "BF16")


def find_gpt_oss(found: Quantized) -> None:
    """Every expert's gate_proj, up_proj and down_proj, and their biases."""
    for at, stacked in list(found.modules(*_TWO)):
        _add_floats(found, at, stacked)
    for at, stacked in list(found.modules(*(f"{name}_blocks" for name in _TWO))):
        _add_mxfp4(found, at, stacked.removesuffix("_blocks"))
    for at, stacked in list(found.modules(*(f"{name}_bias" for name in _TWO))):
        _add_bias(found, at, stacked.removesuffix("_bias"))


def _add_mxfp4(found: Quantized, at: str, stacked: str) -> None:
    """NAME_blocks uint8 [experts, rows, in / 32, 16] and NAME_scales [experts, rows, in / 32]."""
    codes = found.check(found.tensor(at, f"{stacked}_blocks"), ("U8",))
    if len(codes.shape) != 4 or codes.shape[3] != 16:
        found.check(codes, ("U8",), (0, 0, 0, 16))
    scales = found.check(found.tensor(at, f"{stacked}_scales"), ("U8",), codes.shape[:3])
    experts, rows, groups, _ = codes.shape
    names = _TWO[stacked]
    for expert in range(experts):
        for turn, name in enumerate(names):
            parts = {
                "codes": _expert(codes, expert, len(names)),
                "scales": _expert(scales, expert, len(names)),
            }
            options = {"interleaved": len(names), "turn": turn}
            shape = (rows // len(names), 32 * groups)
            found.add(f"{at}.{expert}.{name}.weight", "mxfp4", shape, parts, **options)


def _add_floats(found: Quantized, at: str, stacked: str) -> None:
    """NAME [experts, in, rows]: transformers' own layout."""
    record = found.check(found.tensor(at, stacked), _FLOATS)
    if len(record.shape) != 3:
        found.check(record, _FLOATS, (0, 0, 0))
    experts, inputs, rows = record.shape
    names = _TWO[stacked]
    for expert in range(experts):
        part = replace(_expert(record, expert, 1), row_bytes=0)
        for turn, name in enumerate(names):
            options = {"dtype": record.dtype, "interleaved": len(names), "turn": turn}
            shape = (rows // len(names), inputs)
            weight = f"{at}.{expert}.{name}.weight"
            found.add(weight, "arranged", shape, {"data": part}, **options, columns=rows)


def _add_bias(found: Quantized, at: str, stacked: str) -> None:
    """NAME_bias [experts, rows]."""
    record = found.check(found.tensor(at, f"{stacked}_bias"), _FLOATS)
    if len(record.shape) != 2:
        found.check(record, _FLOATS, (0, 0))
    experts, rows = record.shape
    names = _TWO[stacked]
    for expert in range(experts):
        part = _expert(record, expert, len(names))
        for turn, name in enumerate(names):
            options = {"dtype": record.dtype, "interleaved": len(names), "turn": turn}
            bias = f"{at}.{expert}.{name}.bias"
            found.add(bias, "arranged", (rows // len(names),), {"data": part}, **options)


def _expert(record: TensorRecord, expert: int, turns: int) -> PublishedPart:
    """One expert's bytes, of which `turns` rows go with each row of a parameter."""
    experts, rows = record.shape[:2]
    nbytes = record.nbytes // experts
    where = FileRange(record.file, record.offset + expert * nbytes, nbytes)
    return PublishedPart(record.name, where, nbytes // max(1, rows) * turns)
