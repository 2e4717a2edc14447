"""Tables that are published in shards, as n-gram tables are: MODULE.shard_0.weight and so on."""

import re

from hmt.base.errors import MissingFileError
from hmt.contracts.checkpoint import Joined
from hmt.formats.quantized.scan import Quantized

_FLOATS = ("F32", "F16", "BF16")
_SHARD = re.compile(r"(.+)\.shard_([0-9]{1,6})\.weight")


def find_shards(found: Quantized) -> None:
    """MODULE.weight, as the rows of its shards, one after the other.

    Raises MissingFileError where a number is missing, ShapeError where shards differ in width.
    """
    numbers: dict[str, set[int]] = {}
    for match in filter(None, map(_SHARD.fullmatch, found.records)):
        numbers.setdefault(match[1], set()).add(int(match[2]))
    for module, present in numbers.items():
        if absent := sorted(set(range(max(present))) - present):
            raise MissingFileError(
                f"{found.folder}: {module} lacks {len(absent)} of {max(present) + 1} shards, first "
                f"{module}.shard_{absent[0]}.weight: download the checkpoint again"
            )
        pieces = [found.tensor(f"{module}.shard_{n}", "weight") for n in range(len(present))]
        _, width = found.matrix(pieces[0], *_FLOATS)
        for piece in pieces:
            found.check(piece, (pieces[0].dtype,), (*piece.shape[:1], width))
        rows = sum(piece.shape[0] for piece in pieces)
        found.forms[f"{module}.weight"] = Joined(tuple(pieces), (rows, width))
