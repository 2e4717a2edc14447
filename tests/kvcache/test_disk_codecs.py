"""Cold pages that pass through a codec: what is read is what it makes of what was written."""

import numpy as np
import pytest
import torch
from test_tiered_cache import HOT, LAYERS, CachedSequences, Machine

from hmt.base.errors import ConfigError
from hmt.base.trace import Tracer
from hmt.base.units import round_up
from hmt.contracts.kv import DISK_BUFFERS
from hmt.contracts.model import PAGE_TOKENS
from hmt.contracts.plan import Tier
from hmt.contracts.step import Step
from hmt.engine.config import EngineConfig
from hmt.kernels import ops
from hmt.kvcache import TieredKV
from hmt.kvcache.codecs import CODECS, Calibration, layer_codecs
from hmt.kvcache.eviction import KV_EVICTION
from hmt.kvcache.offload.disk_layout import disk_bytes
from hmt.kvcache.offload.disk_pages import DiskPages
from hmt.kvcache.offload.factory import disk_formats_of, kv_sizes, open_tiered
from hmt.kvcache.page_store import PageStore
from hmt.kvcache.page_table import PageTier
from hmt.memory import HostPool, Ledger, PreadReader, ReadQueue
from hmt.planner import KVBudgets, KVTierSizes
from hmt.planner.placement.kv_tiers import plan_kv_tiers

WHOLE = dict(enumerate(layer for layer in LAYERS if not layer.window))
NAMES = [*CODECS, "int8+parts", "int8-channel/int4+parts", "int8/sparse24"]


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    ledger = Ledger({Tier.HOST: 64 << 20})
    pool = HostPool(ledger.open(Tier.HOST, "kv", 64 << 20))
    queue = ReadQueue(PreadReader(), Tracer())
    yield Machine(tmp_path_factory.mktemp("kv"), queue, pool)
    queue.close()
    pool.close()


def coded_cache(machine, name, groups=8, piece_bytes=1, order="lru"):
    forms = disk_formats_of(name, WHOLE, torch.float32)
    if "~" not in name:  # a codec also where an encoding is called so
        forms |= {"codecs": layer_codecs(name, WHOLE), "encoding": ops.PageEncoding.F32}
    cold = DiskPages(
        machine.folder, WHOLE, groups, pool=machine.pool, queue=machine.queue,
        chunk_bytes=piece_bytes, **forms,
    )  # fmt: skip
    hot = PageStore(WHOLE, HOT, ops.PageEncoding.F32, machine.pool)
    cache = TieredKV(hot, None, cold, [], KV_EVICTION[order], chunk=48, clock=lambda: 0.0)
    return cache, forms["codecs"]


def drawn_rows(tokens):
    """Random keys and values of a text: for each layer [tokens, heads, both dims]."""
    random = torch.Generator().manual_seed(1)
    return [
        torch.randn(tokens, k.heads, k.key_dim + k.value_dim, generator=random)
        for k in WHOLE.values()
    ]


def append(cache, text, rows, start, count):
    step = Step.build([(text, start, [0] * count, 1)])
    for (index, layer), numbers in zip(WHOLE.items(), rows, strict=True):
        part = numbers[start : start + count]
        key, value = part.split([layer.key_dim, layer.value_dim], -1)
        cache.append(index, step, key, value if layer.has_values else None)
    return step


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("piece_bytes", [1, 200_000], ids=["single groups", "several at once"])
def test_what_was_cold_is_what_the_codec_makes_of_it(machine, name, piece_bytes):
    cache, codecs = coded_cache(machine, name, piece_bytes=piece_bytes)
    layers = tuple(WHOLE.values())
    tokens = (HOT + 100) * PAGE_TOKENS
    text, rows = cache.allocator.open(tokens), drawn_rows(tokens)
    for start in range(0, tokens, 48):
        append(cache, text, rows, start, min(48, tokens - start))
    cold = cache._places.page_table.level_of(cache.allocator.sequences[text].pages) == PageTier.DISK
    assert 80 < cold.sum() < 128
    far = torch.from_numpy(cold).repeat_interleave(PAGE_TOKENS)
    [run] = Step.build([(text, tokens - 1, [0], 1)]).segments
    for index, layer, numbers in zip(WHOLE, layers, rows, strict=True):
        key, value = numbers.split([layer.key_dim, layer.value_dim], -1)
        wanted = codecs[index].decode(codecs[index].encode(key, value), torch.float32)
        if not layer.has_values:
            value = key[..., : layer.value_dim]
        for found, kept, coded in zip(cache.read(index, run), (key, value), wanted, strict=True):
            assert torch.equal(found[~far], kept[~far])
            assert torch.equal(found[far], coded[far])
            assert not torch.equal(coded, kept)
    cache.release()


@pytest.mark.parametrize(
    ("usual", "low", "piece_bytes"),
    [
        ("exact", "sparse24", 1),
        ("exact", "int8", 200_000),
        ("int8+parts", "sparse24-int8", 200_000),
        ("int8", "int4", 1),
    ],
)
def test_pages_of_little_attention_are_kept_in_fewer_bytes(machine, usual, low, piece_bytes):
    """Beside others of the same text and of the same group, which are not."""
    cache, _ = coded_cache(machine, f"{usual}~{low}@0.5", piece_bytes=piece_bytes, order="a2cr")
    tokens = (HOT + 110) * PAGE_TOKENS
    text, rows = cache.allocator.open(tokens), drawn_rows(tokens)
    policy, book = cache._places.policy, cache._places.page_table
    for start in range(0, tokens, 48):
        step = append(cache, text, rows, start, min(48, tokens - start))
        ids = cache.allocator.sequences[text].pages
        hardly = (np.arange(len(ids)) % 5 < 2) | (np.arange(len(ids)) > 50)
        for _ in range(3):
            policy.weighed(ids[hardly], np.zeros(hardly.sum()), 0.0)
    is_cold = book.level_of(ids) == PageTier.DISK
    slots = book.slots_of(ids)[is_cold]
    is_low = is_cold.copy()
    is_low[is_cold] = cache._places.stores.disk._is_low[slots]
    assert cache.account.low_pages == is_low.sum() and 80 < is_cold.sum() <= 128
    assert (is_low <= hardly).all()
    in_group = [is_low[is_cold][slots // 16 == group].sum() for group in np.unique(slots // 16)]
    assert {0 < count < 16 for count in in_group} == {True, False}, "some are mixed"

    read = 0
    for (index, layer), numbers in zip(WHOLE.items(), rows, strict=True):
        both = numbers.split([layer.key_dim, layer.value_dim], -1)
        wanted, page_bytes = [half.clone() for half in both], []
        for name, mask in ((usual, is_cold & ~is_low), (low, is_low)):
            if name == "exact":
                page_bytes.append(64 * layer.row_width)
                continue
            [codec] = layer_codecs(name, {index: layer}).values()
            there = torch.from_numpy(mask).repeat_interleave(PAGE_TOKENS)
            coded = codec.decode(codec.encode(*both), torch.float32)
            for kept, numbers_there in zip(wanted, coded, strict=True):
                kept[there] = numbers_there[there]
            page_bytes.append(codec.unit_bytes)
        if usual in ("exact", "int8"):  # read as they lie
            page_bytes[0] = round_up(page_bytes[0], 256)
        if not layer.has_values:
            wanted[1] = wanted[0][..., : layer.value_dim]
        for found, one in zip(cache.read(index, step.segments[0]), wanted, strict=True):
            assert torch.equal(found, one)
        if layer.kind == "index":  # which is read, and not attended to
            continue
        read += sum(
            round_up((16 - count) * page_bytes[0] + count * page_bytes[1], 4096)
            for count in in_group
        )
        query = torch.randn(len(step.token_ids), 4, layer.key_dim)
        out = cache.attend(index, step, query, scale=0.3)
        start = step.segments[0].start
        expected, _ = ops.attention(query, *wanted, start=start, scale=0.3)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    assert cache.account.disk_bytes == read
    cache.release()


@pytest.mark.parametrize("name", ["int8+parts", "int8+shared-parts"])
def test_attention_goes_over_what_was_decoded(machine, name):
    cache, _ = coded_cache(machine, name)
    cached = CachedSequences(cache, near=0.02, layers=tuple(WHOLE.values()))
    text = cached.open(1500)
    for _ in range(30):
        cached.step({text: 48})
    assert (
        cache._places.page_table.level_of(cache.allocator.sequences[text].pages) == PageTier.DISK
    ).any()
    cache.release()


def test_an_empty_place_in_a_group_is_harmless(machine):
    """Pages of a group that was not filled hold no numbers, and are decoded with the others."""
    codecs = layer_codecs("int8+parts", WHOLE)
    cold = DiskPages(
        machine.folder, WHOLE, 2, ops.PageEncoding.F32, machine.pool, machine.queue,
        chunk_bytes=1, codecs=codecs,
    )  # fmt: skip
    cold._bounce.tensor.fill_(255)
    store = PageStore(WHOLE, 4, ops.PageEncoding.F32, machine.pool)
    for pages, _ in store.kinds:
        pages.memory.zero_()
    slots = torch.tensor(cold.slots.take(3)).numpy()
    cold.write(slots, store, np.array([2, 0, 1])).result()
    for index in WHOLE:
        for pages, [(entries, table)] in cold.chunks(index, [slots]):
            key, value = ops.read_pages(pages, 0, table, PAGE_TOKENS * len(entries))
            assert (key == 0).all() and (value == 0).all()
    cold.close()
    store.release()


@pytest.mark.parametrize(
    "name", ["exact", "int8", "int8+shared-parts", "exact~sparse24@0.4", "int8~int4@0.4", *NAMES]
)
def test_plans_count_what_codecs_take(machine, name):
    sizes = KVTierSizes(**kv_sizes(dict(enumerate(LAYERS)), torch.float32, "exact", name))
    budgets = KVBudgets(HOT * sizes.device_page + (1 << 20), 0, None)
    levels = plan_kv_tiers(sizes, budgets, context=40000, most=40000, chunk=48, batch=1)
    assert levels.disk_format == name and levels.disk_groups > 0
    ledger = Ledger({Tier.HOST: 64 << 20})
    pool = HostPool(ledger.open(Tier.HOST, "kv", 64 << 20))
    cache = open_tiered(
        dict(enumerate(LAYERS)), levels, torch.float32,
        device_pool=machine.pool, host=pool,
        folder=machine.folder, queue=machine.queue, order="a2cr", chunk=48,
    )  # fmt: skip
    assert cache._places.stores.disk.nbytes == levels.disk_groups * sizes.disk_group
    passing = DISK_BUFFERS * levels.chunk_bytes + sizes.kind_group
    assert sum(buffer.tensor.nbytes for buffer in taken(cache._places.stores.disk)) == passing
    cache.release()
    pool.close()


def taken(cold):
    decoded = [] if cold._decoded is None else [cold._decoded]
    return [cold._bounce, *cold._buffers, *decoded]


def test_groups_are_padded_once_not_for_every_page():
    codecs = layer_codecs("int8+parts", WHOLE)
    whole, _, _ = disk_bytes(WHOLE, ops.PageEncoding.F32, codecs)
    numbers = sum(codec.group_bytes for codec in codecs.values())
    assert numbers <= whole < numbers + 4096 * len(WHOLE)


def test_options_name_codecs_of_the_drive(tmp_path):
    def chosen(given):
        return EngineConfig.resolve(kv_gpu_memory="1MiB", kv_quant=given).kv_quant

    assert chosen("INT8") == ("exact", "int8", "int8")
    assert chosen("exact,Int4") == ("exact", "exact", "int4")
    assert chosen("int8,int4+shared-parts") == ("exact", "int8", "int4+shared-parts")
    assert chosen("FP8") == ("fp8", "exact", "exact")
    assert chosen("fp8,int4") == ("exact", "fp8", "int4")
    assert chosen("fp8,exact,int4") == ("fp8", "exact", "int4")
    assert EngineConfig.resolve(kv_quant="fp8").kv_quant[0] == "fp8", "all may stay near"
    Calibration().write(tmp_path / "Scales.safetensors")
    static = f"int8-static@{tmp_path}/Scales.safetensors"
    assert chosen(f"exact,{static}") == ("exact", "exact", static)
    assert chosen("exact,INT8~int4")[1:] == ("exact", "int8~int4@0.3")
    for wrong in ("exact,int8~", "exact,int8~int4@2", "exact,int8+shared-parts~int4"):
        with pytest.raises(ConfigError, match=r"above 0 and at most 1|no way to keep"):
            chosen(wrong)
    with pytest.raises(ConfigError, match="choose a2cr"):
        EngineConfig.resolve(kv_gpu_memory="1MiB", kv_quant="int8,int8~int4", kv_eviction="lru")
    with pytest.raises(ConfigError, match="takes more bytes than int4"):
        disk_formats_of("int4~sparse24", WHOLE, torch.float32)
    for wrong in ("int8+parts", "int8,int8,int4", "fp8,exact,int4,int4", ""):
        with pytest.raises(ConfigError, match="for the disk, which knows others"):
            chosen(wrong)
    with pytest.raises(ConfigError, match="no way to keep keys and values"):
        chosen("exact,int9")
