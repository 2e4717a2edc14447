"""The matrices that are trained: of which linear layers, their first numbers, and their files."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from hmt.base.errors import ConfigError
from hmt.contracts.blocks import BlockId, BlockKind, BlockSpec, ParamSpec, Role
from hmt.contracts.model import ModelSpec
from hmt.finetuning.options import FinetuneOptions
from hmt.weights.adapters import is_adapted

# What every token goes through; ROUTER: an expert that all share.
_KINDS = (BlockKind.ATTENTION, BlockKind.FFN, BlockKind.ROUTER)
_WEIGHT = ".weight"
Place = tuple[BlockId, str]


@dataclass(frozen=True, slots=True)
class Module:
    """A linear layer of the checkpoint; several parameters may be parts of one.

    name          without ".weight"
    inputs, outputs   of the whole layer
    parts         by parameter: its rows of the layer
    """

    name: str
    inputs: int
    outputs: int
    parts: Mapping[Place, tuple[int, int]]

    def numbers(self, rank: int) -> int:
        """Of both matrices."""
        return rank * (self.inputs + self.outputs)


@dataclass(frozen=True, slots=True)
class Trained:
    """What is added to one parameter's products: scale * (x down^T) up[rows]^T.

    down   [rank, in]; up [out, rank]
    rows   first and past last of the parameter's own
    """

    down: Tensor
    up: Tensor
    rows: tuple[int, int]
    scale: float

    def __call__(self, x: Tensor) -> Tensor:
        """For x [tokens, in]: [tokens, rows], in x's dtype."""
        up = self.up[slice(*self.rows)]
        return ((x.float() @ self.down.T) @ up.T * self.scale).to(x.dtype)


def find_modules(
    spec: ModelSpec, tensors: Sequence[str] | frozenset[str], targets: Sequence[str]
) -> list[Module]:
    """The linear layers that get adapters, by name.

    tensors   names of the checkpoint's
    targets   see FinetuneOptions
    Raises ConfigError where one of `targets` is no such layer.
    """
    found: dict[str, dict[Place, ParamSpec]] = {}
    for block, param in _trainable(spec, named=bool(targets)):
        named = [source for source in param.sources if source.endswith(_WEIGHT)]
        if named:
            name = next((source for source in named if source in tensors), named[0])
            parts = found.setdefault(name.removesuffix(_WEIGHT), {})
            parts[block.id, param.name] = param
    known = {name.rpartition(".")[2] for name in found}
    if missing := sorted({*targets} - known):
        raise ConfigError(
            f"--targets {missing[0]} is no linear layer that {spec.architecture} can train an "
            f"adapter of; there are {', '.join(sorted(known))}"
        )
    return [
        _module(name, parts)
        for name, parts in sorted(found.items())
        if not targets or name.rpartition(".")[2] in targets
    ]


def _trainable(spec: ModelSpec, *, named: bool) -> Iterator[tuple[BlockSpec, ParamSpec]]:
    # Of models with experts peft takes gate_proj, up_proj and down_proj, wherever they are, for
    # these experts' matrices, so adapters of others are for those that ask for them.
    kinds = _KINDS if named or not spec.experts_per_token else (BlockKind.ATTENTION,)
    for block in spec.blocks:
        if block.id.kind in kinds:
            for param in block.params:
                if param.role is Role.LINEAR and is_adapted(block.id, param):
                    yield block, param


def _module(name: str, parts: Mapping[Place, ParamSpec]) -> Module:
    rows = {place: param.rows or (0, param.shape[0]) for place, param in parts.items()}
    inputs = next(iter(parts.values())).shape[1]
    return Module(name, inputs, max(end for _, end in rows.values()), rows)


@dataclass(slots=True)
class Adapters:
    """Matrices of all modules, in f32.

    down   by module [rank, in], drawn as torch draws a linear layer's (Kaiming, uniform)
    up     by module [out, rank], zeros at first, so that the model begins as it is
    """

    modules: Sequence[Module]
    options: FinetuneOptions
    down: dict[str, Tensor] = field(default_factory=dict)
    up: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.options.seed)
        rank = self.options.rank
        for module in self.modules:
            bound = 1 / math.sqrt(module.inputs)
            down = torch.empty(rank, module.inputs).uniform_(-bound, bound, generator=generator)
            self.down[module.name] = down.requires_grad_()
            self.up[module.name] = torch.zeros(module.outputs, rank, requires_grad=True)

    @property
    def parameters(self) -> list[Tensor]:
        """All matrices, in an order that stays."""
        return [one for m in self.modules for one in (self.down[m.name], self.up[m.name])]

    def trained(self) -> dict[Place, Trained]:
        """What is added, by parameter."""
        scale = self.options.alpha / self.options.rank
        return {
            place: Trained(self.down[module.name], self.up[module.name], rows, scale)
            for module in self.modules
            for place, rows in module.parts.items()
        }

    def files(self, base: str) -> dict[str, bytes]:
        """What peft reads, by file; `base` is the model that they belong to."""
        config: dict[str, Any] = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.options.rank,
            "lora_alpha": self.options.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "inference_mode": True,
            "target_modules": [module.name for module in self.modules],
        }
        tensors = {}
        for module in self.modules:
            for which, matrix in (("A", self.down), ("B", self.up)):
                name = f"base_model.model.{module.name}.lora_{which}.weight"
                tensors[name] = matrix[module.name].detach().contiguous()
        return {
            "adapter_config.json": json.dumps(config, indent=1).encode(),
            "adapter_model.safetensors": save(tensors, {"format": "pt"}),
        }
