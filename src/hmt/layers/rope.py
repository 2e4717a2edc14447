"""Rotary positions: the angles that queries and keys are turned by."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hmt.base.errors import CheckpointError
from hmt.contracts.step import Step

Parameters = Mapping[str, Any]


class Rotary:
    """Cosines and sines of rotary positions (arXiv 2104.09864) and their long-context variants.

    The variants agree with transformers' of the same name.  Frequencies of "dynamic" and "longrope"
    depend on how long a sequence is.  transformers takes the longest sequence of the batch; here
    each run counts for itself, so what runs beside it never changes a result; and by the positions
    that its sequence may reach, because keys stay as they were rotated when they were appended, and
    a sequence that crossed the limit on its way would hold keys of both kinds.
    """

    def __init__(self, head_dim: int, parameters: Parameters, max_positions: int) -> None:
        """From `rope_parameters` of a configuration: rope_type, rope_theta and its own options.

        head_dim        numbers per head; `partial_rotary_factor` of them are turned
        max_positions   the configuration's max_position_embeddings
        Raises CheckpointError for an unknown rope_type.
        """
        self._type = parameters["rope_type"]
        self._parameters = dict(parameters)
        self._dim = int(head_dim * (parameters.get("partial_rotary_factor") or 1.0))
        self._max_positions = max_positions
        try:
            self._compute = _FREQUENCIES[self._type]
        except KeyError:
            raise CheckpointError(
                f"rope_type {self._type!r} is not supported; HMT has {', '.join(_FREQUENCIES)}"
            ) from None
        self.attention_scaling = _attention_scaling(self._type, parameters, max_positions)
        self.frequencies(max_positions)  # raises where parameters are missing
        # Frequencies by kind, where positions have been.  None goes: captured steps read them.
        self._kept: dict[tuple[torch.device, int], Tensor] = {}
        self._last: dict[torch.device, tuple[Step, Tensor, Tensor]] = {}

    def frequencies(self, context: int) -> Tensor:
        """Radians per position for a sequence of `context` positions: f32 [dim / 2]."""
        return self._compute(self._parameters, self._dim, context, self._max_positions)

    def kind(self, context: int) -> int:
        """The same number for all contexts that have the same frequencies."""
        if self._type == "longrope":
            return int(context > self._parameters["original_max_position_embeddings"])
        return max(context, self._max_positions) if self._type == "dynamic" else 0

    def cos_sin(self, step: Step) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the step's positions: f32 [tokens, dim], each angle twice.

        Times `attention_scaling`; where the positions are.  Kept for the last step of each device,
        which all layers of a model share.
        """
        device = step.positions.device
        last = self._last.get(device)
        if last is None or last[0] is not step:
            angles = step.positions[:, None] * self._step_frequencies(step)
            cos, sin = angles.cos(), angles.sin()
            if self.attention_scaling != 1:
                cos, sin = cos * self.attention_scaling, sin * self.attention_scaling
            last = self._last[device] = (step, cos, sin)
        return last[1:]

    def _step_frequencies(self, step: Step) -> Tensor:
        """f32 [dim], each twice, or [tokens, dim] where runs differ."""
        device = step.positions.device
        kept = [self._kept_on(device, run.reach) for run in step.runs]
        if all(one is kept[0] for one in kept):
            return kept[0]
        rows = [one.expand(run.length, -1) for one, run in zip(kept, step.runs, strict=True)]
        return torch.cat(rows)

    def _kept_on(self, device: torch.device, context: int) -> Tensor:
        """Frequencies [dim], each twice."""
        key = device, self.kind(context)
        if key not in self._kept:
            frequencies = self.frequencies(context)
            self._kept[key] = torch.cat((frequencies, frequencies)).to(device)
        return self._kept[key]


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's attention scaling for a context `factor` times as long (arXiv 2309.00071)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _attention_scaling(rope_type: str, parameters: Parameters, max_positions: int) -> float:
    """What cosines and sines are multiplied with."""
    if rope_type not in ("yarn", "longrope"):
        return 1.0
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    factor = _context_factor(parameters, max_positions)
    if rope_type == "yarn":
        mscale, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
        if mscale and all_dim:
            return yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
        return yarn_mscale(factor)
    if factor <= 1:
        return 1.0
    trained = parameters["original_max_position_embeddings"]
    return math.sqrt(1 + math.log(factor) / math.log(trained))


def _context_factor(parameters: Parameters, max_positions: int) -> float:
    """How many times the trained context the model claims to reach."""
    factor = parameters.get("factor")
    if factor is None:
        return max_positions / parameters["original_max_position_embeddings"]
    return float(factor)


def _periods(theta: float, dim: int) -> Tensor:
    """Positions per radian: f32 [dim / 2]."""
    periods: Tensor = theta ** (torch.arange(0, dim, 2).float() / dim)
    return periods


def _default(parameters: Parameters, dim: int, context: int, max_positions: int) -> Tensor:
    return 1 / _periods(parameters["rope_theta"], dim)


def _linear(parameters: Parameters, dim: int, context: int, max_positions: int) -> Tensor:
    return 1 / _periods(parameters["rope_theta"], dim) / parameters["factor"]


def _dynamic(parameters: Parameters, dim: int, context: int, max_positions: int) -> Tensor:
    """NTK-aware scaling of the base, once the context is longer than the model's own."""
    factor = parameters["factor"]
    stretch = factor * max(context, max_positions) / max_positions - (factor - 1)
    return 1 / _periods(parameters["rope_theta"] * stretch ** (dim / (dim - 2)), dim)


def _llama3(parameters: Parameters, dim: int, context: int, max_positions: int) -> Tensor:
    """Llama 3.1: long wavelengths are stretched, short ones kept, those between are blended."""
    base = 1 / _periods(parameters["rope_theta"], dim)
    factor, trained = parameters["factor"], parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = trained * base / (2 * math.pi)  # full turns within the trained context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * base / factor + kept * base


def _yarn(parameters: Parameters, dim: int, context: int, max_positions: int) -> Tensor:
    """YaRN: interpolates slow dimensions, keeps fast ones, ramps between (arXiv 2309.00071)."""
    theta, trained = parameters["rope_theta"], parameters["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        """Where a dimension makes this many turns within the trained context."""
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(parameters.get("beta_fast") or 32)
    high = dimension(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    kept = 1 - ((torch.arange(dim // 2).float() - low) / (high - low)).clamp(0, 1)
    periods = _periods(theta, dim)
    stretched = _context_factor(parameters, max_positions) * periods
    return 1 / stretched * (1 - kept) + 1 / periods * kept


def _longrope(parameters: Parameters, dim: int, context: int, max_positions: int) -> Tensor:
    """LongRoPE: one factor per dimension, from one of two lists (arXiv 2402.13753)."""
    long = context > parameters["original_max_position_embeddings"]
    factors = torch.tensor(parameters["long_factor" if long else "short_factor"]).float()
    return 1 / (factors * _periods(parameters["rope_theta"], dim))


_FREQUENCIES: dict[str, Callable[[Parameters, int, int, int], Tensor]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
