"""Models that HMT has no file for: transformers' modules with HMT's weights and attention."""

from hmt.models.fallback.module_tree import architectures
from hmt.models.fallback.opening import open_fallback
