"""Convolutions of queries, keys and values that are published apart: Kimi Linear, OLMo Hybrid.

They are one where they are computed.  transformers writes three tensors of as many channels each,
whatever the channels of keys and values.
"""

from hmt.contracts.checkpoint import Joined
from hmt.formats.quantized.scan import Quantized

_FLOATS = ("F32", "F16", "BF16")
_QUERIES = ".q_conv1d.weight"


def find_convolutions(found: Quantized) -> None:
    """MODULE.conv1d.weight, as the rows of its q_conv1d, k_conv1d and v_conv1d."""
    for name in found.records:
        if not name.endswith(_QUERIES):
            continue
        at = name.removesuffix(_QUERIES)
        pieces = [
            found.check(found.tensor(f"{at}.{part}_conv1d", "weight"), _FLOATS) for part in "qkv"
        ]
        rest = pieces[0].shape[1:]
        for piece in pieces:
            found.check(piece, _FLOATS, (*piece.shape[:1], *rest))
        channels = sum(piece.shape[0] for piece in pieces)
        found.forms[f"{at}.conv1d.weight"] = Joined(tuple(pieces), (channels, *rest))
