"""Forms in which others publish weights: what they become in memory, and how they are unpacked."""

from hmt.quant.published.form import Form, InPlace
from hmt.quant.published.registry import open_form

__all__ = ["Form", "InPlace", "open_form"]
