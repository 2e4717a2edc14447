"""A tiered cache out of a plan."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch

from hmt.base.errors import ConfigError
from hmt.contracts.kv import GROUP_PAGES, KVLevels
from hmt.contracts.model import KVLayer
from hmt.kernels import ops
from hmt.kvcache.codecs import DriveName, LayerCodec, layer_codecs
from hmt.kvcache.cold import ColdPages
from hmt.kvcache.drive_forms import LowPages, cold_bytes, group_forms
from hmt.kvcache.placement import Placement
from hmt.kvcache.policies import ORDERS
from hmt.kvcache.rings import Rings
from hmt.kvcache.select import RANKINGS, Selection, bounds_page_bytes
from hmt.kvcache.store import PageStore, Pool, store_page_bytes
from hmt.kvcache.tiered import TieredKV
from hmt.memory import TransferQueue
from hmt.memory.device import Device

_Tiered = TypeVar("_Tiered", bound=TieredKV)

_ENCODINGS = {
    "int8": ops.PageEncoding.INT8,
    "int4": ops.PageEncoding.INT4,
    "fp8": ops.PageEncoding.FP8,
}


def encoding_of(name: str, dtype: torch.dtype, near: str = "exact") -> ops.PageEncoding:
    """What KVLevels calls so, in a model that computes in `dtype`; for codecs, what they yield.

    near   how pages are kept near, which "exact" means elsewhere
    """
    return _ENCODINGS.get(near if name == "exact" else name) or ops.PageEncoding.of(dtype)


def codecs_of(name: str, layers: Mapping[int, KVLayer]) -> Mapping[int, LayerCodec] | None:
    """A codec for each layer; None where an encoding of pages is called so.  Raises ConfigError."""
    return None if name == "exact" or name in _ENCODINGS else layer_codecs(name, layers)


def drive_forms_of(
    name: str, layers: Mapping[int, KVLayer], dtype: torch.dtype, near: str = "exact"
) -> dict[str, Any]:
    """What ColdPages and `cold_bytes` are told of a `DriveName`.  Raises ConfigError."""
    kept, low = DriveName.parse(name), None
    encoding, codecs = encoding_of(kept.usual, dtype, near), codecs_of(kept.usual, layers)
    if kept.low is not None:
        exact, less = ops.PageEncoding.of(dtype), layer_codecs(kept.low, layers)
        low = LowPages(less, exact, kept.below)
        forms = group_forms(layers, encoding, codecs, low).values()
        if any(form.nbytes(GROUP_PAGES) > form.nbytes() for form in forms):
            raise ConfigError(f"{name!r}: {kept.low} takes more bytes than {kept.usual}")
    return {"encoding": encoding, "codecs": codecs, "low": low}


def kv_sizes(
    layers: Sequence[KVLayer],
    dtype: torch.dtype,
    warm: str,
    cold: str,
    selection: tuple[str, float] | None = None,
    near: str = "exact",
) -> dict[str, Any]:
    """Bytes of a model's pages, by the names of `hmt.planner.KVSizes`; see `open_tiered`."""
    whole, windows = _by_window(dict(enumerate(layers)))
    kept = encoding_of(near, dtype)
    group, layer_group, kind_group = cold_bytes(whole, **drive_forms_of(cold, whole, dtype, near))
    return {
        "hot_page": store_page_bytes(whole, kept),
        "warm_page": store_page_bytes(whole, encoding_of(warm, dtype, near)),
        "cold_group": group,
        "layer_group": layer_group,
        "kind_group": kind_group,
        "chosen_page": bounds_page_bytes(whole) if selection and selection[0] == "bound" else 0,
        "ring_pages": {w: store_page_bytes(members, kept) for w, members in windows.items()},
        "near": near,
        "warm": warm,
        "cold": cold,
    }


def group_bytes_as(name: str, layers: Mapping[int, KVLayer], dtype: torch.dtype) -> int:
    """Bytes of `GROUP_PAGES` pages of all `layers` without a window, kept as `name` says.

    Without padding.  Raises ConfigError.
    """
    whole, _ = _by_window(layers)
    if codecs := codecs_of(name, whole):
        return sum(codec.group_bytes for codec in codecs.values())
    return GROUP_PAGES * store_page_bytes(whole, encoding_of(name, dtype))


def open_tiered(
    kind: type[_Tiered],
    layers: Mapping[int, KVLayer],
    levels: KVLevels,
    dtype: torch.dtype,
    *,
    near: Pool[Any],
    host: Pool[Any],
    folder: Path | None,
    queue: TransferQueue,
    order: str,
    chunk: int,
    selection: tuple[str, float] | None = None,
    device: Device | None = None,
    pinned: bool = False,
) -> _Tiered:
    """The cache that `levels` plans: hot pages and rings from `near`, all else from `host`.

    order       of ORDERS
    selection   of RANKINGS, and the share of pages that decoding tokens attend to; None: to all
    device      where layers compute, if not on the CPU
    pinned      whether its kernels can read and write what `host` gives

    Raises BudgetError, and MachineError where `folder` has no room.
    """
    whole, windows = _by_window(layers)
    kept = encoding_of(levels.near, dtype)
    warm = cold = None
    with ExitStack() as made:
        hot = PageStore(whole, levels.hot_pages, kept, near, staged=levels.staged_pages)
        made.callback(hot.release)
        rings = []
        for window, members in windows.items():
            rings.append(Rings(members, window, chunk, levels.ring_pages[window], kept, near))
            made.callback(rings[-1].release)
        if levels.warm_pages:
            encoding = encoding_of(levels.warm, dtype, levels.near)
            warm = PageStore(whole, levels.warm_pages, encoding, host, pinned=pinned)
            made.callback(warm.release)
        if levels.cold_groups:
            assert folder is not None
            cold = ColdPages(
                folder, whole, levels.cold_groups, pool=host, queue=queue,
                piece_bytes=levels.piece_bytes,
                **drive_forms_of(levels.cold, whole, dtype, levels.near),
            )  # fmt: skip
        made.pop_all()

    def choosing(places: Placement) -> Selection:
        assert selection is not None
        ranking, share = selection
        return Selection(share, RANKINGS[ranking](places, host))

    chosen = None if selection is None else choosing
    order_of = ORDERS[order]
    return kind(hot, warm, cold, rings, order_of, chunk=chunk, selection=chosen, device=device)


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
