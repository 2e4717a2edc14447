"""What attention over pages gives: bytes of keys and values with one token, and arithmetic.

The shape is that of most models of today: four query heads share a head of 128 numbers, and there
are eight of these.  The CPU reads shorter extents more slowly: two heads of 64 are measured, too.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch

from hmt.base.units import MIB, round_up
from hmt.contracts.encoding import Encoding
from hmt.contracts.model import PAGE_TOKENS
from hmt.engine.by_turns import by_turns, middle_half
from hmt.engine.product_rates import weights_in
from hmt.kernels import ops
from hmt.kernels.cpu.threads import usable_threads
from hmt.memory import PAGE_BYTES, HostBuffer, available_host_bytes, cache_bytes
from hmt.quant import Format

_HEADS, _KV_HEADS, _HEAD_DIM = 32, 8, 128
_SHORT_KV_HEADS, _SHORT_HEAD_DIM = 2, 64
_GROUP = _HEADS // _KV_HEADS
_CONTEXT = 4096
_LAYERS = 8  # at least
_CACHED_SHARE = 8  # of the caches' size, which pages fit well
_LEAST_PAGES = 2 * 256 // PAGE_TOKENS
_CACHES = 2  # times their size is read before a page's turn comes again: 134 MB of zeros were read
# at 30 GB/s beside caches of 480 MiB, and four times as many at 21.5
_TOKENS = 256  # of a prompt
_COLD_BYTES, _COLD_ROUNDS = 2 * MIB, 8
_PRODUCTS, _COLUMNS = Format(Encoding.BF16), 1024


@dataclass(frozen=True, slots=True)
class AttentionRates:
    """Of all cores, or of a GPU; 0: not measured.

    bytes_per_s        of keys and values, one token attending to them
    operations_per_s   a prompt's tokens attending
    cached_per_s       bytes_per_s of what caches hold
    short_bytes_per_s, short_operations_per_s, short_cached_per_s   of small heads
    several_bytes_per_s   as bytes_per_s, several users' tokens attending to their own positions
    cold_s             of one token attending to what no cache holds, beyond its bytes
    """

    bytes_per_s: float = 0.0
    operations_per_s: float = 0.0
    cached_per_s: float = 0.0
    several_bytes_per_s: float = 0.0
    short_bytes_per_s: float = 0.0
    short_cached_per_s: float = 0.0
    short_operations_per_s: float = 0.0
    cold_s: float = 0.0

    def faster(self, reading: float, arithmetic: float) -> "AttentionRates":
        """With memory that is read so many times as fast, and arithmetic."""
        return replace(
            self,
            bytes_per_s=self.bytes_per_s * reading,
            operations_per_s=self.operations_per_s * arithmetic,
            short_bytes_per_s=self.short_bytes_per_s * reading,
            short_operations_per_s=self.short_operations_per_s * arithmetic,
            cold_s=self.cold_s / reading,
        )


def attention_rates(
    seconds: float, beside: Sequence[Callable[[int], object]] = ()
) -> tuple[AttentionRates, list[float]]:
    """The CPU's; nothing where memory is too short for it.

    And the seconds of each of the calls that were timed by turns `beside` it.
    """
    layout = ops.PageLayout(ops.PageEncoding.BF16, _KV_HEADS, _HEAD_DIM, _HEAD_DIM)
    short = ops.PageLayout(ops.PageEncoding.BF16, _SHORT_KV_HEADS, _SHORT_HEAD_DIM, _SHORT_HEAD_DIM)
    pages = _CONTEXT // PAGE_TOKENS
    layers = max(_LAYERS, -(-_CACHES * cache_bytes() // (pages * layout.page_bytes)))
    size = round_up(pages * layers * layout.page_bytes, PAGE_BYTES)
    if size > available_host_bytes() // 4:
        return AttentionRates(), []
    before = torch.get_num_threads()
    buffer = HostBuffer(size)
    try:
        buffer.tensor.fill_(0)
        torch.set_num_threads(usable_threads())
        memory = buffer.tensor[: pages * layers * layout.page_bytes]
        long_pages = memory.view(pages, layers, -1)
        short_pages = memory.view(-1, layers, short.page_bytes)  # as many bytes in a call
        prompt_pages = short_pages[:pages]
        long_few, short_few = _cached(long_pages, layout), _cached(short_pages, short)
        with torch.inference_mode():
            calls = [
                _attending(long_pages, layout),
                _attending(long_pages, layout, _TOKENS),
                _attending(long_few, layout),
                _attending(short_pages, short),
                _attending(prompt_pages, short, _TOKENS // 4),
                _attending(short_few, short),
            ]
            found = by_turns([*calls, *beside], seconds)
            kinds = (long_pages, layout), (short_pages, short)
            cold_s = fmean(_cold_s(memory, every, of) for every, of in kinds)
        one_s, many_s, few_s, short_s, short_many_s, short_few_s = found[: len(calls)]
        rate = pages * layout.page_bytes / one_s
        rates = AttentionRates(
            rate,
            _operations(long_pages, layout, _TOKENS) / many_s,
            cached_per_s=max(rate, len(long_few) * layout.page_bytes / few_s),
            short_bytes_per_s=len(short_pages) * short.page_bytes / short_s,
            short_operations_per_s=_operations(prompt_pages, short, _TOKENS // 4) / short_many_s,
            short_cached_per_s=len(short_few) * short.page_bytes / short_few_s,
            cold_s=cold_s,
        )
        return rates, found[len(calls) :]
    finally:
        torch.set_num_threads(before)
        buffer.discard()


def _cached(every: torch.Tensor, layout: ops.PageLayout) -> torch.Tensor:
    """Pages that caches hold."""
    fitting = cache_bytes() // _CACHED_SHARE // layout.page_bytes
    return every[: min(len(every), max(_LEAST_PAGES, fitting)), : max(1, fitting // len(every))]


def _cold_s(memory: torch.Tensor, every: torch.Tensor, layout: ops.PageLayout) -> float:
    """Of one token attending to few of `every` page of `memory` while products read the rest of it.

    Beyond what as many bytes take of all pages, which are read in turn: in steps other weights pass
    through the caches between one layer's attention and the next one's.  On two Zen 4 cores 0.5 MB
    took 70 us then and 25 in a loop, 4 MB 265 and 150, and 34 MB as much in both.
    """
    few = every[: max(1, _COLD_BYTES // layout.page_bytes)]
    others = memory[few.nbytes :]
    (weight,) = weights_in(others, _PRODUCTS, (others.nbytes // (2 * _COLUMNS) - 1, _COLUMNS))
    x = torch.ones(1, _COLUMNS, dtype=torch.bfloat16)
    calls = _attending(few, layout), _attending(every, layout)
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(_COLD_ROUNDS):
        for call, taken in zip(calls, times, strict=True):
            ops.linear(x, weight)
            begin = time.perf_counter()
            call(number)
            taken.append(time.perf_counter() - begin)
    few_s, all_s = map(middle_half, times)
    return max(0.0, few_s - all_s * len(few) / len(every))


def _attending(
    memory: torch.Tensor, layout: ops.PageLayout, tokens: int = 1
) -> Callable[[int], object]:
    """One layer's attention, layers in turn; as `rates_in`."""
    count, layers, _ = memory.shape
    pages, table = ops.Pages(layout, memory), torch.randperm(count, device="cpu")
    query = torch.ones(tokens, _GROUP * layout.heads, layout.key_dim, dtype=torch.bfloat16)
    query, scale = query.to(memory.device), layout.key_dim**-0.5
    runs = ops.PagedRuns([ops.PagedRun(0, tokens, count * PAGE_TOKENS - tokens, table)])

    def attend(number: int) -> object:
        return ops.paged_attention(pages, number % layers, runs, query, scale=scale)

    return attend


def _operations(memory: torch.Tensor, layout: ops.PageLayout, tokens: int) -> float:
    """Of a prompt's tokens attending."""
    seen = tokens * (len(memory) * PAGE_TOKENS - tokens / 2)
    return 2 * seen * _GROUP * layout.heads * (layout.key_dim + layout.value_dim)


def rates_in(
    memory: torch.Tensor,
    layout: ops.PageLayout,
    seconds: float,
    timed: Callable[[Callable[[int], object], float], float],
) -> AttentionRates:
    """Rates with pages in `memory`, uint8 [pages, layers, page_bytes], of zeros.

    timed(call, seconds)   seconds of one `call(number)`, found within about `seconds`
    """
    one_s, many_s = (
        timed(_attending(memory, layout, tokens), seconds / 2) for tokens in (1, _TOKENS)
    )
    read = len(memory) * layout.page_bytes
    return AttentionRates(read / one_s, _operations(memory, layout, _TOKENS) / many_s)


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
