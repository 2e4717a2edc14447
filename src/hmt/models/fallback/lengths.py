"""Rotary positions of transformers' modules whose frequencies depend on a sequence's length.

Their modules take the length from the largest position of a call, so that the angles of a prompt
would depend on how it is cut into chunks, and on what else is in the step.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hmt.base.errors import CheckpointError
from hmt.contracts.model import RotaryBorder
from hmt.contracts.step import Segment
from hmt.layers import border_of, common_border
from hmt.models.config import Config, rotary_parameters
from hmt.models.fallback.call_context import current_context
from hmt.models.fallback.sizes import longest_context


class ByLength(nn.Module):
    """In place of a rotary module: calls it once for each length that its tokens go by.

    A module is told a length by one more position, the last of so many, whose row is dropped.
    """

    def __init__(self, inner: nn.Module, border: RotaryBorder) -> None:
        super().__init__()
        self.inner = inner
        self.border = border

    def __getattr__(self, name: str) -> Any:
        """What the model asks its module for."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the inner module's, for position_ids int64 [..., tokens]; results [1, tokens, ...]."""
        lengths, border = current_context().lengths, self.border
        if lengths is None:
            return self._call(x, position_ids, 1, args, kwargs)
        longest = lengths.max() if border.gradual else border.positions + 1
        kinds = torch.where(lengths > border.positions, lengths.clamp(max=longest), 1)
        parts, places = [], []
        for length in kinds.unique().tolist():
            rows = torch.where(kinds == length)[0]
            some = position_ids[..., rows.to(position_ids.device)]
            parts.append(self._call(x, some, length, args, kwargs))
            places.append(rows)
        order = torch.cat(places).argsort()
        return _joined(parts, order)

    def _call(
        self, x: Tensor, positions: Tensor, length: int, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        # transformers keeps the longest frequencies that it had until a short call comes.
        self.inner(x, torch.zeros_like(positions[..., :1]), *args, **kwargs)
        last = torch.full_like(positions[..., :1], length - 1)
        result = self.inner(x, torch.cat((positions, last), dim=-1), *args, **kwargs)
        if isinstance(result, Tensor):
            return result[:, :-1]
        return tuple(rows[:, :-1] for rows in result)


def _joined(parts: list[Any], order: Tensor) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat(parts, dim=1)[:, order.to(parts[0].device)]
    return tuple(_joined(list(rows), order) for rows in zip(*parts, strict=True))


def by_length(model: nn.Module, border: RotaryBorder) -> None:
    """Replace the rotary modules of `model` whose frequencies depend on a length."""
    for path, module in list(model.named_modules()):
        kinds = getattr(module, "rope_type", None)
        if any(kind in ("dynamic", "longrope") for kind in _each(kinds)):
            holder, _, name = path.rpartition(".")
            setattr(model.get_submodule(holder), name, ByLength(module, border))


def border_in(config: Config) -> RotaryBorder | None:
    """Where a configuration's frequencies begin to depend on a length.  Raises CheckpointError."""
    borders = []
    for parameters in rotary_parameters(config):
        if parameters.get("rope_type", "default") == "default":
            check_typed(parameters)
        try:
            # Not the longest context, which dynamic frequencies stretch.
            limit = getattr(config, "max_position_embeddings", None) or longest_context(config)
            borders.append(border_of(parameters, limit))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"rope_parameters {parameters} cannot be used: {type(error).__name__} {error}"
            ) from error
    return common_border(borders)


def check_typed(parameters: Any) -> None:
    """Raise CheckpointError for a scaling factor of no type, which transformers leaves aside."""
    if parameters.get("factor") not in (None, 1):
        raise CheckpointError(
            f"rope_parameters has factor {parameters['factor']!r:.40} and no rope_type that would "
            "scale by it: name the type"
        )


def check_share(model: nn.Module, config: Config) -> None:
    """Raise CheckpointError where a share of each head is asked for and whole heads are turned.

    Rotary modules that do not read partial_rotary_factor leave it aside without a word.
    """
    shares = [p.get("partial_rotary_factor") or 1 for p in rotary_parameters(config)]
    if all(share == 1 for share in shares):
        return
    try:
        dim = getattr(config, "head_dim", None)
    except RuntimeError:  # of configurations in which layers differ
        return
    for module in model.modules() if isinstance(dim, int) else ():
        frequencies = getattr(module, "inv_freq", None)
        plain = getattr(module, "rope_type", None) == "default"
        if plain and isinstance(frequencies, Tensor) and 2 * len(frequencies) == dim:
            raise CheckpointError(
                f"partial_rotary_factor is {min(shares)}, and transformers' "
                f"{type(module).__name__} turns whole heads"
            )


def lengths_of(runs: Sequence[Segment]) -> Tensor:
    """The length that the frequencies of each token go by: int64 [tokens]."""
    return torch.cat(
        [torch.arange(run.start + 1, run.context + 1).clamp(min=run.rotated) for run in runs]
    )


def _each(kinds: Any) -> list[Any]:
    return list(kinds.values()) if isinstance(kinds, dict) else [kinds]
