"""Cold pages that pass through a codec: what is read is what it makes of what was written."""

import pytest
import torch
from test_tiered import HOT, LAYERS, Machine, Texts

from hmt.base.errors import ConfigError
from hmt.base.trace import Tracer
from hmt.contracts.kv import COLD_BUFFERS
from hmt.contracts.model import PAGE_TOKENS
from hmt.contracts.plan import Tier
from hmt.contracts.step import Step
from hmt.engine.config import EngineConfig
from hmt.kernels import ops
from hmt.kvcache import TieredKV
from hmt.kvcache.book import Level
from hmt.kvcache.codecs import CODECS, Calibration, layer_codecs
from hmt.kvcache.cold import ColdPages, cold_bytes
from hmt.kvcache.opening import kv_sizes, open_tiered
from hmt.kvcache.policies import ORDERS
from hmt.kvcache.store import PageStore
from hmt.memory import HostPool, Ledger, PreadReader, TransferQueue
from hmt.planner import KVBudgets, KVSizes
from hmt.planner.levels import plan_levels

WHOLE = dict(enumerate(layer for layer in LAYERS if not layer.window))
NAMES = [*CODECS, "int8+residual", "int8-channel/int4+parts", "int8/sparse24"]


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    ledger = Ledger({Tier.HOST: 64 << 20})
    pool = HostPool(ledger.open(Tier.HOST, "kv", 64 << 20))
    queue = TransferQueue(PreadReader(), Tracer())
    yield Machine(tmp_path_factory.mktemp("kv"), queue, pool)
    queue.close()
    pool.close()


def coded_cache(machine, name, groups=8, piece_bytes=1):
    codecs = layer_codecs(name, WHOLE)
    cold = ColdPages(
        machine.folder, WHOLE, groups, ops.PageEncoding.F32, machine.pool, machine.queue,
        piece_bytes=piece_bytes, codecs=codecs,
    )  # fmt: skip
    hot = PageStore(WHOLE, HOT, ops.PageEncoding.F32, machine.pool)
    return TieredKV(hot, None, cold, [], ORDERS["lru"], chunk=48), codecs


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("piece_bytes", [1, 200_000], ids=["single groups", "several at once"])
def test_what_was_cold_is_what_the_codec_makes_of_it(machine, name, piece_bytes):
    cache, codecs = coded_cache(machine, name, piece_bytes=piece_bytes)
    layers = tuple(WHOLE.values())
    tokens = (HOT + 100) * PAGE_TOKENS
    text = cache.open(tokens)
    random = torch.Generator().manual_seed(1)
    rows = [torch.randn(tokens, k.heads, k.key_dim + k.value_dim, generator=random) for k in layers]
    for start in range(0, tokens, 48):
        count = min(48, tokens - start)
        step = Step.build([(text, start, [0] * count, 1)])
        for index, layer, numbers in zip(WHOLE, layers, rows, strict=True):
            part = numbers[start : start + count]
            key, value = part.split([layer.key_dim, layer.value_dim], -1)
            cache.append(index, step, key, value if layer.kind != "latent" else None)
    cold = cache._places.book.level_of(cache._sequences[text].pages) == Level.COLD
    assert 80 < cold.sum() < 128
    far = torch.from_numpy(cold).repeat_interleave(PAGE_TOKENS)
    [run] = Step.build([(text, tokens - 1, [0], 1)]).runs
    for index, layer, numbers in zip(WHOLE, layers, rows, strict=True):
        key, value = numbers.split([layer.key_dim, layer.value_dim], -1)
        wanted = codecs[index].decode(codecs[index].encode(key, value), torch.float32)
        if layer.kind == "latent":
            value = key[..., : layer.value_dim]
        for found, kept, coded in zip(cache.read(index, run), (key, value), wanted, strict=True):
            assert torch.equal(found[~far], kept[~far])
            assert torch.equal(found[far], coded[far])
            assert not torch.equal(coded, kept)
    cache.release()


@pytest.mark.parametrize("name", ["int8+parts", "int8+shared-parts"])
def test_attention_goes_over_what_was_decoded(machine, name):
    cache, _ = coded_cache(machine, name)
    texts = Texts(cache, near=0.02, layers=tuple(WHOLE.values()))
    text = texts.open(1500)
    for _ in range(30):
        texts.step({text: 48})
    assert (cache._places.book.level_of(cache._sequences[text].pages) == Level.COLD).any()
    cache.release()


def test_an_empty_place_in_a_group_is_harmless(machine):
    """Pages of a group that was not filled hold no numbers, and are decoded with the others."""
    codecs = layer_codecs("int8+residual", WHOLE)
    cold = ColdPages(
        machine.folder, WHOLE, 2, ops.PageEncoding.F32, machine.pool, machine.queue,
        piece_bytes=1, codecs=codecs,
    )  # fmt: skip
    cold._bounce.tensor.fill_(255)
    store = PageStore(WHOLE, 4, ops.PageEncoding.F32, machine.pool)
    for pages, _ in store.kinds:
        pages.memory.zero_()
    slots = torch.tensor(cold.slots.take(3)).numpy()
    cold.take(slots, store, torch.tensor([2, 0, 1]))
    for index in WHOLE:
        for pages, [(entries, table)] in cold.pieces(index, [slots]):
            key, value = ops.read_pages(pages, 0, table, PAGE_TOKENS * len(entries))
            assert (key == 0).all() and (value == 0).all()
    cold.close()
    store.release()


@pytest.mark.parametrize("name", ["exact", "int8", "int8+shared-parts", *NAMES])
def test_plans_count_what_codecs_take(machine, name):
    sizes = KVSizes(**kv_sizes(LAYERS, torch.float32, "exact", name))
    budgets = KVBudgets(HOT * sizes.hot_page + (1 << 20), 0, None)
    levels = plan_levels(sizes, budgets, context=40000, most=40000, chunk=48, batch=1)
    assert levels.cold == name and levels.cold_groups > 0
    ledger = Ledger({Tier.HOST: 64 << 20})
    pool = HostPool(ledger.open(Tier.HOST, "kv", 64 << 20))
    cache = open_tiered(
        TieredKV, dict(enumerate(LAYERS)), levels, torch.float32, near=machine.pool, host=pool,
        folder=machine.folder, queue=machine.queue, order="a2cr", chunk=48,
    )  # fmt: skip
    assert cache._places.cold.nbytes == levels.cold_groups * sizes.cold_group
    passing = COLD_BUFFERS * levels.piece_bytes + sizes.kind_group
    assert sum(buffer.tensor.nbytes for buffer in taken(cache._places.cold)) == passing
    cache.release()
    pool.close()


def taken(cold):
    decoded = [] if cold._decoded is None else [cold._decoded]
    return [cold._bounce, *cold._buffers, *decoded]


def test_groups_are_padded_once_not_for_every_page():
    codecs = layer_codecs("int8+parts", WHOLE)
    whole, _, _ = cold_bytes(WHOLE, ops.PageEncoding.F32, codecs)
    numbers = sum(codec.group_bytes for codec in codecs.values())
    assert numbers <= whole < numbers + 4096 * len(WHOLE)


def test_options_name_codecs_of_the_drive(tmp_path):
    def chosen(given):
        return EngineConfig.resolve(kv_device_memory="1MiB", kv_quant=given).kv_quant

    assert chosen("INT8") == ("int8", "int8")
    assert chosen("exact,Int4") == ("exact", "int4")
    assert chosen("int8,int4+residual") == ("int8", "int4+residual")
    Calibration().write(tmp_path / "Scales.safetensors")
    static = f"int8-static@{tmp_path}/Scales.safetensors"
    assert chosen(f"exact,{static}") == ("exact", static)
    for wrong in ("int8+residual", "exact,int8,int4", ""):
        with pytest.raises(ConfigError, match="for the drive, which knows others"):
            chosen(wrong)
    with pytest.raises(ConfigError, match="no way to keep keys and values"):
        chosen("exact,int9")
