"""Finding the compiled extension `hmt._native`.

Whether kernels compute with it is decided in `hmt.kernels.cpu.extension`; the disk reader through
io_uring uses it in any case.
"""

import importlib
import importlib.util
import sys
from types import ModuleType

from hmt.base import flags


def find() -> ModuleType:
    """The extension; HMT_EXTENSION says which file, if not the installed one.  ImportError."""
    file, name = flags.read(flags.EXTENSION), "hmt._native"
    if file and name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise ImportError(f"HMT_EXTENSION={file} is not the file of an extension")
        native = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native)
        sys.modules[name] = native
    return importlib.import_module(name)
