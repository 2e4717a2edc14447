"""Models that HMT has no file for: transformers' modules, with HMT's weights, attention and cache."""

from hmt.models.fallback.model import Fallback
from hmt.models.fallback.tree import architectures

__all__ = ["Fallback", "architectures"]
