"""Which kernels compute on a weight here, for people who ask before they run."""

from hmt.contracts.encoding import WeightTensor
from hmt.kernels.backend_registry import gpu_backend
from hmt.kernels.cpu import extension
from hmt.kernels.cpu.linear import is_compiled


def kernel_name(weight: WeightTensor) -> str:
    """What multiplies with `weight` on this machine's CPU, and on its GPU if it has one."""
    native = extension.load()
    compiled = native is not None and is_compiled(native, weight)
    name = f"compiled ({native.isa()})" if native is not None and compiled else "plain torch"
    gpu = gpu_backend()
    return name if gpu is None else f"{name}; GPU: {gpu.name}"
