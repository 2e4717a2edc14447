"""Finding the compiled extension, or saying once that there is none."""

import importlib
from functools import cache
from types import ModuleType

from hmt.base import flags
from hmt.base.errors import MachineError
from hmt.base.log import warn_once


@cache
def load() -> ModuleType | None:
    """The extension `hmt._native`, or None where plain torch computes instead.

    HMT_KERNELS decides, once per process; MachineError when it asks for an extension that is not
    there.
    """
    choice = flags.read(flags.KERNELS)
    if choice == "reference":
        return None
    try:
        return importlib.import_module("hmt._native")
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
