"""The table of tokens, for a device that looks them up where it can read them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from hmt.contracts.blocks import BlockId
from hmt.contracts.store import ResidentBlock
from hmt.memory.device import Device
from hmt.weights.layout import RowHolder, Table
from hmt.weights.store.block_store import WeightStore

# Addresses of its parts int64 [parts] on the device, rows of each, numbers of a row, their dtype.
TokenTable = tuple[Tensor, int, int, torch.dtype]


def token_table(
    table: Table,
    device: Device,
    resident: Mapping[BlockId, ResidentBlock],
    store: WeightStore,
    *,
    host_is_pinned: bool,
) -> TokenTable | None:
    """Where the device reads the `table`; None where it cannot, or where that has codes.

    It lies on the device, as the head of a model whose embeddings are tied, or in pinned memory.

    resident  blocks that live on the device
    """
    parts = [
        _part(holder, device, resident, store if host_is_pinned else None)
        for holder in table.holders
    ]
    found = [part for part in parts if part is not None]
    rows = [holder.end - holder.first for holder in table.holders]
    if len(found) < len(parts) or not set(rows[:-1]) <= {rows[0]}:
        return None
    addresses = [address for address, _ in found]
    where = torch.tensor(addresses, dtype=torch.int64, device=device.where)
    return where, rows[0], table.width, found[0][1]


def _part(
    holder: RowHolder,
    device: Device,
    resident: Mapping[BlockId, ResidentBlock],
    pinned: WeightStore | None,
) -> tuple[int, torch.dtype] | None:
    """Where the device finds a table's part, and the dtype of its numbers; None for codes."""
    standing = resident.get(holder.block)
    if standing is not None:
        held = standing.params[holder.name]
        return (held.data.data_ptr(), held.data.dtype) if held.encoding.is_float else None
    on_host = None if pinned is None else pinned.resident([holder.block])
    if on_host is None or holder.name not in on_host[0].params:
        return None
    held = on_host[0].params[holder.name]
    return (device.address(held.data), held.data.dtype) if held.encoding.is_float else None
