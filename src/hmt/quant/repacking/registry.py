"""The code for each published form, by the name that hmt.formats gives it."""

from collections.abc import Callable
from functools import cache
from typing import Any

from hmt.contracts.checkpoint import FormName
from hmt.quant.repacking.awq import AWQ
from hmt.quant.repacking.bitsandbytes import BitsAndBytesInt8, BitsAndBytesTable
from hmt.quant.repacking.compressed_tensors import CompressedIntegers
from hmt.quant.repacking.floats import Floats
from hmt.quant.repacking.fp4 import MXFP4, NVFP4
from hmt.quant.repacking.fp8 import FP8
from hmt.quant.repacking.gguf import Gguf, GgufFrames, GgufLatent, GgufReordered, GgufTiled
from hmt.quant.repacking.gptq import GPTQ
from hmt.quant.repacking.hqq import HQQ
from hmt.quant.repacking.interface import InPlaceImporter, WeightImporter
from hmt.quant.repacking.quanto import QuantoBits
from hmt.quant.repacking.stacked_floats import StackedFloats
from hmt.quant.repacking.torchao import SwizzledScales, TorchaoInt4

_SCHEMES: dict[str, Callable[..., WeightImporter | InPlaceImporter]] = {
    "in place": InPlaceImporter,
    "floats": Floats,
    "arranged": StackedFloats,
    "awq": AWQ,
    "bitsandbytes int8": BitsAndBytesInt8,
    "bitsandbytes table": BitsAndBytesTable,
    "compressed integers": CompressedIntegers,
    "fp8": FP8,
    "gptq": GPTQ,
    "hqq": HQQ,
    "mxfp4": MXFP4,
    "nvfp4": NVFP4,
    "quanto": QuantoBits,
    "torchao int4": TorchaoInt4,
    "torchao blocks": SwizzledScales,
    "gguf": Gguf,
    "gguf frames": GgufFrames,
    "gguf latent": GgufLatent,
    "gguf reordered": GgufReordered,
    "gguf tiled": GgufTiled,
}


@cache
def open_importer(name: FormName) -> WeightImporter | InPlaceImporter:
    """The code for `name`; the same object each time."""
    options: dict[str, Any] = dict(name.options)
    return _SCHEMES[name.scheme](**options)
