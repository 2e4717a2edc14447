"""Methods by the names that users give."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from hmt.base.errors import ConfigError
from hmt.quant.methods.awq import AWQ, Clipping
from hmt.quant.methods.gptq import GPTQ
from hmt.quant.methods.interface import Method, Needs, Scaling
from hmt.quant.methods.rounding import Rounding
from hmt.quant.methods.signround import SignRound
from hmt.quant.methods.smoothquant import SmoothQuant

_METHODS: Final[Mapping[str, Method]] = {
    "rtn": Rounding(),
    "gptq": GPTQ(),
    "signround": SignRound(),
}
_STEPS: Final = ("rotate", "smoothquant", "awq")


@dataclass(frozen=True, slots=True)
class Procedure:
    """What is done to a model's weights, in this order.

    rotation   seed of the rotation of hidden states; None: they stay
    scaling    what moves factors from activations into weights, or None
    method     how weights are rounded
    """

    rotation: int | None
    scaling: Scaling | None
    method: Method

    @property
    def needs(self) -> Needs:
        """What is to be known of the inputs of linear layers."""
        scaling = Needs.NOTHING if self.scaling is None else self.scaling.needs
        return self.method.needs | scaling

    @property
    def changes_weights(self) -> bool:
        """Whether weights are others before they are rounded."""
        return self.rotation is not None or self.scaling is not None


def open_method(name: str) -> Method:
    """The method of rounding called `name`.  Raises ConfigError."""
    if name not in _METHODS:
        raise ConfigError(
            f"the method {name!r} is unknown; choose {', '.join((*_METHODS, *_STEPS))}, or several "
            "with commas between, such as rotate,gptq"
        )
    return _METHODS[name]


def open_procedure(names: str) -> Procedure:
    """Methods by name, such as "gptq", "awq", "rotate,awq,gptq" or "rotate=3,smoothquant=0.7".

    Where no method of rounding is named, awq clips and all others round to the nearest.
    Raises ConfigError.
    """
    rotation: int | None = None
    scaling: Scaling | None = None
    method: Method | None = None
    for number, name in enumerate(names.split(",")):
        step, given, value = name.partition("=")
        if method is not None or (step in _STEPS and _is_late(step, rotation, scaling)):
            raise ConfigError(
                f"--method {names}: {name} cannot come as number {number + 1}; the order is "
                "rotate, then smoothquant or awq, then one of " + ", ".join(_METHODS)
            )
        if step == "rotate":
            rotation = int(_number(names, name, value)) if given else 0
        elif step == "smoothquant":
            scaling = SmoothQuant(_number(names, name, value)) if given else SmoothQuant()
            if not 0 <= scaling.alpha <= 1:
                raise ConfigError(f"--method {names}: smoothquant takes a share from 0 to 1")
        elif step == "awq" and not given:
            scaling = AWQ()
        else:
            method = open_method(name)
    if method is None:
        method = Clipping() if isinstance(scaling, AWQ) else Rounding()
    return Procedure(rotation, scaling, method)


def _is_late(step: str, rotation: int | None, scaling: Scaling | None) -> bool:
    return scaling is not None or (step == "rotate" and rotation is not None)


def _number(names: str, name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ConfigError(
            f"--method {names}: {name} has no number; write it like rotate=3 (a seed) or "
            "smoothquant=0.7 (a share)"
        ) from None
