"""What gates make of attention, of residual streams, and of a memory of n-grams."""

from hmt.layers.gated.block_attention import BlockIndexer, BlockSparseAttention
from hmt.layers.gated.gated_attention import GatedAttention
from hmt.layers.gated.gated_residual import GatedResidual, StreamNorm
from hmt.layers.gated.hyper_connection import HyperConnection, HyperHead, StreamMix
from hmt.layers.gated.ngram_memory import NGramHash, NGramMemory
