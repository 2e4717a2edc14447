"""Merging the parts of attention: launching it, and what kernels know of shapes and scores."""

from dataclasses import dataclass

import triton
from torch import Tensor

from hmt.kernels.reference.kv_pages import PageEncoding
from hmt.kernels.triton.attention.combine import merge_kernel
from hmt.kernels.triton.attention.metadata import DeviceRuns
from hmt.kernels.triton.attention.tuning import Plan
from hmt.kernels.triton.pdl import dependent

_MERGED_NUMBERS = 128  # of a row, in a program of `merge_kernel`

# out and lse, and those of parts: f32 [slots, rows, value_dim] and [slots, rows].
Results = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True, slots=True)
class Scoring:
    """What scores are made with; see `reference.attention`."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None

    def __post_init__(self) -> None:
        if self.sinks is not None:
            object.__setattr__(self, "sinks", self.sinks.float().contiguous())


@dataclass(frozen=True, slots=True)
class Shapes:
    """Of keys and values: sizes, how numbers are kept, and where values lie."""

    heads: int
    key_dim: int
    value_dim: int
    encoding: PageEncoding
    latent: bool = False


def _merge_sizes(shapes: Shapes, plan: Plan) -> tuple[int, int, int]:
    """Numbers of a row in a program of `merge_kernel`, parts that it reads at once, and warps.

    Latents have many rows of many parts.  With few parts whole rows, in few registers, so that all
    programs fit at once; with many all parts of a few numbers, so that all are under way.
    """
    if not shapes.latent:
        return _MERGED_NUMBERS, 16, 1
    # Runs of many tokens have few parts each.  What is added at once decides about last digits, so
    # it must not depend on the bucket.
    parts = 8 if plan.own_parts else triton.next_power_of_2(plan.parts)
    return (512, parts, 4) if parts <= 32 else (64, 64, 1)


def merge(
    held: DeviceRuns,
    plan: Plan,
    shapes: Shapes,
    blocks: int,
    results: Results,
    scoring: Scoring,
) -> None:
    """Write the union of parts."""
    out, lse, *_ = results
    group = out.shape[1] // shapes.heads
    chunk, at_once, warps = _merge_sizes(shapes, plan)
    chunks = triton.cdiv(shapes.value_dim, chunk)
    rows = min(plan.rows, held.tokens * group)
    merge_kernel[(chunks * rows, shapes.heads * blocks, held.count)](
        *results,
        held.spans,
        scoring.sinks,
        held.count,
        blocks,
        plan.launched,
        plan.few,
        plan.parts,
        scoring.window,
        OWN_PARTS=plan.own_parts,
        LEAST=plan.least,
        MOST=plan.most,
        HEADS=shapes.heads,
        GROUP=group,
        VALUE_DIM=shapes.value_dim,
        ROWS=plan.rows,
        TILE=plan.tile,
        CHUNK=chunk,
        CHUNKS=chunks,
        PADDED_PARTS=triton.next_power_of_2(plan.parts),
        AT_ONCE=at_once,
        WINDOW=scoring.window > 0,
        SINKS=scoring.sinks is not None,
        LSE=lse is not None,
        num_warps=warps,
        **dependent(out.device),
    )
