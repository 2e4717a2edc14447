"""Attention to a window of positions, and to rows that each stand for several (DeepSeek-V4)."""

from hmt.layers.compressed.compressed_attention import CompressedAttention, GroupedOutput
from hmt.layers.compressed.compressor import Compressor, EntryPart, GroupRows
from hmt.layers.compressed.entry_indexer import EntryIndexer
