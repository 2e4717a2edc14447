"""Pages between a device and pinned host memory, through one kernel where there is one."""

import torch
from torch import Tensor

from hmt.kernels.backend_registry import backend_of, backend_on
from hmt.kernels.reference.kv_pages import PageLayout, Pages


def can_copy_pages(where: torch.device, device: PageLayout, host: PageLayout) -> bool:
    """Whether pages of `device`, on device `where`, and of `host`, in pinned memory, convert."""
    known: bool = backend_on(where).can_copy_pages(device, host)
    return known


def send_pages(device: Pages, numbers: Tensor, host: Pages, slots: Tensor) -> None:
    """Write pages `numbers` of `device`, all layers, to `slots` of `host`, on the current queue.

    Both int64; those that `can_copy_pages`.  Nobody waits until they are there.
    """
    there = (x.to(device.memory.device, non_blocking=True) for x in (numbers, slots))
    backend_of(device.memory).send_pages(device, next(there), host, next(there))


def fetch_pages(device: Pages, numbers: Tensor, host: Pages, slots: Tensor) -> None:
    """`send_pages` the other way."""
    there = (x.to(device.memory.device, non_blocking=True) for x in (numbers, slots))
    backend_of(device.memory).fetch_pages(device, next(there), host, next(there))


def fetch_layer(device: Pages, host: Pages, layer: int, slots: Tensor) -> None:
    """Pages `slots` of one layer of `host` to the first pages of `device`, which are of one layer.

    slots   int64 on the device; nothing is fetched for those below 0
    """
    backend_of(device.memory).fetch_layer(device, host, layer, slots)


def fetch_rows(key: Tensor, value: Tensor, host: Pages, layer: int, slots: Tensor) -> None:
    """Keys and values of pages `slots` of one layer of `host`, in a row, on the current queue.

    key [16 * len(slots), heads, key_dim] and value [.., heads, value_dim], contiguous and on the
    device; of latents only key is written.
    """
    backend_of(key).fetch_rows(key, value, host, layer, slots.to(key.device, non_blocking=True))
