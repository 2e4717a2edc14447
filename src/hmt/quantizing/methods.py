"""Methods by the names that users give."""

from collections.abc import Mapping
from typing import Final

from hmt.base.errors import ConfigError
from hmt.quant.methods.gptq import GPTQ
from hmt.quant.methods.interface import Method
from hmt.quant.methods.rounding import Rounding
from hmt.quant.methods.signround import SignRound

_METHODS: Final[Mapping[str, Method]] = {
    "rtn": Rounding(),
    "gptq": GPTQ(),
    "signround": SignRound(),
}


def open_method(name: str) -> Method:
    """The method called `name`.  Raises ConfigError."""
    if name not in _METHODS:
        raise ConfigError(f"the method {name!r} is unknown; choose {', '.join(_METHODS)}")
    return _METHODS[name]
