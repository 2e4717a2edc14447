"""The table of tokens, for a device that looks them up where it can read them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from hmt.contracts.blocks import BlockId
from hmt.contracts.encoding import WeightTensor
from hmt.contracts.store import ResidentBlock
from hmt.kernels.row_table import RowTable, looks_up
from hmt.memory.device import Device
from hmt.weights.layout import RowHolder, Table
from hmt.weights.store.block_store import WeightStore


def token_table(
    table: Table,
    device: Device,
    resident: Mapping[BlockId, ResidentBlock],
    store: WeightStore,
    *,
    host_is_pinned: bool,
) -> RowTable | None:
    """Where the device reads the `table`; None where it cannot, or where no kernel does.

    It lies on the device, as the head of a model whose embeddings are tied, or in pinned memory.

    resident  blocks that live on the device
    """
    pinned = store if host_is_pinned else None
    parts = [_part(holder, resident, pinned) for holder in table.holders]
    held = [(w, moved) for w, moved in (part for part in parts if part is not None)]
    rows = [holder.end - holder.first for holder in table.holders]
    if len(held) < len(parts) or not set(rows[:-1]) <= {rows[0]}:
        return None
    sample = held[0][0]
    if not looks_up(sample) or (len(rows) > 1 and rows[0] % sample.encoding.panel_rows):
        return None

    def addresses(name: str) -> Tensor:
        found = []
        for w, on_host in held:
            part = getattr(w, name)
            if part is None:
                found.append(0)
            else:
                found.append(device.address(part) if on_host else part.data_ptr())
        return torch.tensor(found, dtype=torch.int64, device=device.where)

    extra = "zeros" if sample.zeros is not None else "minima" if sample.minima is not None else ""
    return RowTable(
        (addresses("data"), addresses("scales"), addresses(extra or "zeros")),
        rows[0],
        table.width,
        sample.data.dtype,
        sample.encoding,
        sample.group_size,
        None if sample.scales is None else sample.scales.dtype,
        extra,
    )


def _part(
    holder: RowHolder, resident: Mapping[BlockId, ResidentBlock], pinned: WeightStore | None
) -> tuple[WeightTensor, bool] | None:
    """A table's part where the device can read it, and whether that is host memory."""
    standing = resident.get(holder.block)
    if standing is not None:
        return standing.params[holder.name], False
    on_host = None if pinned is None else pinned.resident([holder.block])
    if on_host is None or holder.name not in on_host[0].params:
        return None
    return on_host[0].params[holder.name], True
