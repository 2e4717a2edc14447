"""Blocks: the unit of placement and movement, and what parameters one holds."""

import enum
from dataclasses import dataclass
from typing import NamedTuple

TRUNK = -1  # the `layer` of blocks that belong to no layer


class BlockKind(enum.StrEnum):
    """What a block is for.  Everything in one block moves together."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    FFN = "ffn"
    ROUTER = "router"  # router, shared experts and the norm before them
    EXPERT = "expert"
    HEAD = "head"  # final norm (chunk 0) and a range of the output rows
    VISION = "vision"  # a layer of a vision tower, or another part of one

    # Blocks are looked up several times per layer and token; Enum's own hash is Python code.
    __hash__ = str.__hash__


class BlockId(NamedTuple):
    """Names one block.

    `index` counts experts of a layer, chunks of the head, tables, or parts of a vision tower.
    """

    layer: int
    kind: BlockKind
    index: int = 0  # type: ignore[assignment]  # hides the method of tuples

    def __str__(self) -> str:
        where = "" if self.layer == TRUNK else f"layer {self.layer} "
        counted = self.index or self.kind in (BlockKind.EXPERT, BlockKind.HEAD, BlockKind.VISION)
        which = f" {self.index}" if counted else ""
        return f"{where}{self.kind.value}{which}"


class Role(enum.StrEnum):
    """How a parameter is used, which decides whether it may be quantised."""

    LINEAR = "linear"  # [out, in], multiplied with activations; quantised on request
    VECTOR = "vector"  # norm weights, biases, small router tables; never quantised
    TABLE = "table"  # rows are looked up, never multiplied; read row by row


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter that a model family expects, and where a checkpoint may keep it.

    name      local name inside its block, such as "q_proj"
    shape     shape after `rows` is taken
    sources   names in the checkpoint; the first one that exists is used (dialects differ)
    rows      (first, past last) rows of the source tensor when only a part belongs here; all its
              dimensions but the last count as one
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    role: Role = Role.LINEAR
    rows: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """A block and its parameters, as the model family declares it (no bytes yet)."""

    id: BlockId
    params: tuple[ParamSpec, ...]


@dataclass(frozen=True, slots=True)
class BlockSize:
    """What the planner needs to know of a block.

    slot_bytes   memory that a resident copy takes, padding included
    read_bytes   bytes that leave the disk when it is loaded
    numbers      weights that a token is multiplied with; None: not known, two bytes each
    rows         of these matrices: numbers that a token gets from them
    encoding     of most of them, as machines know rates by: "bf16", "w4a8", ...
    """

    id: BlockId
    slot_bytes: int
    read_bytes: int
    numbers: int | None = None
    encoding: str = ""
    rows: int = 0
