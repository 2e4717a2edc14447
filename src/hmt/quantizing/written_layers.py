"""Layers that were quantised, as they are read again."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from hmt.contracts.blocks import TRUNK, BlockId
from hmt.engine.loading.source import target
from hmt.formats.quantized import find_forms
from hmt.formats.safetensors import read_header
from hmt.quant import Scheme
from hmt.quantizing.job import Job
from hmt.quantizing.memory_plan import Layouts
from hmt.quantizing.units import LayerWork
from hmt.weights import bind, lay_out


def written_layouts(job: Job, work: LayerWork, shard: Path) -> Layouts:
    """The blocks of a layer as they lie in its shard, which is complete."""
    config = {**job.checkpoint.config, "quantization_config": dict(job.section)}
    records = read_header(shard)
    forms = find_forms(shard.parent, config, None, records)
    # With what belongs to no layer, as published: by its embedding's name others are found.
    rest = {record.name: record for record in job.works[-1].copied}
    written = replace(
        job.checkpoint, path=shard.parent, config=config, records={**rest, **records},
        forms=forms.forms, spare=frozenset(forms.spare),
    )  # fmt: skip
    members = (work.index, TRUNK)
    blocks = tuple(block for block in job.model.spec.blocks if block.id.layer in members)
    bound = bind(replace(job.model.spec, blocks=blocks), written)
    mine = {block: found for block, found in bound.items() if block.layer == work.index}
    laid_out: dict[BlockId, Any] = lay_out(mine, target(Scheme()))
    return laid_out
