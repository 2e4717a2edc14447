"""A tiered cache out of a plan."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from hmt.base.errors import ConfigError
from hmt.contracts.kv import GROUP_PAGES, KVTiers
from hmt.contracts.model import KVLayer
from hmt.kernels import ops
from hmt.kvcache.codecs import DiskCodecName, LayerCodec, layer_codecs
from hmt.kvcache.eviction import KV_EVICTION
from hmt.kvcache.key_ranges import KeyRange
from hmt.kvcache.offload.disk_layout import LowAttentionPages, disk_bytes, group_formats
from hmt.kvcache.offload.disk_pages import DiskPages
from hmt.kvcache.offload.page_migration import PageMigration
from hmt.kvcache.offload.sliding_window import SlidingWindowPages
from hmt.kvcache.offload.sparse_selection import ByScoreBound, Selection, bounds_page_bytes
from hmt.kvcache.offload.tiered_cache import TieredKV
from hmt.kvcache.page_store import PageStore, Pool, store_page_bytes
from hmt.kvcache.recurrent_state import StateStore
from hmt.memory import ReadQueue
from hmt.memory.device import Device

_ENCODINGS = {
    "int8": ops.PageEncoding.INT8,
    "int4": ops.PageEncoding.INT4,
    "fp8": ops.PageEncoding.FP8,
}


def page_encoding(name: str, dtype: torch.dtype, device_format: str = "exact") -> ops.PageEncoding:
    """What KVTiers calls so, in a model that computes in `dtype`; for codecs, what they yield.

    device_format  how pages are kept where layers compute, which "exact" means elsewhere
    """
    return _ENCODINGS.get(device_format if name == "exact" else name) or ops.PageEncoding.of(dtype)


def codecs_of(name: str, layers: Mapping[int, KVLayer]) -> Mapping[int, LayerCodec] | None:
    """A codec for each layer; None where an encoding of pages is called so.  Raises ConfigError."""
    return None if name == "exact" or name in _ENCODINGS else layer_codecs(name, layers)


def disk_formats_of(
    name: str, layers: Mapping[int, KVLayer], dtype: torch.dtype, device_format: str = "exact"
) -> dict[str, Any]:
    """What DiskPages and `disk_bytes` are told of a `DiskCodecName`.  Raises ConfigError."""
    kept, low = DiskCodecName.parse(name), None
    encoding, codecs = (
        page_encoding(kept.usual, dtype, device_format),
        codecs_of(kept.usual, layers),
    )
    if kept.low is not None:
        exact, less = ops.PageEncoding.of(dtype), layer_codecs(kept.low, layers)
        low = LowAttentionPages(less, exact, kept.below)
        forms = group_formats(layers, encoding, codecs, low).values()
        if any(form.nbytes(GROUP_PAGES) > form.nbytes() for form in forms):
            raise ConfigError(f"{name!r}: {kept.low} takes more bytes than {kept.usual}")
    return {"encoding": encoding, "codecs": codecs, "low": low}


def kv_sizes(
    layers: Mapping[int, KVLayer],
    dtype: torch.dtype,
    host_format: str,
    disk_format: str,
    selection: float | None = None,
    device_format: str = "exact",
) -> dict[str, Any]:
    """Bytes of a model's pages, by the names of `hmt.planner.KVSizes`; see `open_tiered`."""
    whole, windows = _by_window(layers)
    kept = page_encoding(device_format, dtype)
    group, layer_group, kind_group = disk_bytes(
        whole, **disk_formats_of(disk_format, whole, dtype, device_format)
    )
    return {
        "device_page": store_page_bytes(whole, kept),
        "host_page": store_page_bytes(whole, page_encoding(host_format, dtype, device_format)),
        "disk_group": group,
        "layer_group": layer_group,
        "kind_group": kind_group,
        "chosen_page": bounds_page_bytes(whole) if selection is not None else 0,
        "ring_pages": {w: store_page_bytes(members, kept) for w, members in windows.items()},
        "device_format": device_format,
        "host_format": host_format,
        "disk_format": disk_format,
    }


def group_bytes_as(name: str, layers: Mapping[int, KVLayer], dtype: torch.dtype) -> int:
    """Bytes of `GROUP_PAGES` pages of all `layers` without a window, kept as `name` says.

    Without padding.  Raises ConfigError.
    """
    whole, _ = _by_window(layers)
    if codecs := codecs_of(name, whole):
        return sum(codec.group_bytes for codec in codecs.values())
    return GROUP_PAGES * store_page_bytes(whole, page_encoding(name, dtype))


def open_tiered(
    layers: Mapping[int, KVLayer],
    levels: KVTiers,
    dtype: torch.dtype,
    *,
    device_pool: Pool[Any],
    host: Pool[Any],
    folder: Path | None,
    queue: ReadQueue,
    order: str,
    chunk: int,
    selection: float | None = None,
    device: Device | None = None,
    pinned: bool = False,
    state: StateStore | None = None,
    ranges: Mapping[int, KeyRange] | None = None,
) -> TieredKV:
    """The cache that `levels` plans: device pages from `device_pool`, all else from `host`.

    order      of ORDERS
    selection  the share of pages that decoding tokens attend to; None: to all
    device     where layers compute, if not on the CPU
    pinned     whether its kernels can read and write what `host` gives
    state      of layers of the same place, which the cache releases
    ranges     of keys of some layers: see TieredKV

    Raises BudgetError, and MachineError where `folder` has no room.
    """
    whole, windows = _by_window(layers)
    kept = page_encoding(levels.device_format, dtype)
    host_store = disk_pages = None
    with ExitStack() as made:
        device_store = PageStore(
            whole, levels.device_pages, kept, device_pool, staged=levels.staged_pages
        )
        made.callback(device_store.release)
        rings = []
        for window, members in windows.items():
            rings.append(
                SlidingWindowPages(
                    members, window, chunk, levels.ring_pages[window], kept, device_pool
                )
            )
            made.callback(rings[-1].release)
        if levels.host_pages:
            encoding = page_encoding(levels.host_format, dtype, levels.device_format)
            host_store = PageStore(whole, levels.host_pages, encoding, host, pinned=pinned)
            made.callback(host_store.release)
        if levels.disk_groups:
            assert folder is not None
            disk_pages = DiskPages(
                folder, whole, levels.disk_groups, pool=host, queue=queue,
                chunk_bytes=levels.chunk_bytes,
                **disk_formats_of(levels.disk_format, whole, dtype, levels.device_format),
            )  # fmt: skip
        made.pop_all()

    def choosing(places: PageMigration) -> Selection:
        assert selection is not None
        return Selection(selection, ByScoreBound(places, host))

    chosen = None if selection is None else choosing
    order_of = KV_EVICTION[order]
    return TieredKV(
        device_store,
        host_store,
        disk_pages,
        rings,
        order_of,
        chunk=chunk,
        selection=chosen,
        device=device,
        state=state,
        ranges=ranges or {},
    )


def _by_window(
    layers: Mapping[int, KVLayer],
) -> tuple[Mapping[int, KVLayer], Mapping[int, Mapping[int, KVLayer]]]:
    """Layers that see everything, and by window those that do not; both by index."""
    whole = {index: layer for index, layer in layers.items() if not layer.window}
    windows: dict[int, dict[int, KVLayer]] = {}
    for index, layer in layers.items():
        if layer.window:
            windows.setdefault(layer.window, {})[index] = layer
    return whole, windows
