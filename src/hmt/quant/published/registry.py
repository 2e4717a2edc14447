"""The code for each published form, by the name that hmt.formats gives it."""

from collections.abc import Callable
from functools import cache
from typing import Any

from hmt.contracts.checkpoint import FormName
from hmt.quant.published.arranged import Arranged
from hmt.quant.published.awq import AWQ
from hmt.quant.published.bitsandbytes import BitsAndBytesInt8, BitsAndBytesTable
from hmt.quant.published.compressed import CompressedIntegers
from hmt.quant.published.floats import Floats
from hmt.quant.published.floats4 import MXFP4, NVFP4
from hmt.quant.published.form import Form, InPlace
from hmt.quant.published.fp8 import FP8
from hmt.quant.published.gguf import Gguf, GgufLatent
from hmt.quant.published.gptq import GPTQ

_SCHEMES: dict[str, Callable[..., Form | InPlace]] = {
    "in place": InPlace,
    "floats": Floats,
    "arranged": Arranged,
    "awq": AWQ,
    "bitsandbytes int8": BitsAndBytesInt8,
    "bitsandbytes table": BitsAndBytesTable,
    "compressed integers": CompressedIntegers,
    "fp8": FP8,
    "gptq": GPTQ,
    "mxfp4": MXFP4,
    "nvfp4": NVFP4,
    "gguf": Gguf,
    "gguf latent": GgufLatent,
}


@cache
def open_form(name: FormName) -> Form | InPlace:
    """The code for `name`; the same object each time."""
    options: dict[str, Any] = dict(name.options)
    return _SCHEMES[name.scheme](**options)
