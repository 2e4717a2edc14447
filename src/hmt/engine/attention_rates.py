"""What attention over pages gives: bytes of keys and values with one token, and arithmetic.

The shape is that of most models of today: four query heads share a head of 128 numbers, and there
are eight of these.  The CPU reads shorter extents more slowly: four heads of 64 are measured, too.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from hmt.base.units import round_up
from hmt.contracts.model import PAGE_TOKENS
from hmt.engine.product_rates import usual_s
from hmt.kernels import ops
from hmt.kernels.cpu.threads import usable_threads
from hmt.memory import PAGE_BYTES, HostBuffer, available_host_bytes, cache_bytes

_HEADS, _KV_HEADS, _HEAD_DIM = 32, 8, 128
_SHORT_KV_HEADS, _SHORT_HEAD_DIM = 4, 64
_GROUP = _HEADS // _KV_HEADS
_CONTEXT = 4096
_LAYERS = 8  # at least
_CACHED_SHARE = 8  # of the caches' size, which pages fit well
_LEAST_PAGES = 2 * 256 // PAGE_TOKENS
_CACHES = 2  # times their size is read before a page's turn comes again: 134 MB of zeros were read
# at 30 GB/s beside caches of 480 MiB, and four times as many at 21.5
_TOKENS = 256  # of a prompt


@dataclass(frozen=True, slots=True)
class AttentionRates:
    """Of all cores, or of a GPU; 0: not measured.

    bytes_per_s        of keys and values, one token attending to them
    operations_per_s   a prompt's tokens attending
    cached_per_s       bytes_per_s of what caches hold
    short_bytes_per_s, short_cached_per_s   of small heads
    several_bytes_per_s   as bytes_per_s, several users' tokens attending to their own positions
    """

    bytes_per_s: float = 0.0
    operations_per_s: float = 0.0
    cached_per_s: float = 0.0
    several_bytes_per_s: float = 0.0
    short_bytes_per_s: float = 0.0
    short_cached_per_s: float = 0.0


def attention_rates(seconds: float) -> AttentionRates:
    """The CPU's; nothing where memory is too short for it."""
    layout = ops.PageLayout(ops.PageEncoding.BF16, _KV_HEADS, _HEAD_DIM, _HEAD_DIM)
    pages = _CONTEXT // PAGE_TOKENS
    layers = max(_LAYERS, -(-_CACHES * cache_bytes() // (pages * layout.page_bytes)))
    size = round_up(pages * layers * layout.page_bytes, PAGE_BYTES)
    if size > available_host_bytes() // 4:
        return AttentionRates()
    before = torch.get_num_threads()
    buffer = HostBuffer(size)
    try:
        buffer.tensor.fill_(0)
        torch.set_num_threads(usable_threads())
        memory = buffer.tensor[: pages * layers * layout.page_bytes]
        with torch.inference_mode():
            every = memory.view(pages, layers, -1)
            found = rates_in(every, layout, seconds, usual_s)
            cached = _cached_rate(every, layout, seconds)
            short = ops.PageLayout(
                ops.PageEncoding.BF16, _SHORT_KV_HEADS, _SHORT_HEAD_DIM, _SHORT_HEAD_DIM
            )
            every = memory.view(pages, -1, short.page_bytes)
            read = _attending_s(every, short, seconds / 4, usual_s)
            return replace(
                found,
                cached_per_s=max(found.bytes_per_s, cached),
                short_bytes_per_s=pages * short.page_bytes / read,
                short_cached_per_s=_cached_rate(every, short, seconds),
            )
    finally:
        torch.set_num_threads(before)
        buffer.discard()


def _cached_rate(every: torch.Tensor, layout: ops.PageLayout, seconds: float) -> float:
    """Bytes per second of pages that caches hold."""
    fitting = cache_bytes() // _CACHED_SHARE // layout.page_bytes
    few = every[: min(len(every), max(_LEAST_PAGES, fitting)), : max(1, fitting // len(every))]
    return len(few) * layout.page_bytes / _attending_s(few, layout, seconds / 8, usual_s)


def _attending_s(
    memory: torch.Tensor,
    layout: ops.PageLayout,
    seconds: float,
    timed: Callable[[Callable[[int], object], float], float],
    tokens: int = 1,
) -> float:
    """Of one layer's attention; as `rates_in`."""
    count, layers, _ = memory.shape
    pages, table = ops.Pages(layout, memory), torch.randperm(count, device="cpu")
    query = torch.ones(tokens, _GROUP * layout.heads, layout.key_dim, dtype=torch.bfloat16)
    query, scale = query.to(memory.device), layout.key_dim**-0.5
    runs = ops.PagedRuns([ops.PagedRun(0, tokens, count * PAGE_TOKENS - tokens, table)])

    def attend(number: int) -> object:
        return ops.paged_attention(pages, number % layers, runs, query, scale=scale)

    return timed(attend, seconds)


def rates_in(
    memory: torch.Tensor,
    layout: ops.PageLayout,
    seconds: float,
    timed: Callable[[Callable[[int], object], float], float],
) -> AttentionRates:
    """Rates with pages in `memory`, uint8 [pages, layers, page_bytes], of zeros.

    timed(call, seconds)   seconds of one `call(number)`, found within about `seconds`
    """
    count, context = len(memory), len(memory) * PAGE_TOKENS
    one_s, many_s = (
        _attending_s(memory, layout, seconds / 2, timed, tokens) for tokens in (1, _TOKENS)
    )
    seen = _TOKENS * (context - _TOKENS / 2)
    heads = _GROUP * layout.heads
    operations = 2 * seen * heads * (layout.key_dim + layout.value_dim)
    return AttentionRates(count * layout.page_bytes / one_s, operations / many_s)


def reading_rate(
    memory: torch.Tensor,
    layout: ops.PageLayout,
    users: int,
    timed: Callable[[Callable[[int], object], int], float],
) -> float:
    """Bytes per second of one token each of `users` who share the pages out; as `rates_in`.

    timed(call, count)   seconds of one of `count` calls, a layer each
    """
    count, layers, _ = memory.shape
    pages, own = ops.Pages(layout, memory), count // users
    context = own * PAGE_TOKENS
    tables = torch.randperm(count, device="cpu").view(users, own)
    runs = ops.PagedRuns(
        [ops.PagedRun(user, 1, context - 1, table) for user, table in enumerate(tables)]
    )
    query = torch.ones(users, _HEADS, layout.key_dim, dtype=torch.bfloat16).to(memory.device)
    scale = layout.key_dim**-0.5

    def attend(number: int) -> object:
        return ops.paged_attention(pages, number, runs, query, scale=scale)

    return count * layout.page_bytes / timed(attend, layers)
