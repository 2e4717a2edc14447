"""Quantising a model that is larger than memory: block by block, calibrated, resumable."""

from hmt.quantizing.calibration_text import calibration_sequences
from hmt.quantizing.driver import Quantized, quantize
from hmt.quantizing.folder import PartialFolder
from hmt.quantizing.options import WIDTHS, QuantizeOptions, bits_by_recipe, target_named
from hmt.quantizing.stores import LayerWeights, open_store
from hmt.quantizing.whole_sequences import WholeSequences
