"""Attention to blocks of positions that an indexer selects."""

from hmt.layers.selection.blocks import BlockIndexer, BlockSparseAttention
