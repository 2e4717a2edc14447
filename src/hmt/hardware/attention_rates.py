"""What attention over pages gives: bytes of KV pages with one token, and arithmetic.

The shape is that of most models of today: four query heads share a head of 128 numbers, and there
are eight of these.
"""

from collections.abc import Callable

import torch

from hmt.contracts.model import PAGE_TOKENS
from hmt.hardware.gemm_rates import Timed, memory_for_all_cores
from hmt.hardware.timing import interleaved
from hmt.kernels import ops
from hmt.memory import available_host_bytes, cache_bytes

_HEADS, _KV_HEADS, _HEAD_DIM = 32, 8, 128
_GROUP = _HEADS // _KV_HEADS
CONTEXT = 4096
_LAYERS = 8  # at least
# So many times the caches' size is read before a page's turn comes again: 134 MB of zeros were read
# at 30 GB/s beside caches of 480 MiB, and four times as many at 21.5.
_CACHES = 2
_TOKENS = 256  # of a prompt


def page_layout(*, rows: bool = False) -> ops.PageLayout:
    """Of the pages that are measured."""
    return ops.PageLayout(ops.PageEncoding.BF16, _KV_HEADS, _HEAD_DIM, _HEAD_DIM, rows=rows)


def cpu_attention_rates(seconds: float) -> tuple[float, float]:
    """All cores' bytes and operations per second; 0, 0 where memory is too short for it."""
    layout, pages = page_layout(), CONTEXT // PAGE_TOKENS
    layers = max(_LAYERS, -(-_CACHES * cache_bytes() // (pages * layout.page_bytes)))
    nbytes = pages * layers * layout.page_bytes
    if nbytes > available_host_bytes() // 4:
        return 0.0, 0.0
    with memory_for_all_cores(nbytes, 0) as buffer:
        memory = buffer[:nbytes].view(pages, layers, -1)
        return attention_rates(memory, layout, lambda calls: interleaved(calls, seconds))


def attention_rates(
    memory: torch.Tensor, layout: ops.PageLayout, timed: Timed
) -> tuple[float, float]:
    """Bytes per second with one token, and operations per second with a prompt's.

    memory         uint8 [pages, layers, page_bytes], of zeros
    timed(calls)   seconds of one of each, which take the number of the round
    """
    one_s, many_s = timed([_attending(memory, layout, 1), _attending(memory, layout, _TOKENS)])
    positions = _TOKENS * (len(memory) * PAGE_TOKENS - _TOKENS / 2)
    operations = 2 * positions * _GROUP * layout.heads * (layout.key_dim + layout.value_dim)
    return len(memory) * layout.page_bytes / one_s, operations / many_s


def _attending(
    memory: torch.Tensor, layout: ops.PageLayout, tokens: int
) -> Callable[[int], object]:
    """One layer's attention, layers in turn."""
    count, layers, _ = memory.shape
    pages, table = ops.Pages(layout, memory), torch.randperm(count, device="cpu")
    query = torch.ones(tokens, _GROUP * layout.heads, layout.key_dim, dtype=torch.bfloat16)
    query, scale = query.to(memory.device), layout.key_dim**-0.5
    runs = ops.AttentionMetadata([ops.PagedSegment(0, tokens, count * PAGE_TOKENS - tokens, table)])

    def attend(number: int) -> object:
        return ops.paged_attention(pages, number % layers, runs, query, scale=scale)

    return attend
