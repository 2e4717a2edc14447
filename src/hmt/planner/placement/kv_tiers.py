"""How many pages of keys and values lie at each level."""

from dataclasses import dataclass

from hmt.base.errors import BudgetError
from hmt.base.units import MIB, format_bytes, round_up
from hmt.contracts.kv import (
    DISK_BUFFERS,
    GROUP_PAGES,
    KVTiers,
    PinnedPages,
    min_device_pages,
    ring_pages,
)
from hmt.contracts.model import PAGE_TOKENS
from hmt.planner.cost.demand import KVTierSizes

_PIECE_BYTES = MIB  # a disk's full rate, with several of them on their way
_MEMORY_PAGE_BYTES = 4096
# Of what is near a device, what it fetches host memory's pages to, layer by layer: with 32 layers
# room for twice as many as stay near, where link and CPU share them 1 to 3 and 8 times as many.
_STAGED = 16


@dataclass(frozen=True, slots=True)
class KVBudgets:
    """What the user gives for keys and values; None: what is needed.

    device_bytes  where layers compute
    host_bytes    beside it, in host memory
    disk_bytes    on the disk; 0: there is none
    """

    device_bytes: int
    host_bytes: int | None = None
    disk_bytes: int | None = 0


def plan_kv_tiers(
    sizes: KVTierSizes,
    budgets: KVBudgets,
    *,
    context: int | None,
    most: int,
    chunk: int,
    batch: int,
    device: int | None = None,
) -> KVTiers:
    """Fill levels with the pages of `context` positions, the nearest first.

    context     None: as many as the budgets hold, at most `most`
    device      the one on which layers compute beside host memory; None: there is none
    Raises BudgetError where they are too small, saying what would do.
    """
    stay = PinnedPages()
    rings = {window: ring_pages(window, chunk) * batch for window in sizes.ring_pages}
    near = budgets.device_bytes
    for window, page_bytes in sizes.ring_pages.items():
        if context is not None:
            rings[window] = min(rings[window], _pages(context))
        near -= rings[window] * page_bytes
    least = min_device_pages(chunk, 1, stay)
    wanted = _pages(most if context is None else context)
    # Where all layers have windows, rings are all there is.
    device_pages = max(0, near) // sizes.device_page if sizes.device_page else max(wanted, least)
    if device_pages < least or near < 0:
        needed = budgets.device_bytes - near + least * sizes.device_page
        raise BudgetError(
            f"--kv-gpu-memory {format_bytes(budgets.device_bytes)} is too little for what one "
            f"request needs near: {format_bytes(needed)} ({needed} bytes), with prompts in pieces "
            f"of {chunk} tokens; give more, or lower --max-prefill-tokens"
        )
    device_pages = min(device_pages, max(wanted, least))
    if not sizes.device_page:
        return KVTiers(device_pages, ring_pages=rings, device_format=sizes.device_format)
    staged = 0
    fetched = sizes.host_format != "int4" and (sizes.device_format, sizes.host_format) != (
        "fp8",
        "int8",
    )
    if device is not None and wanted > device_pages and budgets.host_bytes != 0 and fetched:
        staged = min(device_pages // _STAGED, device_pages - least)
        device_pages -= staged
    left = max(0, wanted - device_pages)
    far = left if budgets.host_bytes is None and budgets.disk_bytes == 0 else 0
    host_pages = min(
        left, far if budgets.host_bytes is None else budgets.host_bytes // sizes.host_page
    )
    groups = -(-(left - host_pages) // GROUP_PAGES)
    if budgets.disk_bytes is not None:
        groups = min(groups, budgets.disk_bytes // sizes.disk_group)
    found = KVTiers(
        device_pages=device_pages,
        host_pages=host_pages,
        disk_groups=groups,
        ring_pages=rings,
        host_format=sizes.host_format,
        disk_format=sizes.disk_format,
        chunk_bytes=max(_PIECE_BYTES, sizes.layer_group) if groups else 0,
        staged_pages=staged,
        device_format=sizes.device_format,
    )
    if context is not None and found.pages < wanted:
        raise BudgetError(
            f"a context of {context} positions was asked for, and keys and values have room for "
            f"{found.pages * PAGE_TOKENS}: {device_pages * PAGE_TOKENS} near, "
            f"{host_pages * PAGE_TOKENS} in host memory "
            f"({format_bytes(sizes.host_page / PAGE_TOKENS)} each) and "
            f"{groups * GROUP_PAGES * PAGE_TOKENS} on the disk; raise --kv-host-memory or "
            "--kv-offload-disk-memory, or lower --context"
        )
    return found


def device_bytes(levels: KVTiers, sizes: KVTierSizes) -> int:
    """Memory where layers compute."""
    rings = [levels.ring_pages[window] * nbytes for window, nbytes in sizes.ring_pages.items()]
    own = levels.device_pages + levels.staged_pages
    return sum(round_up(n, _MEMORY_PAGE_BYTES) for n in (own * sizes.device_page, *rings))


def host_bytes(levels: KVTiers, sizes: KVTierSizes) -> int:
    """Host memory beside it: pages, what the disk's pass through, what they are chosen by."""
    passing = [sizes.kind_group, *[levels.chunk_bytes] * DISK_BUFFERS] if levels.disk_groups else []
    chosen = levels.pages * sizes.chosen_page
    parts = (levels.host_pages * sizes.host_page, chosen, *passing)
    return sum(round_up(n, _MEMORY_PAGE_BYTES) for n in parts)


def work_bytes(levels: KVTiers, sizes: KVTierSizes, tokens: int, row_numbers: int) -> int:
    """Memory for a step of `tokens` that keys and values at several levels take for a moment.

    Pages that move are copied, of all layers at once, before a layer begins; and attention to one
    level, to another, and both together are `row_numbers` for each token in f32.
    """
    if not levels.host_pages and not levels.disk_groups:
        return 0
    moved = max(GROUP_PAGES, _pages(tokens)) * sizes.device_page
    return max(moved, 3 * 4 * tokens * row_numbers)


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS)
