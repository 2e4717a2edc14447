"""Attention to what an indexer selects: positions, or blocks of them."""

from hmt.layers.selection.blocks import BlockIndexer, BlockSparseAttention
from hmt.layers.selection.positions import Indexer, Selection, SparseLatentAttention
