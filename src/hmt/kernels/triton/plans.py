"""Which sizes attention kernels are launched with: a table by shape, found by measuring."""

from dataclasses import dataclass

import torch
import triton

from hmt.kernels.reference.pages import PageLayout
from hmt.kernels.triton.runs import SHORT_TOKENS, DeviceRuns

# Programs that keep every multiprocessor of a large card busy, about twice over.
_PROGRAMS = 264

MOST_PARTS = 128  # a power of two
_SHORT_PARTS = 66  # 8 KV heads make 528 programs of them: four for each of 132 multiprocessors
_LATENT_PARTS = 66  # two blocks of 64 heads make 132


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of one launch.

    rows      pairs of token and query head in a program
    tile      tokens that a program takes at once
    parts     how many parts a context is cut into at most; 1 for a kernel that writes the result
    launched  parts that contexts of this bucket can have; the grid
    least     tokens in a part are a multiple of this
    ahead     whether a tile is read while another is computed
    """

    rows: int
    tile: int
    warps: int
    stages: int
    parts: int
    launched: int
    least: int
    ahead: bool


def front_words(layout: PageLayout) -> tuple[int, int]:
    """Words of a key in two powers of two: 288 (576 numbers of two bytes) are 256 and 32.

    The front of latent keys holds their values.
    """
    words = layout.key_dim // layout.per_word
    if layout.latent:
        front = triton.next_power_of_2(-(-layout.value_dim // layout.per_word))
    else:
        above = triton.next_power_of_2(words)
        front = above if above == words else above // 2
    least = max(16 // layout.per_word, 8)  # of a dot product
    front = max(front, least)
    back = max(triton.next_power_of_2(words - front), least) if words > front else 0
    return front, back


def plan_of(
    layout: PageLayout, group: int, held: DeviceRuns, window: int, compute: torch.dtype
) -> Plan:
    """The plan for runs of one group; what it depends on is known to the host."""
    rows_each = held.tokens * group
    short = held.tokens <= SHORT_TOKENS
    rows = min(max(16, triton.next_power_of_2(rows_each)), 64 if short or layout.latent else 128)
    tile, warps, stages = _sizes(layout, rows, compute)
    blocks = -(-rows_each // rows) * layout.heads
    span = min(held.context, window + held.tokens + 2 * tile) if window else held.context
    if short:
        # By the run alone, so that a row's bits do not depend on who else is in the batch.
        parts = _LATENT_PARTS if layout.latent else _SHORT_PARTS
        least = max(tile, 256 if not layout.latent else 128)
    else:
        blocks *= held.count
        parts = max(1, min(_PROGRAMS // blocks, _SHORT_PARTS))
        least = max(tile, 512)
    launched = min(parts, -(-span // least))
    if launched == 1 and not short:
        parts = 1
    return Plan(rows, tile, warps, stages, parts, launched, least, ahead=True)


def _sizes(layout: PageLayout, rows: int, compute: torch.dtype) -> tuple[int, int, int]:
    """Tile, warps and stages."""
    wide = max(layout.key_dim, layout.value_dim)
    if compute == torch.float32:  # without tensor cores; shared memory holds little
        return (16 if wide > 256 else 32), 4 if rows <= 32 else 8, 1
    if layout.latent and wide > 256:
        return 32, 8, 1
    if rows <= 32:
        return 64, 4, 1
    return 64 if wide <= 128 else 32, 4 if rows <= 64 else 8, 1
