"""Rotary positions: the angles that queries and keys are turned by."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hmt.base.errors import CheckpointError
from hmt.contracts.model import RotaryBorder
from hmt.contracts.step import Segment, Step

Parameters = Mapping[str, Any]


class Rotary:
    """Cosines and sines of rotary positions (arXiv 2104.09864) and their long-context variants.

    The variants agree with transformers' of the same name.  Frequencies of "dynamic" and "longrope"
    depend on how long a sequence is: on `Run.whole` or, of tokens behind it, on the positions up to
    each of them.  transformers takes the longest sequence of the batch at each forward pass; here
    each sequence counts for itself, and neither chunks nor what may come change a result.  What
    becomes of keys when a sequence grows past a limit: see `RotaryBorder`.
    """

    def __init__(self, head_dim: int, parameters: Parameters, max_positions: int) -> None:
        """From `rope_parameters` of a configuration: rope_type, rope_theta and its own options.

        head_dim        numbers per head; `partial_rotary_factor` of them are turned
        max_positions   the configuration's max_position_embeddings
        Raises CheckpointError for an unknown rope_type.
        """
        self._type = parameters.get("rope_type") or "default"
        if self._type not in _FREQUENCIES:
            raise CheckpointError(
                f"rope_type {self._type!r} is not supported; HMT has {', '.join(_FREQUENCIES)}"
            )
        self._parameters = dict(parameters)
        partial = 1.0 if self._type == "proportional" else _share(parameters)
        self._dim = int(head_dim * partial)
        self._max_positions = max_positions
        self._sections = tuple(parameters.get("mrope_section") or ())
        self._interleaved = bool(parameters.get("mrope_interleaved"))
        self._compute = _FREQUENCIES[self._type]
        self.attention_scaling = _attention_scaling(self._type, parameters, max_positions)
        self.border = border_of(parameters, max_positions)
        _check_length(self.frequencies(max_positions), self._dim)
        # Frequencies by kind, where positions have been.  None goes: captured steps read them.
        self._kept: dict[tuple[torch.device, bool], Tensor] = {}
        self._last: dict[torch.device, tuple[Step, Tensor, Tensor]] = {}
        self._axes_kept: dict[torch.device, Tensor] = {}  # of `axes`, for captured steps as well

    def frequencies(self, context: int) -> Tensor:
        """Radians per position for a sequence of `context` positions: f32 [dim / 2]."""
        return self._compute(self._parameters, self._dim, context, self._max_positions)

    def kind(self, run: Segment) -> int:
        """What the angles of a run depend on besides its tokens' positions; 0: on nothing."""
        border = self.border
        if border is None:
            return 0
        if border.gradual:
            # Of a token that is the last of its sequence its own position says how many there are.
            return run.rotated if run.rotated > max(border.positions, run.start + 1) else 0
        return int(max(run.rotated, run.context) > border.positions)

    def cos_sin(self, step: Step) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the step's positions: f32 [tokens, dim], each angle twice.

        Times `attention_scaling`; where the positions are.  Kept for the last step of each device,
        which all layers of a model share.
        """
        device = step.positions.device
        last = self._last.get(device)
        if last is None or last[0] is not step:
            frequencies = self._step_frequencies(step)
            angles = self._places(step) * frequencies
            cos, sin = angles.cos(), angles.sin()
            if self.attention_scaling != 1:
                cos, sin = cos * self.attention_scaling, sin * self.attention_scaling
            last = self._last[device] = (step, cos, sin)
        return last[1:]

    def _places(self, step: Step) -> Tensor:
        """What frequencies are multiplied with: int64 [tokens, 1], or [tokens, dim] of axes."""
        if step.axes is None or not self._sections:
            return step.positions[:, None]
        device = step.axes.device
        if device not in self._axes_kept:
            self._axes_kept[device] = self.axes().to(device)
        return step.axes.T[:, self._axes_kept[device]]

    def axes(self) -> Tensor:
        """Of which of three axes the position turns each number: int64 [dim].

        M-RoPE (arXiv 2409.12191): sections of frequencies, one for time, height and width each; or
        in turn, as far as the sections of the last two reach.  Raises CheckpointError where the
        sections are not those of this head.
        """
        half, sections = (self._dim + 1) // 2, self._sections
        known = len(sections) == 3 and all(type(n) is int and n >= 0 for n in sections)
        if not known or sum(sections) != half:
            raise CheckpointError(
                f"mrope_section is {list(sections)}; it must have three numbers, {half} in all"
            )
        axes = torch.zeros(half, dtype=torch.int64)
        for axis in (1, 2):
            if self._interleaved:
                axes[axis : 3 * sections[axis] : 3] = axis
            else:
                axes[sum(sections[:axis]) : sum(sections[: axis + 1])] = axis
        return torch.cat((axes, axes))

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As `cos_sin` of a sequence within the `border`, of int64 positions [n]: f32 [n, dim]."""
        angles = positions[:, None] * self._kept_on(positions.device, long=False)
        scale = self.attention_scaling
        return angles.cos() * scale, angles.sin() * scale

    def _step_frequencies(self, step: Step) -> Tensor:
        """f32 [dim], each twice, or [tokens, dim] where tokens differ."""
        border, device = self.border, step.positions.device
        if border is None:
            return self._kept_on(device, long=False)
        if border.gradual:
            return self._gradual(step, border.positions)
        kinds = [bool(self.kind(run)) for run in step.segments]
        if len(set(kinds)) == 1:
            return self._kept_on(device, long=kinds[0])
        rows = [
            self._kept_on(device, long=long).expand(run.length, -1)
            for long, run in zip(kinds, step.segments, strict=True)
        ]
        return torch.cat(rows)

    def _gradual(self, step: Step, border: int) -> Tensor:
        """Frequencies of each token, of "dynamic": computed where positions are.

        So that a captured step follows its positions past the border.
        """
        counts = torch.cat(
            [(step.positions[run.tokens] + 1).clamp(min=self.kind(run)) for run in step.segments]
        )[:, None]
        stretched = _stretched(self._parameters, self._dim, counts, border)
        usual = self._kept_on(step.positions.device, long=False)
        return torch.where(counts > border, stretched.repeat(1, 2), usual)

    def _kept_on(self, device: torch.device, *, long: bool) -> Tensor:
        """Frequencies [dim], each twice, of sequences beyond the border or within it."""
        key = device, long
        if key not in self._kept:
            limit = self._max_positions if self.border is None else self.border.positions
            frequencies = self.frequencies(limit + long)
            self._kept[key] = torch.cat((frequencies, frequencies)).to(device)
        return self._kept[key]


class NoRotary(Rotary):
    """Positions that turn nothing: the order of tokens is known from other layers (NoPE)."""

    def __init__(self, dim: int, max_positions: int) -> None:
        """`dim` numbers of each head could turn."""
        super().__init__(dim, {"rope_type": "default", "rope_theta": 1.0}, max_positions)

    @override
    def frequencies(self, context: int) -> Tensor:
        return torch.zeros((self._dim + 1) // 2)


def border_of(parameters: Parameters, max_positions: int) -> RotaryBorder | None:
    """Where frequencies begin to depend on a sequence's length; None: they never do."""
    kind = parameters.get("rope_type")
    if kind == "dynamic" and parameters.get("factor") != 1:
        return RotaryBorder(max_positions, gradual=True)
    if kind == "longrope" and parameters["short_factor"] != parameters["long_factor"]:
        return RotaryBorder(int(parameters["original_max_position_embeddings"]), gradual=False)
    return None


def common_border(borders: Iterable[RotaryBorder | None]) -> RotaryBorder | None:
    """The only border of a model's layer types.  Raises CheckpointError where they differ."""
    distinct = {border for border in borders if border is not None}
    if len(distinct) > 1:
        raise CheckpointError(
            "its layer types have rotary positions that change at different lengths "
            f"({', '.join(sorted(map(str, distinct)))}), which HMT does not compute"
        )
    return next(iter(distinct), None)


def check_options(parameters: Parameters) -> None:
    """Raise CheckpointError for an option that would be left aside unseen.

    transformers ignores options that a type does not read; a file that has one means something by
    it, which would silently not be computed.
    """
    kind = parameters.get("rope_type") or "default"
    for name, value in parameters.items():
        if name in _READ.get(kind, {name}) | _ANYWHERE or value in (None, _NEUTRAL.get(name)):
            continue
        raise CheckpointError(
            f"{name} {value!r:.60} among the rotary parameters is not read where rope_type is "
            f"{kind!r} or missing: remove it, or name the rope_type that it belongs to"
        )


def _share(parameters: Parameters) -> float:
    return float(parameters.get("partial_rotary_factor") or 1.0)


def _check_length(frequencies: Tensor, dim: int) -> None:
    if len(frequencies) != (dim + 1) // 2:
        raise CheckpointError(
            f"there are {len(frequencies)} rotary frequencies for {dim} numbers of a head, which "
            f"need {(dim + 1) // 2}"
        )


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
    counts = torch.tensor([max(context, max_positions)])
    return _stretched(parameters, dim, counts, max_positions)


def _stretched(parameters: Parameters, dim: int, counts: Tensor, max_positions: int) -> Tensor:
    """The same for each of int64 counts [..., 1] of positions: f32 [..., dim / 2]."""
    factor = parameters["factor"]
    stretch = factor * counts / max_positions - (factor - 1)
    theta = parameters["rope_theta"] * stretch ** (dim / (dim - 2))
    exponents = torch.arange(0, dim, 2, device=counts.device).float() / dim
    return 1 / theta**exponents


def _proportional(parameters: Parameters, dim: int, context: int, max_positions: int) -> Tensor:
    """A share of the head's frequencies, spaced as for the whole head; the rest does not turn."""
    turned = int(_share(parameters) * dim // 2)
    frequencies = 1 / _periods(parameters["rope_theta"], dim)
    frequencies[turned:] = 0
    return frequencies / float(parameters.get("factor") or 1.0)


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
    "proportional": _proportional,
}
# Options that each type reads, as transformers does.
_LONGER = frozenset({"factor", "original_max_position_embeddings"})
_READ: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": _LONGER | {"low_freq_factor", "high_freq_factor"},
    "yarn": _LONGER
    | {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    "longrope": _LONGER | {"attention_factor", "long_factor", "short_factor"},
    "proportional": frozenset({"factor"}),
}
# What says nothing of numbers where a type does not read it; `mrope_section` divides dimensions
# among axes that agree for text.
_ANYWHERE = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
        "original_max_position_embeddings",
        "mrope_section",
        "mrope_interleaved",
        "finetuned",
    }
)
_NEUTRAL = {"factor": 1, "attention_factor": 1}
