"""Weights that stay as published where others are rounded: a model's sensitive_layers.json.

A list of objects with "layer", a number, and perhaps "op", what of the layer is meant; "flag" is
"bf16" or left out.  What else they hold (why a layer is sensitive) is not looked at.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hmt.base.errors import CheckpointError
from hmt.contracts.blocks import BlockId, BlockKind, BlockSpec, ParamSpec, Role

SENSITIVE_FILE: Final = "sensitive_layers.json"
_MAX_BYTES: Final = 16 << 20
_FLAGS: Final = ("bf16", "f16", "fp16")  # all mean: as published

# What may stand as "op" beside a weight's own name.
_OF_BLOCKS: Final = {
    "attention": (BlockKind.ATTENTION,),
    "ffn": (BlockKind.FFN, BlockKind.ROUTER, BlockKind.EXPERT),
}
_OF_WEIGHTS: Final = {
    "qkv": (
        "q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn",
        "q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj",
    ),
    "o": ("o_proj",),
    "ffn_gate": ("gate_proj", "gate_up_proj"),
    "ffn_up": ("up_proj", "gate_up_proj"),
    "ffn_down": ("down_proj",),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sensitive:
    """Which weights stay as published.

    ops   by layer; "" for all of a layer
    """

    ops: frozenset[tuple[int, str]] = frozenset()

    def keeps(self, param: ParamSpec, block: BlockId) -> bool:
        """Whether a parameter of `block` stays as published."""
        mine = (op for layer, op in self.ops if layer == block.layer)
        return any(_means(op, param, block) for op in mine)

    def check(self, blocks: Iterable[BlockSpec]) -> None:
        """Raise CheckpointError where something is named that a model of `blocks` has not got."""
        left = set(self.ops)
        for block in blocks:
            weights = [param for param in block.params if param.role is Role.LINEAR]
            left -= {
                (layer, op)
                for layer, op in left
                if layer == block.id.layer and any(_means(op, p, block.id) for p in weights)
            }
        if left:
            layer, op = min(left)
            what = f"op {op!r} of layer {layer}" if op else f"layer {layer}"
            known = ", ".join([*_OF_BLOCKS, *_OF_WEIGHTS])
            raise CheckpointError(
                f"{SENSITIVE_FILE} names {what}, where this model has no weights: give a layer's "
                f"number from 0 on, and as op one of {known}, or a weight's name"
            )


def read_sensitive(folder: Path) -> Sensitive:
    """What the file in `folder` says; nothing without one.  Raises CheckpointError."""
    file = folder / SENSITIVE_FILE
    return Sensitive(frozenset(_entry(entry, file) for entry in sensitive_entries(folder)))


def sensitive_entries(folder: Path) -> list[Any]:
    """Entries of the file in `folder` as they stand there; none without one.

    Raises CheckpointError where it is no list.
    """
    file = folder / SENSITIVE_FILE
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"{file} has more than {_MAX_BYTES} bytes: it is no such list")
        entries = json.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}): write it again") from error
    if not isinstance(entries, list):
        raise CheckpointError(f"{file} holds a JSON {type(entries).__name__}, not a list")
    return entries


def _entry(entry: Any, file: Path) -> tuple[int, str]:
    found = entry if isinstance(entry, dict) else {}
    layer, op, flag = found.get("layer"), found.get("op", ""), found.get("flag", "bf16")
    if type(layer) is not int or layer < 0 or not isinstance(op, str) or flag not in _FLAGS:
        raise CheckpointError(
            f"{file} has the entry {json.dumps(entry)[:200]}: each has a number as layer, perhaps "
            f"an op, and one of {', '.join(_FLAGS)} as flag"
        )
    return layer, op


def _means(op: str, param: ParamSpec, block: BlockId) -> bool:
    if op in _OF_BLOCKS:
        return block.kind in _OF_BLOCKS[op]
    names = _OF_WEIGHTS.get(op, (op,))
    parts = param.name.split(".")
    return not op or any(part in names or part.removeprefix("shared_") in names for part in parts)
