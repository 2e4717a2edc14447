"""How pages lie: 16 tokens of KV for all layers of one kind, each page one contiguous extent."""

from collections.abc import Iterable, Mapping
from itertools import groupby

import torch

from hmt.contracts.model import PAGE_TOKENS, KVKind, KVLayer
from hmt.kernels import ops
from hmt.kernels.backend_registry import backend_on


def page_bytes(layers: Iterable[KVLayer], dtype: torch.dtype) -> int:
    """Bytes that 16 positions take over all `layers`, one page per kind."""
    return PAGE_TOKENS * sum(layer.row_width for layer in layers) * dtype.itemsize


def kinds_of(layers: Mapping[int, KVLayer]) -> list[tuple[KVLayer, list[int]]]:
    """Groups of layers that keep the same rows: (what a layer keeps, indices of the layers)."""

    def key(index: int) -> tuple[str, int, int, int, int, int]:
        layer = layers[index]
        dims = layer.heads, layer.key_dim, layer.value_dim
        return (layer.kind, *dims, layer.window, layer.grouped)

    groups = groupby(sorted(layers, key=key), key=key)
    members = [list(indices) for _, indices in groups]
    return [(layers[indices[0]], indices) for indices in members]


def layout_of(layer: KVLayer, encoding: ops.PageEncoding, where: torch.device) -> ops.PageLayout:
    """How a layer's page lies in the memory of a host or a device.

    Words of 16 tokens for compiled kernels, plain rows for those of GPUs.  Index keys and `grouped`
    rows are plain rows everywhere, since products of matrices read all of them: as words, 131,072
    keys of 128 numbers took two cores 45 ms to turn around, and 13 to multiply with 64 heads.
    """
    dims = layer.heads, layer.key_dim, layer.value_dim
    rows = not backend_on(where).on_host
    read_whole = layer.kind is KVKind.INDEX or layer.grouped > 1
    rows |= read_whole and encoding is not ops.PageEncoding.INT4
    return ops.PageLayout(encoding, *dims, latent=not layer.has_values, rows=rows)
