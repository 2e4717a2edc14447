"""Parameters that a module reads by name while their block is leased, in whichever method it does.

`Unit` calls a module with tensors in the place of its parameters, which holds for `forward` only.
"""

from typing import Any

from torch import Tensor, nn

from hmt.models.fallback.blocks import is_experts, own_params
from hmt.models.fallback.call_context import current_context
from hmt.models.fallback.device_cache import CPU
from hmt.models.fallback.modules import Layer, LeasedLinear, Unit, stand_in


def lend(owner: Unit) -> None:
    """Let the modules of a unit read what `owner` is given as `values`."""
    owner.lends = True
    for path, module in owner.inner.named_modules():
        if not isinstance(module, LeasedLinear) and not is_experts(module):
            lend_own(owner, module, f"{path}." if path else "")


def lend_own(owner: Unit | Layer, module: nn.Module, prefix: str = "") -> None:
    """The same of a module's own parameters, called PREFIX and name among `owner.values`."""
    names = own_params(module)
    if not names:
        return
    kind = type(module)
    readers = {name: _reader(owner, prefix + name, getattr(module, name)) for name in names}
    # The parameters stay where they are, without numbers: a property of the class goes before them.
    module.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **readers})


def _reader(owner: Unit | Layer, name: str, tensor: Tensor) -> Any:
    shape, dtype = tuple(tensor.shape), tensor.dtype

    def read(module: Any) -> Tensor:
        work = current_context()
        if work.weights is None:
            work.record.read(owner)
            return stand_in(shape, dtype)
        assert owner.block is not None
        # A copy: the lease ends with the next one.
        return owner.values[name].of(work.use(owner.block)).to(CPU, copy=True)

    return property(read)
