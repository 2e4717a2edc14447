"""Experts that a checkpoint has in one tensor for each layer, as the linear layers that they are.

Qwen3.5, Qwen3-Next, Qwen3-VL and Gemma 4 publish EXPERTS.gate_up_proj and EXPERTS.down_proj
[experts, ...].  Quantised they are EXPERTS.7.gate_proj and so on, each by itself: what
compressed-tensors knows are linear layers, and llm-compressor writes such models in this way.
"""

from dataclasses import dataclass
from typing import Final

from hmt.contracts.blocks import BlockId, BlockKind
from hmt.contracts.checkpoint import TensorRecord
from hmt.weights.binding import BoundParam

_STACKS: Final = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}


@dataclass(frozen=True, slots=True)
class Transposed(TensorRecord):
    """A matrix [outputs, inputs] whose outputs are columns of what is published.

    offset    of the published matrix [inputs, columns] that it is a part of
    columns   of that matrix
    column    the first that is its
    """

    columns: int
    column: int


def expert_module(block: BlockId, param: BoundParam, record: TensorRecord) -> str | None:
    """The linear layer's name where `record` is a stack of experts; None where it is none."""
    front, _, last = record.name.rpartition(".")
    stack = _STACKS.get(param.spec.name)
    if block.kind is not BlockKind.EXPERT or len(record.shape) != 3 or last != stack:
        return None
    return f"{front}.{block.index}.{param.spec.name}"


def expert_record(
    module: str, block: BlockId, param: BoundParam, record: TensorRecord
) -> TensorRecord:
    """One expert's matrix in the stack `record`, under its own name."""
    rows, columns = param.spec.shape
    expert_bytes = record.nbytes // record.shape[0]
    joined = record.shape[1] * record.shape[2] // (rows * columns)  # gate and up, or one
    number = joined - 1 if param.spec.name == "up_proj" else 0
    nbytes = expert_bytes // joined
    offset = record.offset + block.index * expert_bytes
    name, shape = f"{module}.weight", (rows, columns)
    if param.form is not None:  # which puts transposed matrices in order
        return Transposed(
            name, record.dtype, shape, record.file, offset, nbytes, record.shape[2], number * rows
        )
    offset += number * nbytes
    return TensorRecord(name, record.dtype, shape, record.file, offset, nbytes)
