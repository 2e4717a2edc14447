"""Experts of a layer in one tensor of floats, an expert's gate rows before its up rows: Qwen3.5."""

from dataclasses import replace

from hmt.contracts.checkpoint import TensorRecord
from hmt.formats.quantized.scan import Quantized

_FLOATS = ("F32", "F16", "BF16")
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def find_stacked_experts(found: Quantized) -> None:
    """Every expert's gate_proj, up_proj and down_proj, as rows of EXPERTS.gate_up_proj and so on.

    gate_up_proj [experts, 2 * width, hidden], down_proj [experts, hidden, width].
    """
    for at, stacked in list(found.modules(*_PARTS)):
        if not at.endswith(".experts"):
            continue
        record = found.check(found.tensor(at, stacked), _FLOATS)
        names = _PARTS[stacked]
        if len(record.shape) != 3 or record.shape[1] % len(names):
            found.check(record, _FLOATS, (0, 0, 0))
        for expert in range(record.shape[0]):
            for number, name in enumerate(names):
                part = expert * len(names) + number
                weight = f"{at}.{expert}.{name}.weight"
                found.forms[weight] = _rows(record, part, len(names))


def _rows(record: TensorRecord, part: int, parts: int) -> TensorRecord:
    """One of as many parts of equally many rows as there are experts, times `parts`."""
    experts, rows, columns = record.shape
    nbytes = record.nbytes // (experts * parts)
    shape = (rows // parts, columns)
    return replace(record, shape=shape, offset=record.offset + part * nbytes, nbytes=nbytes)
