"""Computing with the compiled extension, or saying once that there is none."""

from functools import cache
from types import ModuleType

from torch import Tensor

from hmt.base import extension, flags
from hmt.base.errors import MachineError
from hmt.base.log import warn_once


@cache
def load() -> ModuleType | None:
    """The extension `hmt._native`, or None where plain torch computes instead.

    HMT_KERNELS decides, once per process; HMT_EXTENSION says which file, if not the installed one,
    and HMT_ISA with which instructions it computes.  MachineError when they ask for an extension
    that is not there, or for instructions that this machine does not run.
    """
    choice = flags.read(flags.KERNELS)
    if choice == "reference":
        return None
    isa = flags.read(flags.ISA)
    try:
        native = extension.find()
    except ImportError as error:
        remedy = "install HMT again where there is a C++17 compiler, with HMT_NATIVE=on"
        if choice == "native":
            raise MachineError(
                f"HMT_KERNELS=native, but the compiled kernels do not load ({error}); {remedy}"
            ) from error
        warn_once(
            "native kernels",
            f"the compiled kernels do not load ({error}); plain torch computes, which is several "
            f"times slower on quantised weights; {remedy}",
        )
        return None
    if isa != "auto":
        if isa not in native.isas():
            raise MachineError(
                f"HMT_ISA={isa}, but this machine runs {', '.join(native.isas())}; choose one of "
                "those, or auto"
            )
        native.set_isa(isa)
    return native


def load_for(*tensors: Tensor | None) -> ModuleType | None:
    """The extension, where it takes all of the tensors: contiguous ones in host memory."""
    plain = (tensor is None or (tensor.is_cpu and tensor.is_contiguous()) for tensor in tensors)
    return load() if all(plain) else None
