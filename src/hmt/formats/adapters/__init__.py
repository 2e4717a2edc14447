"""Low-rank adapters on disk: folders of peft, and GGUF files."""

from hmt.formats.adapters.contents import MOST_RANK, AdapterFile, AdapterMatrices
from hmt.formats.adapters.opening import open_adapter
