"""Which sizes attention kernels are launched with: a table by shape, found by measuring.

How a run's context is cut into parts depends on that run, on the shape of the model, and, for runs
of few tokens, on how many runs there are room for.  So it has the same bits in every launch for as
many runs, however long contexts may become there.
"""

from dataclasses import dataclass

import torch
import triton

from hmt.kernels.reference.kv_pages import PageEncoding, PageLayout
from hmt.kernels.triton.attention.metadata import SHORT_TOKENS, DeviceRuns

# Programs that keep the multiprocessors of a large card busy with what one alone takes.
_PROGRAMS = 128
_UNCUT_TOKENS = 512  # runs of more are enough work without being cut
MOST_PARTS = 128  # a power of two

_LATENT_PROGRAMS = 132  # one fills a multiprocessor
_LATENT_LEAST = 128  # tokens: two groups of warps take every other tile of 64
# One token of 8 KV heads at position 1000 takes 6.5 us in 16 parts, 7.2 in 8 of twice the tile, and
# 8 (in an older form) in 4; at position 4000 12 us in parts of 128 tokens, 14.3 in parts of 256.
# 16 such runs of 1000 tokens take 23 us in as many parts as fit at once, 43 in 16 each.
_FEW, _MOST = 16, 128
_SLOTS = 396  # programs that fit on an H200's multiprocessors at once
# Programs of FP8 take fewer registers: 131072 positions 103 us where it was 122.
_FP8_SLOTS, _FP8_DIM = 528, 128
_ANY = 1 << 30
# Where no part is more than two tiles, programs take so little shared memory that they begin beside
# those of the kernels ahead, and ask for their tiles before kernels behind ask for weights.  (Of an
# 8B model on an H200, with tiles asked for behind 26 MB of weights, attention took 10 us, alone 5.)
_FEW_TILES, _FEW_TILES_STAGES = 2, 2


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of one launch.

    rows       pairs of token and query head in a program
    tile       tokens that a program takes at once
    stages     tiles that are on their way or computed at once
    one_sweep  all tiles are masked, where few are not
    split      some context of such runs has more than one part, here or in another launch
    few        a context is cut into so many parts while these have up to `most` tokens,
    parts      and into no more than these; they keep `parts` programs busy with `own_parts`
    least      tokens in a part are a multiple of this
    launched   parts that contexts of this bucket can have; the grid
    """

    rows: int
    tile: int
    warps: int
    stages: int
    one_sweep: bool
    split: bool = False
    own_parts: bool = False
    few: int = 1
    parts: int = 1
    least: int = 1
    most: int = _ANY
    launched: int = 1


def key_widths(key_dim: int, in_front: int = 0) -> tuple[int, int]:
    """A key's front, of at least `in_front` numbers, and what remains of it."""
    above = triton.next_power_of_2(key_dim)
    front = above if above == key_dim else above // 2
    if in_front:
        front = triton.next_power_of_2(in_front)
    front = max(front, 16)  # of a dot product
    back = max(triton.next_power_of_2(key_dim - front), 16) if key_dim > front else 0
    return front, back


def value_width(value_dim: int) -> int:
    """Of values, in a power of two."""
    return max(16, triton.next_power_of_2(value_dim))


def plan_of(
    layout: PageLayout, group: int, held: DeviceRuns, window: int, compute: torch.dtype
) -> Plan:
    """The plan for runs of similar length; what it depends on is known to the host."""
    if held.tokens > SHORT_TOKENS:
        return _long_plan(layout, group, held, window, compute)
    tokens = 1 if held.tokens == 1 else SHORT_TOKENS
    rows = min(max(16, triton.next_power_of_2(tokens * group)), 64)
    tile, warps, stages = _sizes(max(layout.key_dim, layout.value_dim), rows, compute)
    blocks = -(-tokens * group // rows) * layout.heads
    slots, count = _SLOTS, held.sequences or held.count
    if layout.encoding is PageEncoding.FP8 and max(layout.key_dim, layout.value_dim) <= _FP8_DIM:
        slots = _FP8_SLOTS
    parts = min(max(slots // blocks, _FEW), MOST_PARTS)
    few = max(1, min(slots // (blocks * count), _FEW))
    most = _MOST * min(max(1, _FEW // few), 4)
    if layout.latent:
        parts = few = max(1, min(_LATENT_PROGRAMS // (blocks * count), MOST_PARTS))
        most = _ANY
    least = _LATENT_LEAST if layout.latent else max(tile, 64)
    seen = _most_seen(held, window, tile)
    # Contexts of up to few * most tokens make up to `few` parts, longer ones parts of `most`.
    launched = min(parts, -(-seen // least))
    if not layout.latent:
        launched = min(few, launched) if seen <= few * most else min(parts, -(-seen // most))
        launched = max(launched, 1)
        if seen <= few * _FEW_TILES * tile:
            stages = min(stages, _FEW_TILES_STAGES)
    return Plan(
        rows,
        tile,
        warps,
        stages,
        one_sweep=True,
        split=parts > 1,
        few=few,
        parts=parts,
        least=least,
        most=most,
        launched=launched,
    )


def _long_plan(
    layout: PageLayout, group: int, held: DeviceRuns, window: int, compute: torch.dtype
) -> Plan:
    rows = 64 if layout.latent or compute == torch.float32 else 128
    tile, warps, stages = _sizes(max(layout.key_dim, layout.value_dim), rows, compute)
    plan = Plan(rows, tile, warps, stages, one_sweep=False)
    if held.tokens > _UNCUT_TOKENS:
        return plan
    least = 512
    blocks = -(-held.fewest * group // rows) * layout.heads
    launched = min(max(_PROGRAMS // blocks, 1), -(-_most_seen(held, window, tile) // least))
    return Plan(
        rows,
        tile,
        warps,
        stages,
        one_sweep=False,
        split=True,
        own_parts=True,
        parts=_PROGRAMS,
        least=least,
        launched=launched,
    )


def plain_plan(key_dim: int, value_dim: int, compute: torch.dtype) -> Plan:
    """The plan for keys and values in plain tensors."""
    rows = 128 if max(key_dim, value_dim) <= 256 and compute != torch.float32 else 64
    sizes = _sizes(max(key_dim, value_dim), rows, compute)
    return Plan(rows, *sizes, one_sweep=False)


def _most_seen(held: DeviceRuns, window: int, tile: int) -> int:
    """Tokens from the first tile that a run sees to its end, at most."""
    return min(held.context, window + held.tokens + 2 * tile) if window else held.context


def _sizes(wide: int, rows: int, compute: torch.dtype) -> tuple[int, int, int]:
    """Tile, warps and stages.

    Measured on an H200 (copies: 4.2 TB/s, products: 800 TFLOP/s) with bf16.  One token of 32 heads,
    8 KV heads of 128, 128K positions, by tile, warps and stages, in programs that fit at once: 64,
    4, 3 134 us; 64, 4, 4 133; 32, 4, 4 136; 128, 4, 2 136; with a third more programs than fit 64,
    4, 3 174, and 128, 8, 2 206.  2048 tokens behind 6144: 128, 8, 2 610 us; 64, 8, 3 684; 64, 8, 2
    723.  128 heads of 192 / 128, 2048 tokens on 2048: 64, 8, 3 855 us; 128, 8, 2 870; 64, 8, 2
    1074.
    """
    if compute == torch.float32:  # without tensor cores; shared memory holds little
        return (16 if wide > 256 else 32), 4 if rows <= 32 else 8, 1
    if wide > 256:
        return (64, 8, 2) if rows >= 64 else (32, 4, 2)
    if rows > 64:
        return (128, 8, 2) if wide <= 128 else (64, 8, 3 if wide <= 192 else 2)
    return 64, 4, 3 if wide <= 128 else 2
