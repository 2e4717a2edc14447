"""Schemes: what users call a way to compress, and what it means for one parameter."""

import re
from dataclasses import dataclass, replace

from hmt.base.errors import ConfigError
from hmt.contracts.blocks import ParamSpec, Role
from hmt.contracts.encoding import PANEL_BLOCK, Activations, Encoding
from hmt.quant.packed import Format

GROUP_SIZES = (32, 64, 128)
NAMES = "none, w8a8, w8a16, w4a8, w4a16, nvfp4a8, nvfp4a16, mxfp4a8 or mxfp4a16"
_SCHEME = re.compile(r"(w4|w8|nvfp4|mxfp4)a(8|16)(?::(\d+))?")
_WEIGHTS = {"nvfp4": (Encoding.NVFP4, 16), "mxfp4": (Encoding.MXFP4, 32)}


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weights of linear layers are stored, and what they are multiplied with.

    weights      None keeps every weight as the checkpoint has it
    group_size   inputs that share a scale; 0 with INT8_CHANNEL, whose rows have one each
    """

    weights: Encoding | None = None
    group_size: int = 0
    activations: Activations = Activations.FLOAT

    @property
    def bytes_alike(self) -> "Scheme":
        """The same for all schemes that store the same bytes: activations change none."""
        return replace(self, activations=Activations.FLOAT)

    def __str__(self) -> str:
        if self.weights is None:
            return "none"
        bits = "16" if self.activations is Activations.FLOAT else "8"
        match self.weights:
            case Encoding.INT8_CHANNEL:
                return f"w8a{bits}"
            case Encoding.INT8_GROUP:
                return f"w8a{bits}:{self.group_size}"
            case Encoding.INT4_GROUP:
                return f"w4a{bits}:{self.group_size}"
            case _:
                return f"{self.weights}a{bits}"

    def format_for(self, spec: ParamSpec) -> Format | None:
        """The format to convert `spec` to; None where it stays as published.

        Only linear weights are converted.  Where the group does not divide a row, the largest
        smaller group that does takes its place, and one scale per row (int8) where none does.
        """
        if self.weights is None or spec.role is not Role.LINEAR:
            return None
        columns, rounded = spec.shape[1], self.activations
        match self.weights:
            case Encoding.NVFP4 | Encoding.MXFP4 if columns % PANEL_BLOCK == 0:
                return Format(self.weights, self.group_size, activations=rounded)
            case Encoding.INT4_GROUP | Encoding.INT8_GROUP:
                for group in reversed(GROUP_SIZES):
                    if group <= self.group_size and columns % group == 0:
                        return Format(self.weights, group, activations=rounded)
        return Format(Encoding.INT8_CHANNEL, activations=rounded)


def parse_scheme(text: str) -> Scheme:
    """The scheme called `text`: none, w8a8, w4a16, nvfp4a8 and so on (`NAMES`), in any case.

    w4 and w8 take a group size, as in "w4a8:64".  Without one w4 has 32, and w8 one scale per row.
    Raises ConfigError for anything else.
    """
    name = text.strip().lower()
    if name == "none":
        return Scheme()
    match = _SCHEME.fullmatch(name)
    if match is None:
        raise ConfigError(
            f"quantisation {text!r} is unknown; choose {NAMES} "
            "(w4 and w8 with a group size, as in w4a8:64, if that is wanted)"
        )
    weights, activations, group = match.groups()
    rounded = Activations.INT8_TOKEN if activations == "8" else Activations.FLOAT
    if weights in _WEIGHTS:
        encoding, size = _WEIGHTS[weights]
        if group is not None:
            raise ConfigError(f"{text!r}: {weights} has groups of {size} and takes no group size")
        return Scheme(encoding, size, rounded)
    if weights == "w8" and group is None:
        return Scheme(Encoding.INT8_CHANNEL, 0, rounded)
    size = int(group or GROUP_SIZES[0])
    if size not in GROUP_SIZES:
        choices = ", ".join(map(str, GROUP_SIZES))
        raise ConfigError(f"{text!r}: the group size can be {choices}, not {size}")
    return Scheme(Encoding.INT4_GROUP if weights == "w4" else Encoding.INT8_GROUP, size, rounded)
