"""Tables of which experts a token goes to: DeepSeek-V4's first layers, published as integers."""

from hmt.formats.quantized.scan import Quantized, by_rows

_INTEGERS = ("I64", "I32")
_TABLE = "tid2eid"


def find_expert_tables(found: Quantized) -> None:
    """Every MODULE.tid2eid [tokens, experts of a token], whose numbers f32 holds exactly."""
    for module, name in found.modules(_TABLE):
        record = found.tensor(module, name)
        rows, _ = found.matrix(record, *_INTEGERS)
        parts = {"data": by_rows(record, rows)}
        found.add(record.name, "floats", record.shape, parts, dtype=record.dtype)
