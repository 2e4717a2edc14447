"""Pages between a device and pinned host memory, through one kernel where there is one."""

import torch
from torch import Tensor

from hmt.kernels import reference
from hmt.kernels.ops import gpu_kernels
from hmt.kernels.reference.pages import PageLayout, Pages


def can_cross(where: torch.device, near: PageLayout, far: PageLayout) -> bool:
    """Whether pages of `near` on device `where` and of `far` in pinned memory become each other."""
    if where.type != "cuda" or gpu_kernels() is reference:
        return False
    known: bool = gpu_kernels().can_rewrite(near, far)
    return known


def send_pages(near: Pages, numbers: Tensor, far: Pages, slots: Tensor) -> None:
    """Write pages `numbers` of `near`, all layers, to `slots` of `far`, on the current queue.

    Both int64; those that `can_cross`.  Nobody waits until they are there.
    """
    there = (x.to(near.memory.device, non_blocking=True) for x in (numbers, slots))
    gpu_kernels().send_pages(near, next(there), far, next(there))


def fetch_pages(near: Pages, numbers: Tensor, far: Pages, slots: Tensor) -> None:
    """`send_pages` the other way."""
    there = (x.to(near.memory.device, non_blocking=True) for x in (numbers, slots))
    gpu_kernels().fetch_pages(near, next(there), far, next(there))


def fetch_layer(near: Pages, far: Pages, layer: int, slots: Tensor) -> None:
    """Pages `slots` of one layer of `far` to the first pages of `near`, which are of one layer.

    slots   int64 on the device; nothing is fetched for those below 0
    """
    gpu_kernels().fetch_layer(near, far, layer, slots)


def fetch_rows(key: Tensor, value: Tensor, far: Pages, layer: int, slots: Tensor) -> None:
    """Keys and values of pages `slots` of one layer of `far`, in a row, on the current queue.

    key [16 * len(slots), heads, key_dim] and value [.., heads, value_dim], contiguous and on the
    device; of latents only key is written.
    """
    gpu_kernels().fetch_rows(key, value, far, layer, slots.to(key.device, non_blocking=True))
