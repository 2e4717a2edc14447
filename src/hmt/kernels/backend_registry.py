"""Which implementation of the operations computes a tensor: a table by torch's type of device.

An implementation is one `register`.  What it has no operation of its own for, plain torch computes
there (`hmt.kernels.reference`), in chains of its own operations where the reference is a chain.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hmt.base import flags
from hmt.base.log import warn_once
from hmt.kernels import reference

# Reference operations that are made of others, which they take as `kernels`.
_CHAINS = frozenset(
    {
        "append_attend_pages",
        "attention_inputs",
        "experts",
        "feed_forward",
        "linear_gated",
        "linear_into",
        "linear_many_float",
        "router_inputs",
    }
)


class Backend:
    """An implementation of the operations of `hmt.kernels.reference`, which are its attributes.

    name            for people
    on_host         whether it computes in host memory: pages of the KV cache are laid out in words
                    for compiled kernels, and in rows for those of all other devices
    captures        whether steps of its operations can be captured: none of them waits for the host
    compiles_late   whether kernels are compiled when they are first called
    """

    def __init__(
        self,
        name: str,
        operations: Any,
        *,
        on_host: bool = False,
        captures: bool = True,
        compiles_late: bool = False,
    ) -> None:
        """`operations` is a module, or an object, with functions called like the reference's."""
        self.name = name
        self.on_host = on_host
        self.captures = captures
        self.compiles_late = compiles_late
        self._operations = operations

    def has(self, operation: str) -> bool:
        """Whether the operation is its own."""
        return self._operations is not reference and hasattr(self._operations, operation)

    def __getattr__(self, operation: str) -> Any:
        # Called for an operation's first use only: the second finds the attribute.
        if operation.startswith("_"):
            raise AttributeError(operation)
        if self.has(operation):
            found = getattr(self._operations, operation)
        elif not hasattr(reference, operation):
            raise AttributeError(f"the backend {self.name} has no operation {operation}")
        else:
            found = getattr(reference, operation)
            if operation in _CHAINS and self._operations is not reference:
                found = partial(found, kernels=self)
        setattr(self, operation, found)
        return found


Maker = Callable[[], Backend]


def register(device_type: str, make: Maker | None) -> Maker | None:
    """Let the backend that `make` returns compute tensors on devices of torch's `device_type`.

    `make` is called when the first tensor of that type comes, once; None: plain torch computes
    them.  Returns what was registered before.
    """
    before = _makers.pop(device_type, None)
    if make is not None:
        _makers[device_type] = make
    _backends.clear()
    return before


def backend_of(tensor: Tensor) -> Backend:
    """The backend that computes `tensor`."""
    return _backends.get(tensor.device) or backend_on(tensor.device)


def backend_on(where: torch.device) -> Backend:
    """The backend that computes tensors on the device `where`."""
    backend = _backends.get(where)
    if backend is None:
        same_type = (known for device, known in _backends.items() if device.type == where.type)
        backend = next(same_type, None) or _makers.get(where.type, _plain_torch)()
        _backends[where] = backend
    return backend


def host_backend() -> Backend:
    """The backend that computes in host memory."""
    return backend_on(_HOST)


def gpu_backend() -> Backend | None:
    """The backend of this machine's GPU; None where torch can use none."""
    for device_type in _makers:
        where = torch.device(device_type)
        if where != _HOST and torch.get_device_module(where).is_available():
            return backend_on(where)
    return None


def _plain_torch() -> Backend:
    return Backend("plain torch", reference, captures=False)


def make_host_backend() -> Backend:
    """The compiled extension; plain torch where there is none, or by HMT_KERNELS."""
    from hmt.kernels.cpu import extension
    from hmt.kernels.cpu.operations import CompiledOperations

    native = extension.load()
    if native is None:
        return Backend("plain torch", reference, on_host=True)
    return Backend(f"compiled ({native.isa()})", CompiledOperations(native), on_host=True)


def make_triton_backend() -> Backend:
    """Triton's kernels; plain torch where Triton does not load, or by HMT_KERNELS."""
    if flags.read(flags.KERNELS) == "reference":
        return _plain_torch()
    try:
        from hmt.kernels.triton import operations
    except ImportError as error:
        warn_once("triton", f"Triton does not load ({error}): the GPU computes in plain torch")
        return _plain_torch()
    return Backend("Triton", operations, compiles_late=True)


_HOST = torch.device("cpu")
_makers: dict[str, Maker] = {"cpu": make_host_backend, "cuda": make_triton_backend}
_backends: dict[torch.device, Backend] = {}  # of devices whose tensors have come
