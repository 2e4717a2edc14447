"""Experts of a layer in one tensor of floats, an expert's gate rows before its up rows.

Qwen3.5 publishes matrices as they are multiplied, Qwen3-VL transposed ones.
"""

from dataclasses import replace

from hmt.contracts.checkpoint import FileRange, PublishedPart, TensorRecord
from hmt.formats.quantized.scan import Quantized

_FLOATS = ("F32", "F16", "BF16")
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def find_stacked_experts(found: Quantized) -> None:
    """Every expert's gate_proj, up_proj and down_proj, as rows of EXPERTS.gate_up_proj and so on.

    gate_up_proj [experts, 2 * width, hidden], down_proj [experts, hidden, width]; or with the last
    two dimensions of both exchanged.
    """
    for at, stacked in list(found.modules(*_PARTS)):
        if not at.endswith(".experts"):
            continue
        record = found.check(found.tensor(at, stacked), _FLOATS)
        names = _PARTS[stacked]
        if _is_transposed(found, at):
            _add_transposed(found, at, stacked, record)
            continue
        if len(record.shape) != 3 or record.shape[1] % len(names):
            found.check(record, _FLOATS, (0, 0, 0))
        for expert in range(record.shape[0]):
            for number, name in enumerate(names):
                part = expert * len(names) + number
                weight = f"{at}.{expert}.{name}.weight"
                found.forms[weight] = _rows(record, part, len(names))


def _is_transposed(found: Quantized, at: str) -> bool:
    """Whether both tensors of a layer have columns for what the experts give."""
    pair = [found.tensor(at, stacked).shape[1:] for stacked in _PARTS]
    if any(len(shape) != 2 for shape in pair):
        return False
    (rows, columns), (down_rows, down_columns) = pair
    usual = columns == down_rows and rows == 2 * down_columns
    return not usual and rows == down_columns and columns == 2 * down_rows


def _add_transposed(found: Quantized, at: str, stacked: str, record: TensorRecord) -> None:
    names, (experts, inputs, columns) = _PARTS[stacked], record.shape
    nbytes, rows = record.nbytes // experts, columns // len(names)
    for expert in range(experts):
        where = FileRange(record.file, record.offset + expert * nbytes, nbytes)
        parts = {"data": PublishedPart(record.name, where, 0)}
        for number, name in enumerate(names):
            options = {"dtype": record.dtype, "columns": columns, "start": number * rows}
            weight = f"{at}.{expert}.{name}.weight"
            found.add(weight, "arranged", (rows, inputs), parts, **options)


def _rows(record: TensorRecord, part: int, parts: int) -> TensorRecord:
    """One of as many parts of equally many rows as there are experts, times `parts`."""
    experts, rows, columns = record.shape
    nbytes = record.nbytes // (experts * parts)
    shape = (rows // parts, columns)
    return replace(record, shape=shape, offset=record.offset + part * nbytes, nbytes=nbytes)
