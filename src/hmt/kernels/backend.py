"""Which operations compute on a GPU's tensors."""

from functools import cache
from typing import Any

from hmt.base import flags
from hmt.base.log import warn_once
from hmt.kernels import reference


@cache
def gpu_kernels() -> Any:
    """The operations for tensors on a GPU; `reference` where there are none."""
    if flags.read(flags.KERNELS) == "reference":
        return reference
    try:
        from hmt.kernels.triton import operations
    except ImportError as error:
        warn_once("triton", f"Triton does not load ({error}): the GPU computes in plain torch")
        return reference
    return operations
