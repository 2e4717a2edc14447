"""Copies between the device and pinned host memory by kernels, on every architecture.

what                                             kernel
a few KB, in steps that are captured             pinned_copy.py
KV pages to the host's encoding and back: the    kv_repack.py, which converts rows to words on the
same without scales, or one of 8 bits            way
other pages                                      none: `kvcache.page_store` converts them
"""

from hmt.kernels.triton.transfer.kv_repack import can_rewrite as can_copy_pages
from hmt.kernels.triton.transfer.kv_repack import (
    fetch_layer,
    fetch_pages,
    fetch_rows,
    send_pages,
)
from hmt.kernels.triton.transfer.pinned_copy import move as copy_pairs
