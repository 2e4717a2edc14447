"""Schemes: what users call a way to compress, and what it means for one parameter."""

import re
from dataclasses import dataclass

from hmt.base.errors import ConfigError
from hmt.contracts.blocks import ParamSpec, Role
from hmt.contracts.encoding import Activations, Encoding
from hmt.quant.packed import Format

GROUP_SIZES = (32, 64, 128)
_SCHEME = re.compile(r"w(4|8)a(8|16)(?::(\d+))?")


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weights of linear layers are stored, and what they are multiplied with.

    weights      None keeps every weight as the checkpoint has it
    group_size   inputs that share a scale (int4)
    """

    weights: Encoding | None = None
    group_size: int = 0
    activations: Activations = Activations.FLOAT

    def __str__(self) -> str:
        if self.weights is None:
            return "none"
        bits = "16" if self.activations is Activations.FLOAT else "8"
        if self.weights is Encoding.INT8_CHANNEL:
            return f"w8a{bits}"
        return f"w4a{bits}:{self.group_size}"

    def format_for(self, spec: ParamSpec) -> Format | None:
        """The format to convert `spec` to; None where it stays as published.

        Only linear weights are converted.  Where the group does not divide a row, the largest
        smaller group that does takes its place, and one scale per row (int8) where none does.
        """
        if self.weights is None or spec.role is not Role.LINEAR:
            return None
        if self.weights is Encoding.INT4_GROUP:
            for group in reversed(GROUP_SIZES):
                if group <= self.group_size and spec.shape[1] % group == 0:
                    return Format(self.weights, group, activations=self.activations)
        return Format(Encoding.INT8_CHANNEL, activations=self.activations)


def parse_scheme(text: str) -> Scheme:
    """The scheme called `text`: none, w8a8, w8a16, w4a8 or w4a16, in any case.

    w4 takes a group size, as in "w4a8:64"; 32 if none is given.  ConfigError for anything else.
    """
    name = text.strip().lower()
    if name == "none":
        return Scheme()
    match = _SCHEME.fullmatch(name)
    if match is None:
        raise ConfigError(
            f"quantisation {text!r} is unknown; choose none, w8a8, w8a16, w4a8 or w4a16 "
            "(w4 with a group size, as in w4a8:64, if 32 is not wanted)"
        )
    weights, activations, group = match.groups()
    multiplied = Activations.INT8_TOKEN if activations == "8" else Activations.FLOAT
    if weights == "8":
        if group is not None:
            raise ConfigError(f"{text!r}: w8 has one scale per output row and takes no group size")
        return Scheme(Encoding.INT8_CHANNEL, 0, multiplied)
    size = int(group or GROUP_SIZES[0])
    if size not in GROUP_SIZES:
        choices = ", ".join(map(str, GROUP_SIZES))
        raise ConfigError(f"{text!r}: the group size can be {choices}, not {size}")
    return Scheme(Encoding.INT4_GROUP, size, multiplied)
