"""Opens an adapter, in whichever of the formats it is."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hmt.base.errors import MissingFileError
from hmt.formats.adapters.contents import AdapterFile
from hmt.formats.adapters.gguf_adapter import open_gguf_adapter
from hmt.formats.adapters.peft import CONFIG, open_peft
from hmt.formats.gguf import is_gguf


def open_adapter(path: Path, config: Mapping[str, Any]) -> AdapterFile:
    """The adapter in a folder that peft wrote, or in a GGUF file.

    config   of the model that it is for, which GGUF files do not repeat
    Raises MissingFileError, HeaderError, ShapeError or AdapterError.
    """
    path = path.expanduser()
    if not path.exists():
        raise MissingFileError(f"{path} does not exist: name a folder of peft, or a GGUF file")
    if path.is_dir() and (path / CONFIG).is_file():
        return open_peft(path)
    if is_gguf(path):
        files = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
        if len(files) == 1:
            return open_gguf_adapter(files[0], config)
    raise MissingFileError(
        f"{path} holds no adapter: wanted is a folder with {CONFIG} and adapter_model.safetensors, "
        "or one GGUF file"
    )
