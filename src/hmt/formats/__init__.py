"""Checkpoint files: safetensors headers and checkpoint folders."""

from hmt.formats.checkpoint import open_checkpoint
from hmt.formats.safetensors import read_header

__all__ = ["open_checkpoint", "read_header"]
