"""GGUF files: their headers, and what llama.cpp calls things."""

from hmt.formats.gguf.checkpoint import is_gguf, open_gguf
from hmt.formats.gguf.file_types import FILE_TYPES, FileType
from hmt.formats.gguf.header import read_gguf
