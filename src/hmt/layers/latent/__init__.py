"""Latent attention, to everything or to what an indexer selects."""

from hmt.layers.latent.mla import LatentAttention
from hmt.layers.latent.sparse_attention import Indexer, KeyPool, Selection, SparseLatentAttention
