"""Quantising a model that is larger than memory: block by block, calibrated, resumable."""

from hmt.quantizing.driver import Quantized, quantize
from hmt.quantizing.options import QuantizeOptions, bits_by_recipe, target_named
