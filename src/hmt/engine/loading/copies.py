"""A model's blocks in higher precision, read from the disk when a sequence needs them.

They take room for the two largest blocks, whatever the model's size: nothing of them stays.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from hmt.base.errors import BudgetError, ConfigError
from hmt.base.units import format_bytes
from hmt.contracts.blocks import BlockId, BlockKind
from hmt.contracts.model import Model, ModelSpec
from hmt.engine.config import EngineConfig
from hmt.engine.loading.source import open_source
from hmt.models import open_model
from hmt.weights import BlockLayout

_LEFT: Final = (BlockKind.EMBEDDING, BlockKind.VISION)  # tables are the model's own
_SLOTS: Final = 2  # some families lease two at a time


@dataclass(frozen=True, slots=True)
class Copies:
    """Blocks of another checkpoint of the same model."""

    path: Path
    layouts: Mapping[BlockId, BlockLayout]

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of host memory by purpose."""
        sizes = sorted((layout.slot_bytes for layout in self.layouts.values()), reverse=True)
        staging = max(layout.staging_bytes for layout in self.layouts.values())
        return {"slots": sum(sizes[:_SLOTS]), "staging": staging, "rows": 0, "resident": 0}

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(self.sizes.values())


def copies_within(
    config: EngineConfig, model: Model, host_bytes: int | None, *, on_cpu: bool
) -> tuple[Copies, int]:
    """Blocks of `fallback_model`, and what these leave of the host's memory.

    host_bytes   None: all of the budget
    on_cpu       whether the CPU computes `model`

    Raises as `find_copies`, ConfigError beside a GPU, and BudgetError where nothing is left.
    """
    assert config.fallback_model is not None
    if not on_cpu:
        raise ConfigError(
            "fallback_model is for models that the CPU computes: leave it out, or the GPU; without "
            "it, requests that drift are computed with the model's own weights"
        )
    copies = find_copies(config.fallback_model, model.spec, model.dtype)
    left = (config.host_memory_bytes if host_bytes is None else host_bytes) - copies.nbytes
    if left <= 0:
        raise BudgetError(
            f"blocks of fallback_model={copies.path} need {format_bytes(copies.nbytes)} of host "
            "memory, which is all there is: give more, or leave it out"
        )
    return copies, left


def find_copies(path: Path, spec: ModelSpec, dtype: torch.dtype) -> Copies:
    """Blocks of the model `spec` in the checkpoint or pack `path`, as they are there.

    Raises ConfigError where it is another model, and CheckpointError.
    """
    source = open_source(path)
    model = open_model(source.config, source.path, dtype)
    if _shapes(model.spec) != _shapes(spec):
        raise ConfigError(
            f"fallback_model={path} is another model: its layers have other shapes than those of "
            "the model that was asked for; name the checkpoint that it was quantised from"
        )
    layouts = source.weights(model.spec, None, exact_activations=True).layouts
    return Copies(path, {b: one for b, one in layouts.items() if b.kind not in _LEFT})


def _shapes(spec: ModelSpec) -> dict[BlockId, list[tuple[str, tuple[int, ...]]]]:
    return {
        block.id: [(param.name, tuple(param.shape)) for param in block.params]
        for block in spec.blocks
        if block.id.kind not in _LEFT
    }
