"""Finding quantised parameters in checkpoints: one file for each way to publish them."""

from hmt.formats.quantized.detect import find_forms
