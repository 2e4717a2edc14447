"""What methods of quantisation are given and return.  Pure tensors; no model is known."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Flag, auto
from typing import Protocol

import torch
from torch import Tensor

from hmt.quant.fp4 import fp4_numbers


class Needs(Flag):
    """What a method wants to know of the inputs of a linear layer."""

    NOTHING = 0
    HESSIAN = auto()  # sum over tokens of x x^T
    MEAN_ABS = auto()  # mean over tokens of |x|
    SAMPLES = auto()  # some of the tokens' inputs themselves
    MAX_ABS = auto()  # largest |x| of all tokens


@dataclass(frozen=True, slots=True)
class Target:
    """The form that a weight shall have.

    kind        "int", "nvfp4" or "mxfp4"
    bits        of an "int" code, 2 to 8; 4 for the others
    group_size  inputs that share a scale; 0: a row has one; nvfp4 16, mxfp4 32
    symmetric   no zero points ("int" only)
    """

    kind: str = "int"
    bits: int = 4
    group_size: int = 32
    symmetric: bool = True


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of the inputs of linear layers that share them; what was not asked for is None.

    tokens    how many tokens were seen
    hessian   f32 [inputs, inputs], the sum of x x^T over them, not divided
    mean_abs  f32 [inputs]
    samples   f32 [rows, inputs]
    max_abs   f32 [inputs]
    """

    tokens: int
    hessian: Tensor | None = None
    mean_abs: Tensor | None = None
    samples: Tensor | None = None
    max_abs: Tensor | None = None


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight in its target form.

    target        what it is
    codes         int8 [outputs, inputs]: "int": signed codes from -2^(bits-1); FP4: 0 to 15
    scales        [outputs, groups]: f32 for "int"; float8_e4m3fn for nvfp4; uint8 exponents
                  for mxfp4
    zero_points   int8 [outputs, groups] in the range of codes, or None when symmetric
    global_scale  f32 scalar of nvfp4 (multiplies codes * scales), or None
    """

    target: Target
    codes: Tensor
    scales: Tensor
    zero_points: Tensor | None = None
    global_scale: Tensor | None = None

    def rows(self, rows: slice) -> "QuantizedWeight":
        """Some of its outputs."""
        zeros = self.zero_points
        return replace(
            self,
            codes=self.codes[rows],
            scales=self.scales[rows],
            zero_points=None if zeros is None else zeros[rows],
        )

    def steps(self) -> Tensor:
        """f32 [outputs, groups]: what a code is multiplied with."""
        if self.target.kind == "mxfp4":
            return torch.exp2(self.scales.float() - 127)
        if self.global_scale is not None:
            return self.scales.float() * self.global_scale
        return self.scales.float()

    def dequantized(self) -> Tensor:
        """f32 [outputs, inputs]: the numbers that the codes stand for."""
        steps = self.steps()
        grouped = self.codes.view(*steps.shape, -1)
        if self.target.kind != "int":
            numbers = fp4_numbers(grouped)
        elif self.zero_points is None:
            numbers = grouped.float()
        else:
            numbers = grouped.float() - self.zero_points.float()[..., None]
        return (numbers * steps[..., None]).view(self.codes.shape)


class Method(Protocol):
    """A method that quantises one weight at a time."""

    @property
    def needs(self) -> Needs:
        """What it wants to know of the inputs."""
        ...

    def quantize(self, weight: Tensor, inputs: Statistics, target: Target) -> QuantizedWeight:
        """weight f32 [outputs, inputs], not changed."""
        ...


class Scaling(Protocol):
    """A method that moves a factor of each input from activations into weights.

    What makes the activations is divided by the factors, and all weights behind it are multiplied,
    so that nothing changes but how well both are rounded.
    """

    @property
    def needs(self) -> Needs:
        """What it wants to know of the inputs."""
        ...

    def factors(self, inputs: Statistics, weights: Iterable[tuple[Tensor, Target]]) -> Tensor:
        """f32 [inputs], above 0.

        inputs    of all weights together
        weights   f32 [outputs, inputs] that are multiplied with these, and their forms; gone
                  through once, and not changed
        """
        ...
