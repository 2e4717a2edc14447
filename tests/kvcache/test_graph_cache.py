"""Decoding steps over several levels, with a device's part and the CPU's: the definition."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hmt.base.trace import Tracer
from hmt.contracts.kv import PinnedPages, min_device_pages, ring_pages
from hmt.contracts.model import KVKind, KVLayer
from hmt.contracts.plan import Tier
from hmt.contracts.step import Segment, Step
from hmt.kernels import backend_registry, graph_ops, ops, reference
from hmt.kvcache import GraphKVCache, TieredKV, page_store
from hmt.kvcache.eviction import KV_EVICTION
from hmt.kvcache.offload.disk_pages import DiskPages
from hmt.kvcache.offload.page_migration import PageMigration
from hmt.kvcache.offload.sliding_window import SlidingWindowPages
from hmt.kvcache.offload.sparse_selection import ByScoreBound, Selection
from hmt.kvcache.page_layout import layout_of
from hmt.kvcache.page_store import PageStore
from hmt.kvcache.page_table import PageTier
from hmt.memory import HostPool, Ledger, PreadReader, ReadQueue
from hmt.memory.device import Device, DevicePool, InlineRecorder, open_device

LAYERS = (
    KVLayer(KVKind.FULL, 2, 16, 16),
    KVLayer(KVKind.SLIDING, 2, 16, 16, window=37),
    KVLayer(KVKind.LATENT, 1, 48, 32),
    KVLayer(KVKind.FULL, 2, 16, 16),
)
FULL = {i: layer for i, layer in enumerate(LAYERS) if not layer.window}
CHUNK, SEQUENCES, STAGED = 64, 2, 6
HOT = min_device_pages(CHUNK, SEQUENCES, PinnedPages())
CONTEXT = 1100


def plain_rows(layer: KVLayer, encoding: ops.PageEncoding, where: torch.device) -> ops.PageLayout:
    """As pages lie on a GPU."""
    return replace(layout_of(layer, encoding, where), rows=True)


def use_kernels_for_gpus() -> Callable[[], None]:
    """Let pages of plain rows be a GPU's, whose kernels run in Triton's interpreter.

    Returns what ends that.
    """
    operations = pytest.importorskip("hmt.kernels.triton.operations")
    before = backend_registry.register(
        "cpu", lambda: backend_registry.Backend("Triton's interpreter", operations, on_host=True)
    )
    assert before is not None
    return partial(backend_registry.register, "cpu", before)


class Setting:
    """A device, memory of both sides, and a disk."""

    def __init__(self, name: str, folder: Path, stack: ExitStack) -> None:
        self.interpreted = name == "interpreted"
        if self.interpreted:
            stack.callback(use_kernels_for_gpus())
            name = "fake"
        self.device: Device = open_device(name)
        self.folder = folder
        stack.callback(self.device.close)
        ledger = Ledger({Tier.HOST: 64 << 20, Tier.DEVICE: 64 << 20})
        self.host = HostPool(ledger.open(Tier.HOST, "kv", 32 << 20))
        stack.callback(self.host.close)
        self.near = DevicePool(self.device, ledger.open(Tier.DEVICE, "kv", 32 << 20))
        stack.callback(self.near.close)
        self.queue = ReadQueue(PreadReader(), Tracer())
        stack.callback(self.queue.close)
        [pinned] = self.host.pin(lambda: None)
        memory = torch.frombuffer(pinned, dtype=torch.uint8)
        assert self.device.pin(memory)
        stack.callback(self.device.unpin, memory)

    def cache(
        self, far: ops.PageEncoding, warm: int, cold: int, share: float | None = None
    ) -> TieredKV:
        """`share`: of the pages that decoding tokens attend to."""

        def choose(places: PageMigration) -> Selection:
            assert share is not None
            return Selection(share, ByScoreBound(places, self.host))

        exact = ops.PageEncoding.F32
        windows, pages = {1: LAYERS[1]}, SEQUENCES * ring_pages(37, CHUNK)
        with pytest.MonkeyPatch.context() as patch:
            if self.interpreted:
                patch.setattr(page_store, "layout_of", plain_rows)
            hot = PageStore(FULL, HOT, exact, self.near, staged=STAGED)
            rings = SlidingWindowPages(windows, 37, CHUNK, pages, exact, self.near)
        return TieredKV(
            hot,
            PageStore(FULL, warm, far, self.host, pinned=True) if warm else None,
            DiskPages(self.folder, FULL, cold, far, self.host, self.queue, chunk_bytes=1)
            if cold
            else None,
            [rings],
            KV_EVICTION["a2cr"],
            chunk=CHUNK,
            device=self.device,
            selection=None if share is None else choose,
        )


@pytest.fixture(
    scope="module",
    params=["fake", "interpreted", pytest.param("cuda:0", marks=pytest.mark.gpu)],
)
def setting(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    with ExitStack() as stack:
        yield Setting(request.param, tmp_path_factory.mktemp("kv"), stack)


class CachedSequences:
    """What each sequence should hold, and steps that are compared with attention to that."""

    def __init__(self, setting: Setting, kv: TieredKV) -> None:
        self.kv, self.device = kv, setting.device
        self.slow = setting.interpreted  # what others test is left out
        self.stepped = GraphKVCache(kv, setting.device)
        self.random = torch.Generator().manual_seed(4)
        self.rows: dict[int, list[torch.Tensor]] = {}
        self.fixed: dict[int, ops.AttentionMetadata | None] = {}
        self.hidden = 0  # pages that were left out

    def open(self, tokens: int) -> int:
        sequence = self.kv.allocator.open(tokens)
        self.rows[sequence] = [torch.zeros(0, k.heads, k.key_dim + k.value_dim) for k in LAYERS]
        return sequence

    def length(self, sequence: int) -> int:
        return len(self.rows[sequence][0])

    def step(self, counts: dict[int, int], *, stepped: bool, near: float) -> bool:
        """One step; whether some of its pages were apart."""
        step = Step.build((s, self.length(s), [0] * n, 1) for s, n in counts.items())
        tokens, apart, cache = len(step.token_ids), False, self.kv
        if stepped:
            apart, cache = self.stepped.begin(step), self.stepped  # type: ignore[assignment]
            if tokens not in self.fixed:
                self.fixed[tokens] = graph_ops.fixed_runs(self.device.where, tokens, HOT * 16)
            if (runs := self.fixed[tokens]) is not None:
                graph_ops.fill_runs(runs, self.stepped.attention_metadata(step))
            self.stepped.hold(step, runs)
        with ExitStack() as stack:
            if apart:
                stack.enter_context(self.stepped.recording(InlineRecorder()))
            for index, layer in enumerate(LAYERS):
                self._layer(index, layer, step, cache, near)
        if stepped:
            self.stepped.ended()
        return apart

    def _layer(self, index: int, layer: KVLayer, step: Step, cache: Any, near: float) -> None:
        shapes = ((4, layer.key_dim), (layer.heads, layer.key_dim), (layer.heads, layer.value_dim))
        tokens = len(step.token_ids)
        query, key, value = (torch.randn(tokens, *s, generator=self.random) for s in shapes)
        latent = layer.kind is KVKind.LATENT
        if latent:
            value = key[..., : layer.value_dim]
        sinks = torch.randn(4, generator=self.random) if index == 3 else None
        q, k, v, s = (
            None if x is None else x.to(self.device.where) for x in (query, key, value, sinks)
        )
        options: dict[str, Any] = {"scale": 0.3, "softcap": 5.0}
        if latent or index == 3 or (self.slow and cache is self.kv):
            cache.append(index, step, k, None if latent else v)
            if self.slow and cache is self.kv:
                self._keep(index, step, key, value)
                return
            out = cache.attend(index, step, q, sinks=s, **options)
        else:
            assert q is not None and k is not None and v is not None
            heads = torch.cat((q, k, v), 1)
            out = cache.append_attend(index, step, heads, **options).view(tokens, 4, -1)
        self._keep(index, step, key, value)
        for run in step.segments:
            rows, start = self.rows[run.sequence][index], run.start
            if run.length == 1 and self.kv.selects and not layer.window:
                rows = rows[self.seen(index, run, query[run.offset])]
                start = len(rows) - 1
            held = rows.split([layer.key_dim, layer.value_dim], -1)
            wanted, _ = reference.attention(
                query[run.tokens], *held, start=start, window=layer.window, sinks=sinks,
                **options,
            )  # fmt: skip
            error = (out[run.tokens].cpu() - wanted).norm() / wanted.norm()
            assert error <= near, (index, run, float(error))

    def seen(self, index: int, run: Segment, query: torch.Tensor) -> torch.Tensor:
        """Which positions a decoding token attends to: near ones, and those of the best pages."""
        kv, ids = self.kv, self.kv.allocator.sequences[run.sequence].pages
        assert kv._selection is not None
        left = kv._selection.hidden(index, ids, query, kv._stay)
        near = kv._places.page_table.level_of(ids) == PageTier.DEVICE
        seen = torch.from_numpy(near | ~np.isin(ids, left))
        self.hidden += int((~seen).sum())
        return seen.repeat_interleave(16)[: run.context]

    def _keep(self, index: int, step: Step, key: torch.Tensor, value: torch.Tensor) -> None:
        for run in step.segments:
            rows = self.rows[run.sequence]
            rows[index] = torch.cat((rows[index], torch.cat((key, value), -1)[run.tokens]))


@pytest.mark.parametrize(
    ("warm", "cold", "far"),
    [
        (160, 0, ops.PageEncoding.F32),
        (0, 12, ops.PageEncoding.INT8),
        (30, 10, ops.PageEncoding.F32),
        *(
            pytest.param(*one, marks=pytest.mark.whole)
            for one in (
                (160, 0, ops.PageEncoding.INT8),
                (0, 12, ops.PageEncoding.F32),
                (30, 10, ops.PageEncoding.INT8),
            )
        ),
    ],
)
def test_steps_give_what_attention_to_everything_gives(
    setting: Setting, warm: int, cold: int, far: ops.PageEncoding
) -> None:
    if setting.interpreted and (warm != 160 or far is not ops.PageEncoding.F32):
        pytest.skip("Triton's interpreter takes a minute for each")
    near = 1e-5 if far is ops.PageEncoding.F32 else 0.02
    kv = setting.cache(far, warm, cold)
    with torch.inference_mode(), setting.device.compute_stream():
        cached = CachedSequences(setting, kv)
        first, second = cached.open(CONTEXT), cached.open(900)
        for _ in range(3):  # all is near
            assert not cached.step({second: 1}, stepped=True, near=near)
        for _ in range(16):
            cached.step({first: CHUNK - 2}, stepped=False, near=near)
        few, some = (2, 1) if cached.slow else (40, 10)
        for number in range(few):
            counts = {first: 1, second: 1} if number % 2 else {first: 1}
            assert cached.step(counts, stepped=True, near=near)
        assert kv.account.host_s > 0
        if warm == 160:
            assert kv.account.fetched_bytes > 0 and cached.stepped.fetched.count <= 2 * STAGED
        for _ in range(some):  # also by the way that others go
            cached.step({second: CHUNK - 2}, stepped=False, near=near)
            cached.step({first: 1, second: 1}, stepped=True, near=near)
        assert cached.slow or kv.account.moved["near to host" if warm else "near to disk"]
        for sequence in (first, second):
            kv.allocator.close(sequence)
        assert kv.allocator.free_tokens == kv.allocator.capacity_tokens
    kv.release()


@pytest.mark.parametrize(("warm", "cold"), [(160, 0), (30, 10)])
def test_steps_attend_to_near_pages_and_to_the_best_of_the_others(
    setting: Setting, warm: int, cold: int
) -> None:
    """Captured or not, whatever the queries ask for."""
    if setting.interpreted:
        pytest.skip("the CPU chooses pages; the kernels are those of the test above")
    kv = setting.cache(ops.PageEncoding.F32, warm, cold, share=0.2)
    with torch.inference_mode(), setting.device.compute_stream():
        cached = CachedSequences(setting, kv)
        text = cached.open(CONTEXT)
        for _ in range(16):
            cached.step({text: CHUNK - 2}, stepped=False, near=1e-5)
        for _ in range(6):
            before, hidden = kv.account.host_bytes, cached.hidden
            assert cached.step({text: 1}, stepped=True, near=1e-5)
            assert cached.hidden > hidden
            if not cold:
                size = sum(kv._places.stores.host.layers[i].pages.layout.page_bytes for i in FULL)  # type: ignore[union-attr]
                far = int(
                    (kv._places.page_table.level_of(kv.allocator.sequences[text].pages) > 0).sum()
                )
                read, left_out = kv.account.host_bytes - before, cached.hidden - hidden
                assert 0 < read < far * size and left_out < far * len(FULL)
        assert not kv.account.fetched_bytes
        cached.step({text: 1}, stepped=False, near=1e-5)
    kv.allocator.close(text)
    kv.release()
