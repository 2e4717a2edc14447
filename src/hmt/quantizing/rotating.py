"""Rotated hidden states: QuaRot's (arXiv 2404.00456) and what it takes of each parameter.

Hidden states are multiplied with one random Hadamard matrix R.  A norm without weights does not see
that; so norms' weights move into what reads them, which is multiplied with R, and what adds to the
hidden states gives them rotated.  The values of each head are rotated in the same way, between
v_proj and o_proj.  What would have to be done while the model computes is left out: the rotation in
front of down_proj, and those of queries and keys behind their positions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from hmt.base.errors import ConfigError
from hmt.contracts.blocks import TRUNK, BlockId, BlockKind, BlockSpec
from hmt.contracts.model import ModelSpec
from hmt.quant.methods.hadamard import Rotation, random_rotation
from hmt.quantizing.changes import Change, Changes
from hmt.quantizing.structure import FOLDABLE, ParamId, foldings

_EMBEDDING: Final = ParamId(BlockId(TRUNK, BlockKind.EMBEDDING), "weight")
_FINAL: Final = ParamId(BlockId(TRUNK, BlockKind.HEAD), "norm")
_ADDING: Final = frozenset({"o_proj", "down_proj", "shared_down_proj"})
# Neither read hidden states nor add to them.
_INSIDE: Final = frozenset(
    {"q_norm", "k_norm", "q_a_norm", "kv_a_norm", "q_b_proj", "kv_b_proj", "router_bias"}
)

Norms = Mapping[ParamId, Tensor]


@dataclass(frozen=True, slots=True)
class HiddenRotation:
    """The rotation of a model's hidden states.

    hidden   of these
    values   of each head's values; None: there is none of their size
    """

    spec: ModelSpec
    hidden: Rotation
    values: Rotation | None

    def trunk(self, norms: Norms, changes: Changes) -> Changes:
        """`changes` with what becomes of the embedding, the last norm and the output layer."""
        changes.add(_EMBEDDING, self.hidden)
        changes.add(_FINAL, torch.ones_like)
        reads = self._reading(norms[_FINAL])
        for block in self.spec.blocks:
            if block.id.kind is BlockKind.HEAD:
                changes.add(ParamId(block.id, "weight"), reads)
        return changes

    def norms(self, layer: int) -> list[ParamId]:
        """Whose numbers `layer` or, for TRUNK, `trunk` wants to know."""
        if layer == TRUNK:
            return [_FINAL]
        found = foldings(self.spec.architecture, self._blocks(layer))
        return [folding.before for folding in found if folding.before.name == "norm"]

    def layer(self, index: int, norms: Norms, changes: Changes) -> Changes:
        """`changes` with what becomes of a layer's parameters, and of the embedding."""
        blocks = self._blocks(index)
        changes.add(_EMBEDDING, self.hidden)
        for folding in foldings(self.spec.architecture, blocks):
            if folding.before.name == "norm":
                changes.add(folding.before, torch.ones_like)
                reads = self._reading(norms[folding.before])
                for place in folding.behind:
                    changes.add(place, reads)
        for block in blocks:
            if block.id.kind is BlockKind.ATTENTION and self.values is not None:
                _rotate_values(changes, block, self.values)
            for param in block.params:
                place, name = ParamId(block.id, param.name), param.name.removesuffix("_bias")
                if name in _ADDING:
                    changes.add(place, self._added)
        return changes

    def check(self) -> None:
        """Raise ConfigError unless all that reads hidden states is known."""
        layers = range(self.spec.layers)
        for layer in layers:
            norms = {place: torch.ones(1) for place in self.norms(layer)}
            known = self.layer(layer, norms, Changes())
            for block in self._blocks(layer):
                for param in block.params:
                    place, name = ParamId(block.id, param.name), param.name.removesuffix("_bias")
                    if place not in known and name not in _INSIDE and param.name == name:
                        raise ConfigError(
                            f"what {place.name} of {place.block} has to do with hidden states is "
                            "not known, so that these cannot be rotated: leave rotate out"
                        )

    def _blocks(self, layer: int) -> list[BlockSpec]:
        return [block for block in self.spec.blocks if block.id.layer == layer]

    def _reading(self, norm: Tensor) -> Change:
        return lambda weight: self.hidden(weight * norm.to(weight))

    def _added(self, numbers: Tensor) -> Tensor:
        """Rows of a matrix, or a bias, give numbers of hidden states."""
        if numbers.dim() == 1:
            return self.hidden(numbers)
        return self.hidden(numbers.T).T.contiguous()


def _rotate_values(changes: Changes, block: BlockSpec, values: Rotation) -> None:
    """Of an attention's block, where heads' values come from and where they go."""
    size = len(values.signs)
    shapes = {param.name: param.shape for param in block.params}
    made = "v_proj" if "v_proj" in shapes else "kv_b_proj"
    heads = shapes["o_proj"][1] // size if made == "kv_b_proj" else shapes["v_proj"][0] // size

    def rotated(numbers: Tensor) -> Tensor:
        by_head = numbers.reshape(heads, -1, *numbers.shape[1:]).clone()
        own = by_head[:, -size:]  # behind keys, where they have a matrix together
        by_head[:, -size:] = values(own.transpose(1, -1)).transpose(1, -1)
        return by_head.view(numbers.shape)

    for name in (made, f"{made}_bias"):
        if name in shapes:
            changes.add(ParamId(block.id, name), rotated)
    changes.add(
        ParamId(block.id, "o_proj"),
        lambda weight: values(weight.view(len(weight), -1, size)).view(weight.shape),
    )


def hidden_rotation(spec: ModelSpec, seed: int) -> HiddenRotation:
    """That of `seed`.  Raises ConfigError where a model cannot be rotated."""
    if spec.architecture not in FOLDABLE:
        raise ConfigError(
            f"hidden states of {spec.architecture} cannot be rotated, only those of "
            f"{', '.join(sorted(FOLDABLE))}: leave rotate out of --method"
        )
    values = None
    size = _value_size(spec)
    if size is not None:
        try:
            values = random_rotation(size, seed + 1)
        except ConfigError:  # hidden states are rotated all the same
            values = None
    found = HiddenRotation(spec, random_rotation(spec.hidden_size, seed), values)
    found.check()
    return found


def _value_size(spec: ModelSpec) -> int | None:
    """Of one head: its columns of o_proj."""
    columns = [
        param.shape[1] for block in spec.blocks for param in block.params if param.name == "o_proj"
    ]
    return columns[0] // spec.attention_heads if columns else None
