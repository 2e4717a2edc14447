"""Sequences that begin with what others computed attend as if they had computed it themselves."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hmt.base.errors import BudgetError, ConfigError
from hmt.base.trace import Tracer
from hmt.contracts.kv import PinnedPages, min_device_pages
from hmt.contracts.model import PAGE_TOKENS, KVKind, KVLayer
from hmt.contracts.plan import Tier
from hmt.contracts.step import Step
from hmt.kernels import ops
from hmt.kvcache import PagedKV, TieredKV
from hmt.kvcache.eviction import KV_EVICTION
from hmt.kvcache.offload.disk_pages import DiskPages
from hmt.kvcache.offload.sliding_window import SlidingWindowPages
from hmt.kvcache.page_store import PageStore
from hmt.kvcache.prefix import (
    PageExtents,
    PrefixCache,
    PrefixStore,
    keep_prefixes,
    store_buffer_bytes,
)
from hmt.memory import HostPool, Ledger, PreadReader, ReadQueue

LAYERS = {
    0: KVLayer(KVKind.FULL, 2, 8, 8),
    1: KVLayer(KVKind.FULL, 2, 8, 8),
    2: KVLayer(KVKind.LATENT, 1, 16, 8),
}
CHUNK, SEQUENCES = 48, 3
HOT = min_device_pages(CHUNK, SEQUENCES, PinnedPages())
F32, INT8 = ops.PageEncoding.F32, ops.PageEncoding.INT8
MOST = 1 << 30
LEVELS = {
    "hot": {},
    "warm": {"warm": 20},
    "cold": {"cold": 2},
    "all": {"warm": 7, "cold": 2},
}
KINDS = ["paged", *LEVELS]
BUFFERS = store_buffer_bytes(1)


@dataclass
class Machine:
    """Memory and a disk for caches."""

    folder: Path
    queue: ReadQueue
    pool: HostPool

    def kv(self, hot: int = HOT, warm: int = 0, cold: int = 0, far=F32) -> TieredKV:
        return TieredKV(
            PageStore(LAYERS, hot, F32, self.pool),
            PageStore(LAYERS, warm, far, self.pool) if warm else None,
            DiskPages(self.folder, LAYERS, cold, far, self.pool, self.queue, chunk_bytes=1)
            if cold
            else None,
            [],
            KV_EVICTION["a2cr"],
            chunk=CHUNK,
        )

    def paged(self) -> PagedKV:
        return PagedKV(LAYERS, HOT * PAGE_TOKENS, torch.float32, self.pool)

    def at(self, levels: str) -> TieredKV | PagedKV:
        """A cache of a kind."""
        return self.paged() if levels == "paged" else self.kv(**LEVELS[levels])

    def prefixes(self, kv: TieredKV | PagedKV, folder: Path | None = None, encoding=F32, **options):
        tree = keep_prefixes(kv.allocator, **options)
        if folder is None:
            return PrefixCache(kv, tree)
        extents = PageExtents(LAYERS, encoding)
        store = PrefixStore(
            folder, extents.description, extents.page_bytes, self.pool, capacity_bytes=MOST,
            segment_bytes=5 * extents.page_bytes,
        )  # fmt: skip
        return PrefixCache(kv, tree, store, extents)


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    nbytes = (64 << 20) + 2 * BUFFERS
    pool = HostPool(Ledger({Tier.HOST: nbytes}).open(Tier.HOST, "kv", nbytes))
    queue = ReadQueue(PreadReader(), Tracer())
    yield Machine(tmp_path_factory.mktemp("kv"), queue, pool)
    queue.close()
    pool.close()


def states_of(tokens: list[int], state: int = 1) -> list[int]:
    """Numbers that depend on a token and all before it."""
    states = []
    for token in tokens:
        state = (state * 31 + token + 1) % 999_983
        states.append(state)
    return states


def rows_of(layer: int, states: list[int]) -> torch.Tensor:
    """Keys and values [tokens, heads, dims] of tokens with these states."""
    kept = LAYERS[layer]
    shape = kept.heads, kept.key_dim + kept.value_dim
    numbers = torch.arange(shape[0] * shape[1]).view(shape) * 0.37 + layer + 0.1
    return torch.sin(torch.tensor(states, dtype=torch.float64)[:, None, None] * numbers).float()


class CachedSequences:
    """Sequences of a cache, by handle, as tokens of which the first so many were computed."""

    def __init__(self, prefixes: PrefixCache, near: float = 1e-5) -> None:
        self.prefixes, self.near = prefixes, near
        self.random = torch.Generator().manual_seed(0)
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.reserved: dict[int, int] = {}
        self.states: dict[int, list[int]] = {}
        self.rows: dict[int, dict[int, torch.Tensor]] = {}
        self.parked: set[int] = set()

    def open(self, prompt: list[int], more: int = 0) -> tuple[int, int] | None:
        """(handle, positions held) of a text that begins with `prompt`."""
        opened = self.prefixes.open(len(prompt) + more, prompt)
        if opened is None:
            return None
        self.tokens[opened.sequence] = list(prompt)
        self.computed[opened.sequence] = opened.held
        self.reserved[opened.sequence] = len(prompt) + more
        self.states[opened.sequence] = states_of(prompt[: opened.held])
        self.rows[opened.sequence] = {
            layer: rows_of(layer, self.states[opened.sequence]) for layer in LAYERS
        }
        return opened.sequence, opened.held

    def step(self, counts: dict[int, int]) -> None:
        """Compute so many tokens more of each, and check what they attend to."""
        parts = []
        for sequence, number in counts.items():
            at = self.computed[sequence]
            self.computed[sequence] = at + number
            while len(self.tokens[sequence]) < at + number:
                self.tokens[sequence].append(len(self.tokens[sequence]) % 5)
            chosen, states = self.tokens[sequence][at : at + number], self.states[sequence]
            states += states_of(chosen, states[-1] if states else 1)
            parts.append((sequence, at, chosen, 1))
        step = Step.build(parts)
        for index, layer in LAYERS.items():
            added = [rows_of(index, self.states[r.sequence][r.start :]) for r in step.segments]
            new = torch.cat(added)
            key, value = new.split([layer.key_dim, layer.value_dim], -1)
            latent = layer.kind is KVKind.LATENT
            query = torch.randn(len(new), 4, layer.key_dim, generator=self.random)
            kv = self.prefixes.kv
            kv.append(index, step, key, None if latent else value)
            out = kv.attend(index, step, query, scale=0.3)
            for run, rows in zip(step.segments, added, strict=True):
                held = self.rows[run.sequence]
                held[index] = torch.cat((held[index], rows))
                keys, values = held[index].split([layer.key_dim, layer.value_dim], -1)
                values = keys[..., : layer.value_dim] if latent else values
                wanted, _ = ops.attention(
                    query[run.tokens], keys, values, start=run.start, scale=0.3
                )
                error = (out[run.tokens] - wanted).norm() / wanted.norm()
                assert error <= self.near, (index, run, float(error))

    def run(self, sequence: int) -> None:
        """Compute all that was reserved, and close.  Of one that is parked that is nothing."""
        while left := self.reserved[sequence] - self.computed[sequence]:
            self.step({sequence: min(left, CHUNK)})
        self.close(sequence)

    def close(self, sequence: int) -> None:
        tokens = self.tokens.pop(sequence)[: self.computed.pop(sequence)]
        del self.reserved[sequence], self.states[sequence], self.rows[sequence]
        self.parked.discard(sequence)
        self.prefixes.close(sequence, tokens)


def prompt(system: int, user: int, length: int) -> list[int]:
    """Those of one system begin alike."""
    return (
        ([system] * 70 + [user] * length)[:length]
        if length <= 70
        else ([system] * 70 + [user] * (length - 70))
    )


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_traffic_attends_to_the_right_pages(machine, kind, data):
    kv = machine.at(kind)
    try:
        order = data.draw(st.sampled_from([*KV_EVICTION]))
        most = data.draw(st.sampled_from([None, 10]))
        cached = CachedSequences(machine.prefixes(kv, pages=most, order=order))
        for _ in range(data.draw(st.integers(1, 16))):
            _some_traffic(cached, data)
        for sequence in list(cached.tokens):
            cached.run(sequence)
        assert kv.allocator.free_tokens == kv.allocator.capacity_tokens
        # All that there is can be had, whatever was kept.
        text, _ = cached.open([9] * kv.allocator.capacity_tokens)
        assert not kv.allocator.can_open(1)
        cached.run(text)
        tree = cached.prefixes.tree
        assert len(tree.alone()) == tree.held_pages > 0
        tree.clear()
        assert kv.allocator.free_tokens == kv.allocator.capacity_tokens
    finally:
        kv.release()


def _some_traffic(cached, data):
    """CachedSequences come, grow by some tokens, and go; all that was reserved can be computed."""
    kv = cached.prefixes.kv
    if len(cached.tokens) < SEQUENCES and data.draw(st.booleans()):
        length = data.draw(st.sampled_from([1, 16, 17, 90, 200, 400]))
        chosen = prompt(data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2)), length)
        more = data.draw(st.sampled_from([0, 1, 60]))
        room = data.draw(st.booleans())
        if room:  # all that is left
            more = max(more, kv.allocator.free_tokens - length)
        opened = cached.open(chosen, more)
        if opened is None:
            assert not kv.allocator.can_open(length + more)
        else:
            assert opened[1] < length
    counts, budget = {}, CHUNK
    for sequence in cached.tokens:
        _other_room(cached, data, sequence)
        if sequence in cached.parked:
            continue
        left = cached.reserved[sequence] - cached.computed[sequence]
        count = min(left, data.draw(st.sampled_from([0, 1, 5, CHUNK])), max(1, budget))
        if count:
            counts[sequence] = count
            budget -= count - 1
    if counts:
        cached.step(counts)
    if cached.tokens and data.draw(st.integers(0, 3)) == 0:
        cached.close(data.draw(st.sampled_from(sorted(cached.tokens))))


def _other_room(cached, data, sequence):
    """More or less than was reserved; or a sequence waits, and goes on later."""
    kv, computed = cached.prefixes.kv, cached.computed[sequence]
    wanted = computed + data.draw(st.sampled_from([0, 20, 300]))
    if sequence in cached.parked:
        if not kv.allocator.can_resume(sequence, wanted):
            return
        kv.allocator.resume(sequence, wanted)
        cached.parked.remove(sequence)
    elif kv.allocator.can_park() and data.draw(st.integers(0, 3)) == 0:
        wanted = computed
        kv.allocator.park(sequence)
        cached.parked.add(sequence)
    elif not kv.allocator.can_grow(sequence, wanted):
        return
    kv.allocator.grow(sequence, wanted)
    kv.allocator.shrink(sequence, wanted)
    cached.reserved[sequence] = wanted


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_begins_with_what_others_computed(machine, kind):
    kv = machine.at(kind)
    cached = CachedSequences(machine.prefixes(kv))
    first, held = cached.open(prompt(1, 2, 150))
    assert held == 0
    cached.run(first)
    assert kv.allocator.free_tokens == kv.allocator.capacity_tokens
    second, held = cached.open(prompt(1, 3, 200))
    assert held == 64, "whole pages of the 70 that both begin with"
    third, held = cached.open(prompt(1, 2, 150))
    assert held == 144
    again, held = cached.open(prompt(1, 2, 144))
    assert held == 128, "a token is left to compute"
    for sequence in (second, third, again):
        cached.run(sequence)
    counters = cached.prefixes.tree.counters
    assert (counters.lookups, counters.hits, counters.hit_tokens) == (4, 3, 64 + 144 + 128)
    kv.release()


@pytest.mark.parametrize("kind", ["cold", "all"])
def test_idle_pages_do_not_strand_room_on_the_drive(machine, kind):
    """Groups there are free as a whole only: none may mix what goes with what is reserved."""
    kv = machine.at(kind)
    cached = CachedSequences(machine.prefixes(kv))
    cached.run(cached.open([3] * 160)[0])
    text, _ = cached.open([4] * kv.allocator.capacity_tokens)
    cached.run(text)
    assert len(cached.prefixes.tree.find([4] * kv.allocator.capacity_tokens)) > 0
    kv.release()


@pytest.mark.parametrize("kind", ["paged", "hot"])
def test_shared_pages_take_room_once(machine, kind):
    kv = machine.at(kind)
    cached = CachedSequences(machine.prefixes(kv))
    cached.run(cached.open([3] * 160)[0])
    free = kv.allocator.free_tokens
    a, _ = cached.open([3] * 161)
    b, _ = cached.open([3] * 161)
    assert free - kv.allocator.free_tokens == 160 + 2 * 16
    cached.run(a)
    cached.run(b)
    with pytest.raises(BudgetError, match="are free"):
        kv.allocator.open_with(
            kv.allocator.capacity_tokens + 1, cached.prefixes.tree.find([3] * 160)
        )
    kv.release()


@pytest.mark.parametrize("kind", ["paged", "hot", "all"])
@pytest.mark.parametrize("encoding", [F32, INT8])
def test_a_restart_finds_what_was_saved(machine, tmp_path, kind, encoding):
    near = 1e-5 if encoding is F32 else 0.02
    length = (HOT + 3) * PAGE_TOKENS if kind == "all" else 300
    kv = machine.at(kind)
    cached = CachedSequences(machine.prefixes(kv, tmp_path, encoding), near)
    cached.run(cached.open(prompt(1, 2, length))[0])
    cached.run(cached.open(prompt(1, 3, 100))[0])
    cached.prefixes.finish()
    kv.release()
    kv = machine.at(kind)
    prefixes = machine.prefixes(kv, tmp_path, encoding)
    cached = CachedSequences(prefixes, near)
    second, held = cached.open(prompt(1, 3, 100))
    assert held == 96
    first, held = cached.open(prompt(1, 2, length), more=50)
    assert held == (length - 1) // PAGE_TOKENS * PAGE_TOKENS
    assert prefixes.tree.counters.hits == 0
    cached.run(second)
    cached.run(first)
    assert prefixes.open(length, prompt(1, 2, length)).held == held
    assert prefixes.tree.counters.hit_tokens == held, "memory has it now"
    assert prefixes.counters()["drive_read_pages"] == held // PAGE_TOKENS + 6
    prefixes.finish()
    kv.release()


@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_any_traffic_with_restarts(machine, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("prefixes")
    for _ in range(data.draw(st.integers(1, 3))):
        kv = machine.kv(warm=7, cold=2)
        prefixes = machine.prefixes(kv, folder)
        cached = CachedSequences(prefixes)
        try:
            for _ in range(data.draw(st.integers(1, 12))):
                _some_traffic(cached, data)
                if data.draw(st.booleans()):
                    prefixes.tend()
            for sequence in list(cached.tokens):
                cached.run(sequence)
        finally:
            prefixes.finish()
            kv.release()


def test_models_with_windows_take_no_part(machine):
    window = {0: KVLayer(KVKind.SLIDING, 2, 8, 8, window=5)}
    rings = SlidingWindowPages(window, 5, CHUNK, 10, F32, machine.pool)
    hot = PageStore(LAYERS, HOT, F32, machine.pool)
    kv = TieredKV(hot, None, None, [rings], KV_EVICTION["lru"], chunk=CHUNK)
    with pytest.raises(ConfigError, match="sliding window"):
        keep_prefixes(kv.allocator)
    kv.release()
