"""Caches of several devices as one, against a cache that has all layers."""

import pytest
import torch

from hmt.base.errors import BudgetError
from hmt.contracts.model import KVKind, KVLayer
from hmt.contracts.plan import Tier
from hmt.contracts.step import Step
from hmt.kvcache import KVAllocator, PagedKV, SplitKVCache, page_bytes
from hmt.memory import HostPool, Ledger

LAYERS = tuple(KVLayer(KVKind.FULL, 2, 8, 8) for _ in range(5))
DEVICES = {1: 0, 3: 1, 4: 0}  # layers 0 and 2 are the host's; 5 is the head
TOKENS = 96


def cache_of(layers: dict[int, KVLayer], allocator: KVAllocator | None = None) -> PagedKV:
    nbytes = TOKENS // 16 * page_bytes(tuple(layers.values()), torch.float32) + 4096
    account = Ledger({Tier.HOST: nbytes}).open(Tier.HOST, "kv", nbytes)
    return PagedKV(layers, TOKENS, torch.float32, HostPool(account), allocator=allocator)


@pytest.fixture
def split() -> SplitKVCache:
    caches: dict[int | None, PagedKV] = {}
    for device in (None, 0, 1):
        layers = {i: x for i, x in enumerate(LAYERS) if DEVICES.get(i) == device}
        shared = next((cache.allocator for cache in caches.values()), None)
        caches[device] = cache_of(layers, shared)
    return SplitKVCache(caches, DEVICES | {5: 1})


def test_each_layer_is_where_it_computes_and_attends_as_in_one_cache(split: SplitKVCache) -> None:
    torch.manual_seed(0)
    whole = cache_of(dict(enumerate(LAYERS)))
    sequences = [split.allocator.open(40), split.allocator.open(40)]
    assert sequences == [whole.allocator.open(40), whole.allocator.open(40)]
    for start, count in ((0, 17), (17, 1), (18, 5)):
        step = Step.build([(sequence, start, [0] * count, 1) for sequence in sequences])
        for index in range(len(LAYERS)):
            key, value = torch.randn(2, 2 * count, 2, 8)
            query = torch.randn(2 * count, 4, 8)
            for cache in (split, whole):
                cache.append(index, step, key, value)
            outputs = [cache.attend(index, step, query, scale=0.3) for cache in (split, whole)]
            assert torch.equal(*outputs)
    pages = [split.kernel_pages(index) for index in range(len(LAYERS))]
    memories = [page[0].memory.data_ptr() for page in pages if page is not None]
    assert len(set(memories)) == 3 and memories[0] == memories[2] and memories[1] == memories[4]


def test_what_one_device_has_no_room_for_none_takes(split: SplitKVCache) -> None:
    allocator = split.allocator
    sequence = allocator.open(64)
    assert allocator.free_tokens == TOKENS - 64 and allocator.capacity_tokens == TOKENS
    with pytest.raises(BudgetError, match="32 of 96"):
        allocator.grow(sequence, 128)
    assert allocator.free_tokens == TOKENS - 64
    allocator.close(sequence)
    assert allocator.free_tokens == TOKENS
