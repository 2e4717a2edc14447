"""The tiered cache against plain tensors per sequence, wherever pages lie."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hmt.base.errors import BudgetError
from hmt.base.trace import Tracer
from hmt.contracts.kv import PinnedPages, min_device_pages, ring_pages
from hmt.contracts.model import MOST_DRAFTS, PAGE_TOKENS, KVKind, KVLayer
from hmt.contracts.plan import Tier
from hmt.contracts.step import Step
from hmt.kernels import ops
from hmt.kvcache import TieredKV
from hmt.kvcache.eviction import KV_EVICTION
from hmt.kvcache.offload.disk_pages import DiskPages
from hmt.kvcache.offload.sliding_window import SlidingWindowPages
from hmt.kvcache.offload.sparse_selection import ByScoreBound, Selection
from hmt.kvcache.page_store import PageStore
from hmt.kvcache.page_table import PageTier
from hmt.memory import HostPool, Ledger, PreadReader, ReadQueue
from hmt.memory.device import FakeDevice

LAYERS = (
    KVLayer(KVKind.FULL, 2, 8, 8),
    KVLayer(KVKind.SLIDING, 2, 8, 8, window=5),
    KVLayer(KVKind.FULL, 2, 8, 8),
    KVLayer(KVKind.SLIDING, 2, 8, 8, window=37),
    KVLayer(KVKind.LATENT, 1, 16, 8),
    KVLayer(KVKind.INDEX, 1, 16, 16),
)
CHUNK, SEQUENCES = 48, 4
HOT = min_device_pages(CHUNK, SEQUENCES, PinnedPages())
F32 = ops.PageEncoding.F32


@dataclass
class Machine:
    """Memory and a disk for caches."""

    folder: Path
    queue: ReadQueue
    pool: HostPool

    def cache(
        self,
        hot=HOT,
        warm=0,
        cold=0,
        far=F32,
        policy="a2cr",
        layers=LAYERS,
        selection=None,
        device=None,
    ):
        full = {i: layer for i, layer in enumerate(layers) if not layer.window}
        windows = {layer.window for layer in layers if layer.window}
        made = TieredKV(
            PageStore(full, hot, F32, self.pool),
            PageStore(full, warm, far, self.pool) if warm else None,
            DiskPages(self.folder, full, cold, far, self.pool, self.queue, chunk_bytes=1)
            if cold
            else None,
            [
                SlidingWindowPages(
                    {i: layer for i, layer in enumerate(layers) if layer.window == window},
                    window, CHUNK, SEQUENCES * ring_pages(window, CHUNK), F32, self.pool,
                )
                for window in sorted(windows)
            ],
            KV_EVICTION[policy],
            chunk=CHUNK,
            selection=selection,
            device=device,
        )  # fmt: skip
        return made


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    ledger = Ledger({Tier.HOST: 64 << 20})
    pool = HostPool(ledger.open(Tier.HOST, "kv", 64 << 20))
    queue = ReadQueue(PreadReader(), Tracer())
    made = Machine(tmp_path_factory.mktemp("kv"), queue, pool)
    yield made
    queue.close()
    pool.close()


class CachedSequences:
    """What each sequence of a cache should hold, and steps that check it."""

    def __init__(
        self, cache: TieredKV, seed: int = 0, near: float = 1e-5, layers: tuple = LAYERS
    ) -> None:
        self.cache, self.near, self.layers = cache, near, layers
        self.random = torch.Generator().manual_seed(seed)
        self.rows: dict[int, list[torch.Tensor]] = {}  # by sequence: [tokens, heads, 2 dims]

    def randn(self, *shape):
        return torch.randn(shape, generator=self.random)

    def open(self, tokens: int) -> int:
        sequence = self.cache.allocator.open(tokens)
        self.rows[sequence] = [
            torch.zeros(0, k.heads, k.key_dim + k.value_dim) for k in self.layers
        ]
        return sequence

    def fork(self, sequence: int, held: int, tokens: int) -> int:
        forked = self.cache.allocator.fork(sequence, held, tokens)
        self.rows[forked] = [rows[:held] for rows in self.rows[sequence]]
        return forked

    def close(self, sequence: int) -> None:
        self.cache.allocator.close(sequence)
        del self.rows[sequence]

    def length(self, sequence: int) -> int:
        return len(self.rows[sequence][0])

    def step(self, counts: dict[int, int], wrong: dict[int, int] | None = None) -> None:
        """`wrong`: how many of the last tokens were wrong drafts, which are taken back."""
        step = Step.build((s, self.length(s), [0] * n, 1) for s, n in counts.items())
        tokens = len(step.token_ids)
        for index, layer in enumerate(self.layers):
            query = self.randn(tokens, 4, layer.key_dim)
            key = self.randn(tokens, layer.heads, layer.key_dim)
            value = self.randn(tokens, layer.heads, layer.value_dim)
            if not layer.has_values:
                value = key[..., : layer.value_dim]
            kept = value if layer.has_values else None
            sinks = self.randn(4) if index == 2 else None
            self.cache.append(index, step, key, kept)
            for run in step.segments:
                rows = self.rows[run.sequence]
                rows[index] = torch.cat((rows[index], torch.cat((key, value), -1)[run.tokens]))
            if layer.kind is KVKind.INDEX:
                continue  # which is read and gathered, and not attended to
            out = self.cache.attend(index, step, query, scale=0.3, softcap=5.0, sinks=sinks)
            for run in step.segments:
                rows = self.rows[run.sequence]
                keys, values = rows[index].split([layer.key_dim, layer.value_dim], -1)
                wanted, _ = ops.attention(
                    query[run.tokens], keys, values, start=run.start, scale=0.3,
                    window=layer.window, softcap=5.0, sinks=sinks,
                )  # fmt: skip
                error = (out[run.tokens] - wanted).norm() / wanted.norm()
                assert error <= self.near, (index, run, float(error))
        for sequence, count in (wrong or {}).items():
            left = self.length(sequence) - count
            self.cache.allocator.rollback(sequence, left)
            self.rows[sequence] = [rows[:left] for rows in self.rows[sequence]]

    def read(self, sequence: int) -> None:
        [run] = Step.build([(sequence, self.length(sequence) - 1, [0], 1)]).segments
        for index, layer in enumerate(self.layers):
            seen = slice(-layer.window, None)
            keys, values = self.cache.read(index, run)
            wanted = self.rows[sequence][index][seen]
            assert torch.equal(torch.cat((keys, values), -1)[seen], wanted)
            if not layer.window:
                chosen = torch.rand(self.length(sequence), generator=self.random) < 0.3
                positions = chosen.nonzero().flatten()
                found = self.cache.gather(index, run, positions)
                assert torch.equal(found[0], keys[positions])
                assert torch.equal(found[1], values[positions])


@pytest.mark.parametrize(
    ("warm", "cold"), [(0, 0), (120, 0), (0, 8), (16, 8), (5, 8)], ids=lambda n: str(n)
)
@settings(max_examples=8, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_attention_does_not_depend_on_where_pages_lie(machine, warm, cold, data, seed):
    device = FakeDevice() if data.draw(st.booleans()) else None  # pages are written back late
    cache = machine.cache(warm=warm, cold=cold, device=device)
    try:
        cached = CachedSequences(cache, seed)
        free = cache.allocator.free_tokens
        for _ in range(data.draw(st.integers(1, 16))):
            _some_step(cached, data)
        for sequence in list(cached.rows):
            if cached.length(sequence):
                cached.read(sequence)
            cached.close(sequence)
        assert cache.allocator.free_tokens == free
    finally:
        cache.release()


def _some_step(cached, data):
    """Sequences come, fork, grow by some tokens, wait, reserve more or less, and go.

    Some of their tokens are drafts, of which some are taken back.
    """
    cache = cached.cache
    tokens = data.draw(st.sampled_from([0, 1, 100, 400, 900]))
    pages = -(-tokens // PAGE_TOKENS)
    if (
        tokens
        and len(cached.rows) < SEQUENCES
        and pages * PAGE_TOKENS <= cache.allocator.free_tokens
    ):
        cached.open(tokens)
    _some_fork(cached, data)
    counts, wrong, budget = {}, {}, CHUNK
    for sequence, held in cache.allocator.sequences.items():
        _other_room(cached, data, sequence)
        if held.parked:
            continue
        room = (len(held.pages) + held.unmade) * PAGE_TOKENS - cached.length(sequence)
        count = min(room, data.draw(st.sampled_from([0, 1, 5, CHUNK])), max(1, budget))
        if count:
            counts[sequence] = count
            wrong[sequence] = data.draw(st.integers(0, min(count - 1, MOST_DRAFTS)))
            budget -= count - 1
    if counts:
        cached.step(counts, wrong)
    if cached.rows and data.draw(st.integers(0, 9)) == 0:
        cached.close(data.draw(st.sampled_from(sorted(cached.rows))))


def _some_fork(cached, data):
    """Perhaps another sequence with all that one of them holds; one of the two may end at once."""
    running = [s for s, held in cached.cache.allocator.sequences.items() if not held.parked]
    if not running or len(cached.rows) >= SEQUENCES or not data.draw(st.booleans()):
        return
    sequence = data.draw(st.sampled_from(running))
    held = cached.length(sequence)
    tokens = held + data.draw(st.sampled_from([1, 20, 100]))
    if cached.cache.allocator.can_fork(sequence, held, tokens):
        forked = cached.fork(sequence, held, tokens)
        if data.draw(st.booleans()):
            cached.close(data.draw(st.sampled_from([sequence, forked])))


def _other_room(cached, data, sequence):
    """Another reservation; what is told beforehand is what happens."""
    cache, length = cached.cache, cached.length(sequence)
    tokens = length + data.draw(st.sampled_from([0, 1, 40, 300]))
    free, held = cache.allocator.free_tokens, cache.allocator.sequences[sequence]
    what = data.draw(st.sampled_from(["grow", "shrink", "park", "nothing", "nothing"]))
    if held.parked or what == "grow":
        able, change = (
            (cache.allocator.can_resume, cache.allocator.resume)
            if held.parked
            else (cache.allocator.can_grow, cache.allocator.grow)
        )
        if able(sequence, tokens):
            change(sequence, tokens)
            assert len(held.pages) + held.unmade >= -(-tokens // PAGE_TOKENS)
        else:
            with pytest.raises(BudgetError, match="are free"):
                change(sequence, tokens)
            assert cache.allocator.free_tokens == free
    elif what == "shrink":
        cache.allocator.shrink(sequence, tokens)
        assert (len(held.pages) + held.unmade) * PAGE_TOKENS >= length
        assert cache.allocator.free_tokens >= free
    elif what == "park" and cache.allocator.can_park():
        cache.allocator.park(sequence)


@pytest.mark.parametrize("policy", KV_EVICTION)
def test_a_long_text_goes_through_all_levels(machine, policy):
    cache = machine.cache(warm=20, cold=6, policy=policy)
    cached = CachedSequences(cache)
    text = cached.open((HOT + 20 + 6 * 16) * PAGE_TOKENS)
    while cached.length(text) < cache.allocator.capacity_tokens:
        cached.step({text: min(CHUNK, cache.allocator.capacity_tokens - cached.length(text))})
    levels = cache._places.page_table.level_of(cache.allocator.sequences[text].pages)
    assert set(levels) == set(PageTier)
    assert levels[0] == PageTier.DEVICE, "the first page never leaves"
    assert (levels[-4:] == PageTier.DEVICE).all(), "nor do the last"
    assert cache.account.moved["near to host"] >= 20
    assert cache.account.peak["disk"] == 6 * 16
    cached.read(text)
    with pytest.raises(BudgetError, match="--kv-host-memory"):
        cache.allocator.open(1)
    cached.close(text)
    cache.release()


@pytest.mark.parametrize("policy", KV_EVICTION)
def test_pages_are_written_back_before_their_room_is_needed(machine, policy):
    device = FakeDevice()
    cache = machine.cache(warm=100, device=device, policy=policy)
    cached = CachedSequences(cache)
    text, other = cached.open((HOT + 80) * PAGE_TOKENS), cached.open(64)
    cached.step({other: 5})
    early = 0
    while cached.length(text) < (HOT + 80) * PAGE_TOKENS:
        leaving = cache._places.queue.to_host
        if leaving is not None:
            before = dict(cache.account.moved)
            device.synchronize()
            leaving.written.exception()
            cached.step({text: 1})
            gone = cache.account.moved.get("near to host", 0) - before.get("near to host", 0)
            assert gone == len(leaving.ids), "what was written is gone with the next step"
            early += 1
        room = (HOT + 80) * PAGE_TOKENS - cached.length(text)
        cached.step({text: min(room, 7)})
    assert early > 3
    cached.read(text)
    cached.close(other)  # while some are on their way
    cached.read(text)
    cached.close(text)
    assert cache.allocator.free_tokens == cache.allocator.capacity_tokens
    cache.release()


def test_forks_share_pages_and_do_not_disturb_each_other(machine):
    cache = machine.cache(warm=40, cold=6)
    cached = CachedSequences(cache, seed=3)
    first = cached.open(1200)
    for _ in range(20):
        cached.step({first: 41})
    free = cache.allocator.free_tokens
    held = cached.length(first)
    second = cached.fork(first, held, held + 300)
    assert free - cache.allocator.free_tokens == 16 * (-(-(held + 300) // 16) - held // 16)
    third = cached.fork(second, held, held + 400)
    for _ in range(40):
        cached.step({first: 1, second: 4, third: 6})
    cached.close(first)
    for _ in range(10):
        cached.step({second: 1, third: 7})
    cached.read(second)
    cached.read(third)
    cached.close(second)
    cached.close(third)
    assert cache.allocator.free_tokens == cache.allocator.capacity_tokens
    cache.release()


def test_a_fork_may_begin_anywhere_where_no_layer_forgets(machine):
    layers = tuple(layer for layer in LAYERS if not layer.window)
    cache = machine.cache(warm=40, cold=6, layers=layers)
    cached = CachedSequences(cache, seed=4, layers=layers)
    first = cached.open(1200)
    for _ in range(20):
        cached.step({first: 41})
    second = cached.fork(first, 130, 400)
    for _ in range(40):
        cached.step({first: 3, second: 6})
    cached.read(first)
    cached.read(second)
    cache.release()


@pytest.mark.parametrize("encoding", [ops.PageEncoding.INT8, ops.PageEncoding.INT4])
def test_far_pages_may_have_fewer_bits(machine, encoding):
    near = {ops.PageEncoding.INT8: 0.02, ops.PageEncoding.INT4: 0.3}[encoding]
    cache = machine.cache(warm=20, cold=6, far=encoding)
    cached = CachedSequences(cache, near=near)
    text = cached.open(1500)
    for _ in range(30):
        cached.step({text: CHUNK})
    cache.release()


def test_a_share_of_one_leaves_nothing_out(machine):
    choose = lambda places: Selection(1.0, ByScoreBound(places, machine.pool))  # noqa: E731
    cache = machine.cache(warm=20, cold=6, selection=choose)
    cached = CachedSequences(cache)
    text = cached.open(1200)
    for count in [CHUNK] * 20 + [1] * 20:
        cached.step({text: count})
    cache.release()


def test_what_matters_is_found_among_a_few_pages(machine):
    """One key stands out, far back: with 5 % of the pages the answer is nearly its value."""
    layers = (KVLayer(KVKind.FULL, 2, 8, 8),)
    choose = lambda places: Selection(0.05, ByScoreBound(places, machine.pool))  # noqa: E731
    cache = machine.cache(warm=20, cold=6, layers=layers, selection=choose)
    random, text, held = torch.Generator().manual_seed(1), cache.allocator.open(1900), 0
    needle, value = torch.randn(2, 8, generator=random), torch.randn(2, 8, generator=random)
    for start in range(0, 1824, CHUNK):
        key = 0.1 * torch.randn(CHUNK, 2, 8, generator=random)
        values = torch.randn(CHUNK, 2, 8, generator=random)
        if start == 20 * CHUNK:
            key[7], values[7] = 4 * needle, value
        step = Step.build([(text, start, [0] * CHUNK, 1)])
        cache.append(0, step, key, values)
        cache.attend(0, step, torch.zeros(CHUNK, 4, 8), scale=1.0)
        held = start + CHUNK
    step = Step.build([(text, held, [0], 1)])
    cache.append(0, step, torch.zeros(1, 2, 8), torch.zeros(1, 2, 8))
    query = needle.repeat_interleave(2, 0)[None]
    out = cache.attend(0, step, query, scale=1.0)
    torch.testing.assert_close(out[0], value.repeat_interleave(2, 0), atol=0.2, rtol=0)
    nothing = cache.attend(0, step, -query, scale=1.0)
    assert nothing.isfinite().all()
    cache.release()


def test_pages_that_are_attended_to_stay_near(machine):
    """A2CR keeps the page that every token looks at, though it is old; others go."""
    layers = (KVLayer(KVKind.FULL, 2, 8, 8),)
    cache = machine.cache(warm=120, layers=layers)
    text, needle = cache.allocator.open(120 * 16), torch.ones(2, 8)
    for start in range(0, 110 * 16):
        key = needle * (5.0 if start == 5 * 16 else 0.0)
        step = Step.build([(text, start, [0], 1)])
        cache.append(0, step, key[None], key[None])
        cache.attend(0, step, torch.ones(1, 4, 8), scale=1.0)
    book = cache._places.page_table
    levels = book.level_of(cache.allocator.sequences[text].pages)
    assert levels[5] == PageTier.DEVICE
    assert (levels[1:30] != PageTier.DEVICE).sum() > 20
    cache.release()
