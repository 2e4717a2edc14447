"""The paged cache against plain tensors per sequence."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hmt.base.errors import BudgetError
from hmt.contracts.model import PAGE_TOKENS, KVKind, KVLayer
from hmt.contracts.plan import Tier
from hmt.contracts.step import Step
from hmt.kernels import ops
from hmt.kvcache import PagedKV, page_bytes
from hmt.kvcache.page_layout import layout_of
from hmt.memory import HostPool, Ledger

LAYERS = (
    KVLayer(KVKind.FULL, 2, 8, 8),
    KVLayer(KVKind.SLIDING, 2, 8, 8, window=5),
    KVLayer(KVKind.FULL, 2, 8, 8),
    KVLayer(KVKind.SLIDING, 2, 8, 8, window=37),
    KVLayer(KVKind.LATENT, 1, 12, 8),
)


def make_cache(tokens: int, dtype: torch.dtype = torch.float32) -> PagedKV:
    nbytes = -(-tokens // PAGE_TOKENS) * page_bytes(LAYERS, dtype)
    ledger = Ledger({Tier.HOST: nbytes + 4096})
    return PagedKV(LAYERS, tokens, dtype, HostPool(ledger.open(Tier.HOST, "kv", nbytes + 4096)))


@settings(max_examples=40, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_mixed_batches_attend_as_if_alone(data: st.DataObject, seed: int) -> None:
    torch.manual_seed(seed)
    cache = make_cache(400)
    lengths: dict[int, int] = {}
    rows: dict[tuple[int, int], list[torch.Tensor]] = {}
    for _ in range(data.draw(st.integers(1, 8))):
        if not lengths or (len(lengths) < 4 and data.draw(st.booleans())):
            lengths[cache.allocator.open(90)] = 0
        chosen = data.draw(st.lists(st.sampled_from(sorted(lengths)), min_size=1, unique=True))
        parts, wrong = [], {}  # of the last tokens, how many are drafts that are taken back
        for sequence in chosen:
            room = 90 - lengths[sequence]
            if room:
                count = data.draw(st.integers(1, min(room, 40)))
                parts.append((sequence, lengths[sequence], [0] * count, 1))
                wrong[sequence] = data.draw(st.integers(0, count - 1))
                lengths[sequence] += count - wrong[sequence]
        if not parts:
            continue
        step = Step.build(parts)
        for index, layer in enumerate(LAYERS):
            tokens = len(step.token_ids)
            query = torch.randn(tokens, 4, layer.key_dim)
            key = torch.randn(tokens, layer.heads, layer.key_dim)
            latent = layer.kind is KVKind.LATENT
            value = None if latent else torch.randn(tokens, layer.heads, layer.value_dim)
            cache.append(index, step, key, value)
            out = cache.attend(index, step, query, scale=0.3)
            for run in step.segments:
                kept = rows.setdefault((run.sequence, index), [])
                kept.append(torch.cat([key, key if value is None else value], -1)[run.tokens])
                context = torch.cat(kept)
                all_keys = context[..., : layer.key_dim]
                all_values = context[..., layer.key_dim :][..., : layer.value_dim]
                expected, _ = ops.attention(
                    query[run.tokens],
                    all_keys,
                    all_values,
                    start=run.start,
                    scale=0.3,
                    window=layer.window,
                )
                torch.testing.assert_close(out[run.tokens], expected, rtol=1e-5, atol=1e-5)
                read_keys, read_values = cache.read(index, run)
                assert torch.equal(read_keys, all_keys)
                assert torch.equal(read_values, all_values)
                right = run.length - wrong[run.sequence]
                kept[-1] = kept[-1][:right]
        for sequence in wrong:
            cache.allocator.rollback(sequence, lengths[sequence])


@given(st.lists(st.integers(1, 120), max_size=30), st.randoms(use_true_random=False))
def test_pages_are_neither_shared_nor_lost(sizes: list[int], random) -> None:
    cache = make_cache(320)
    open_sequences: dict[int, int] = {}
    for size in sizes:
        pages = -(-size // PAGE_TOKENS)
        if pages * PAGE_TOKENS > cache.allocator.free_tokens:
            with pytest.raises(BudgetError, match="are free"):
                cache.allocator.open(size)
            if open_sequences:
                victim = random.choice(sorted(open_sequences))
                cache.allocator.close(victim)
                del open_sequences[victim]
        else:
            open_sequences[cache.allocator.open(size)] = pages
        used = sum(open_sequences.values()) * PAGE_TOKENS
        assert cache.allocator.free_tokens == cache.allocator.capacity_tokens - used
        owned = [page for s in open_sequences for page in cache.allocator.sequences[s].pages]
        assert len(owned) == len(set(owned))


def test_pages_lie_in_words_for_the_host_and_in_rows_for_a_device() -> None:
    for layer in LAYERS:
        in_words = layout_of(layer, ops.PageEncoding.BF16, torch.device("cpu"))
        in_rows = layout_of(layer, ops.PageEncoding.BF16, torch.device("cuda", 0))
        assert not in_words.rows and in_rows.rows
        assert in_words.page_bytes == in_rows.page_bytes
    cache = make_cache(100)
    assert not any(cache.kernel_pages(index)[0].layout.rows for index in range(len(LAYERS)))


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_forks_are_what_a_plain_copy_would_be(data: st.DataObject) -> None:
    """Sequences come, fork anywhere, grow and go; pages are shared, and none is lost."""
    layers = LAYERS[::2]
    cache = PagedKV(layers, 640, torch.float32, _pool(640, layers))
    plain: dict[int, list[torch.Tensor]] = {}
    rooms: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 20))):
        what = data.draw(st.sampled_from(["open", "fork", "room", "grow", "grow", "close"]))
        tokens = data.draw(st.integers(1, 200))
        one = data.draw(st.sampled_from(sorted(plain))) if plain else 0
        if what == "open" and cache.allocator.can_open(tokens):
            new = cache.allocator.open(tokens)
            plain[new], rooms[new] = [torch.zeros(0, k.heads, k.key_dim) for k in layers], tokens
        elif what == "fork" and one:
            held = data.draw(st.integers(0, len(plain[one][0])))
            tokens += held
            free = cache.allocator.free_tokens
            pages = -(-tokens // PAGE_TOKENS) - held // PAGE_TOKENS
            assert cache.allocator.can_fork(one, held, tokens) == (pages * PAGE_TOKENS <= free)
            if not cache.allocator.can_fork(one, held, tokens):
                with pytest.raises(BudgetError):
                    cache.allocator.fork(one, held, tokens)
                assert cache.allocator.free_tokens == free
                continue
            new = cache.allocator.fork(one, held, tokens)
            plain[new], rooms[new] = [rows[:held] for rows in plain[one]], tokens
            assert cache.allocator.free_tokens == free - pages * PAGE_TOKENS
        elif what == "room" and one:
            length, free = len(plain[one][0]), cache.allocator.free_tokens
            pages = -(-tokens // PAGE_TOKENS)
            more = pages - len(cache.allocator.sequences[one].pages)
            assert cache.allocator.can_grow(one, tokens) == (
                more <= 0 or more * PAGE_TOKENS <= free
            )
            if not cache.allocator.can_grow(one, tokens):
                with pytest.raises(BudgetError):
                    cache.allocator.grow(one, tokens)
                assert cache.allocator.free_tokens == free
                continue
            cache.allocator.grow(one, tokens)
            assert cache.allocator.free_tokens == free - max(0, more) * PAGE_TOKENS
            rooms[one] = max(rooms[one], tokens)
            if data.draw(st.booleans()):  # it was not needed after all
                cache.allocator.shrink(one, length)
                rooms[one] = length
        elif what == "grow" and one and (room := rooms[one] - len(plain[one][0])):
            count = min(room, tokens)
            step = Step.build([(one, len(plain[one][0]), [0] * count, 1)])
            for index, layer in enumerate(layers):
                key = torch.randn(count, layer.heads, layer.key_dim)
                value = None if layer.kind is KVKind.LATENT else key[..., : layer.value_dim]
                cache.append(index, step, key, value)
                plain[one][index] = torch.cat((plain[one][index], key))
        elif what == "close" and one:
            cache.allocator.close(one)
            del plain[one], rooms[one]
        for sequence, rows in plain.items():
            if held := len(rows[0]):
                [run] = Step.build([(sequence, held - 1, [0], 1)]).segments
                for index in range(len(layers)):
                    assert torch.equal(cache.read(index, run)[0], rows[index])
    for sequence in plain:
        cache.allocator.close(sequence)
    assert cache.allocator.free_tokens == cache.allocator.capacity_tokens


def _pool(tokens: int, layers: tuple[KVLayer, ...]) -> HostPool:
    nbytes = tokens // PAGE_TOKENS * page_bytes(layers, torch.float32) + 4096
    return HostPool(Ledger({Tier.HOST: nbytes}).open(Tier.HOST, "kv", nbytes))
