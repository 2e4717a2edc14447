"""Every family with a prompt that begins like another: the logits are as without, in both caches.

The beginning comes from memory first, and from the disk after a restart.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from default_part import first_of_each
from plain_memory import Bench, PlainKV, bench_of, random_reference
from random_configs import Case, cases

from hmt.base.errors import ConfigError
from hmt.contracts.kv import PinnedPages, min_device_pages
from hmt.contracts.plan import Tier
from hmt.kernels import ops
from hmt.kvcache import PagedKV, SequenceSlots, StateStore, TieredKV
from hmt.kvcache.eviction import KV_EVICTION
from hmt.kvcache.offload.sliding_window import SlidingWindowPages
from hmt.kvcache.page_store import PageStore
from hmt.kvcache.prefix import (
    PageExtents,
    PrefixCache,
    PrefixStore,
    keep_prefixes,
    store_buffer_bytes,
)
from hmt.memory import HostPool, Ledger

pytestmark = pytest.mark.each_once

NEAR = 1e-5  # relative: as for prompts in other chunks
CHUNK, SHARED, LENGTH = 16, 90, 120
PAGES = min_device_pages(CHUNK, 2, PinnedPages())
F32 = ops.PageEncoding.F32


@pytest.fixture(scope="module")
def pool() -> Iterator[HostPool]:
    nbytes = (96 << 20) + store_buffer_bytes(1)
    made = HostPool(Ledger({Tier.HOST: nbytes}).open(Tier.HOST, "kv", nbytes))
    yield made
    made.close()


def logits(bench: Bench, sequence: int, start: int, tokens: list[int]) -> torch.Tensor:
    """Of the last token, in chunks."""
    chunks = [tokens[at : at + CHUNK] for at in range(start, len(tokens), CHUNK)]
    starts = range(start, len(tokens), CHUNK)
    return [bench.run((sequence, at, c)) for at, c in zip(starts, chunks, strict=True)][-1][-1]


@pytest.mark.parametrize("tiered", [False, True], ids=["one tier", "tiered"])
@pytest.mark.parametrize("case", first_of_each(cases()), ids=lambda case: case.name)
def test_a_prompt_may_begin_with_what_another_computed(
    case: Case, tiered: bool, pool: HostPool, tmp_path: Path
) -> None:
    bench = bench_of(random_reference(case.config, case.seed), tmp_path)
    kept = bench.model.spec.kv_layers
    rng = random.Random(case.seed)
    one, two = ([rng.randrange(case.config.vocab_size) for _ in range(LENGTH)] for _ in range(2))
    two[:SHARED] = one[:SHARED]
    bench.kv = PlainKV(bench.model.spec)
    wanted = logits(bench, 0, 0, two)
    extents = PageExtents(kept, F32)
    for after_restart in (False, True):
        kv = opened(kept, pool, tiered, bench.model.spec.state_layers)
        try:
            if kv is None:
                return
            store = PrefixStore(
                tmp_path, extents.description, extents.page_bytes, pool, capacity_bytes=1 << 30
            )
            bench.kv, prefixes = kv, PrefixCache(kv, keep_prefixes(kv.allocator), store, extents)
            if not after_restart:
                first = prefixes.open(LENGTH, one)
                assert first.held == 0
                logits(bench, first.sequence, 0, one)
                prefixes.close(first.sequence, one)
            second = prefixes.open(LENGTH, two)
            assert second.held == SHARED // 16 * 16
            found = logits(bench, second.sequence, second.held, two)
            assert float((found - wanted).norm() / wanted.norm()) <= NEAR
            prefixes.finish()
        finally:
            if kv is not None:
                kv.release()


def opened(kept: dict, pool: HostPool, tiered: bool, states: dict) -> TieredKV | PagedKV | None:
    """A cache; None where windows or states keep prompts from sharing, which it says."""
    state = StateStore(states, SequenceSlots(2, 1), pool) if states else None
    if not tiered:
        paged = PagedKV(kept, 2 * LENGTH + 16, torch.float32, pool, state=state)
        if state is None:
            return paged
        with pytest.raises(ConfigError, match="recurrent state"):
            keep_prefixes(paged.allocator)
        paged.release()
        return None
    whole = {index: layer for index, layer in kept.items() if not layer.window}
    rings = [
        SlidingWindowPages(
            {i: k for i, k in kept.items() if k.window == window}, window, CHUNK, 40, F32, pool
        )
        for window in sorted({layer.window for layer in kept.values()} - {0})
    ]
    hot = PageStore(whole, PAGES, F32, pool)
    kv = TieredKV(hot, None, None, rings, KV_EVICTION["a2cr"], chunk=CHUNK, state=state)
    if not rings and state is None:
        return kv
    with pytest.raises(ConfigError, match="sliding window"):
        keep_prefixes(kv.allocator)
    kv.release()
    return None
