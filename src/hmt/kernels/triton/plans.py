"""Which sizes attention kernels are launched with: a table by shape, found by measuring."""

from dataclasses import dataclass

import torch
import triton

from hmt.kernels.reference.pages import PageEncoding, PageLayout
from hmt.kernels.triton.runs import SHORT_TOKENS, DeviceRuns

# Programs that keep every multiprocessor of a large card busy, about twice over.
_PROGRAMS = 264

MOST_PARTS = 128  # a power of two
# On an H200, of 128K positions: 8 KV heads make 528 programs of 66 parts, four for each of 132
# multiprocessors (176 us, with 128 parts 181 us); INT8 takes 171 us with 128 parts and 217 with 66;
# latent keys are taken by two blocks of 64 heads, which make 132 programs.
_PARTS = 66
_INT8_PARTS = 128


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
    """The plan for runs of similar length; what it depends on is known to the host."""
    rows_each = held.tokens * group
    short = held.tokens <= SHORT_TOKENS
    rows = min(max(16, triton.next_power_of_2(rows_each)), 64 if short or layout.latent else 128)
    tile, warps, ahead = _sizes(layout, rows, compute)
    span = min(held.context, window + held.tokens + 2 * tile) if window else held.context
    if short:
        # By the run alone, so that a row's bits do not depend on who else is in the batch.
        parts = _INT8_PARTS if layout.encoding is PageEncoding.INT8 else _PARTS
        least = max(tile, 128 if layout.latent else 256)
    else:
        blocks = -(-rows_each // rows) * layout.heads * held.count
        parts = max(1, min(_PROGRAMS // blocks, _PARTS))
        least = max(tile, 512)
    launched = min(parts, -(-span // least))
    if launched == 1 and not short:
        parts = 1
    return Plan(rows, tile, warps, parts, launched, least, ahead)


def _sizes(layout: PageLayout, rows: int, compute: torch.dtype) -> tuple[int, int, bool]:
    """Tile, warps, and whether a tile is read ahead.

    Measured on an H200 with bf16 queries (read: 4.64 TB/s, matmul: 792 TFLOP/s).  One query of 32
    heads, 8 KV heads of 128, 128K positions in bf16, by tile, warps and ahead: 128, 4, no 176 us;
    64, 4, no 201; 64, 8, no 207; 128, 8, no 244; 32, 2, yes 332; 64, 4, yes 576.  The same in INT8:
    64, 4, no 217; 128, 8, no 232; 128, 4, yes 403.  128 heads of 576 / 512 in 64 rows: 64, 8, no
    292; 32, 8, no 324; in 32 rows 566, in 16 rows 637.  2048 tokens at once in 128 rows: 32, 8, yes
    259; 64, 8, yes 267; 64, 8, no 300; 128, 8, no 338; in 64 rows 398.
    """
    wide = max(layout.key_dim, layout.value_dim)
    if compute == torch.float32:  # without tensor cores; shared memory holds little
        return (16 if wide > 256 else 32), 4 if rows <= 32 else 8, False
    if wide > 256:
        return (64, 8, False) if rows >= 64 else (32, 4, False)
    if rows > 64:
        return 32, 8, True
    if rows > 32:
        return 64, 4, False
    return (64 if layout.encoding is PageEncoding.INT8 or wide > 128 else 128), 4, False
