"""Checkpoint files: safetensors headers and checkpoint folders."""

from hmt.formats.checkpoint import open_checkpoint
from hmt.formats.gguf import is_gguf
from hmt.formats.hub import located, shown_name
from hmt.formats.safetensors import read_header
