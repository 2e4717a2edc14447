"""Several residual streams: how sublayers read and write them, and what n-grams add to them."""

from hmt.layers.streams.gated_residual import GatedResidual, StreamNorm
from hmt.layers.streams.ngram_memory import NGramHash, NGramMemory
