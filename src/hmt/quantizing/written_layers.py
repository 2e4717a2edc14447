"""Layers that were quantised, as they are read again."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from hmt.contracts.blocks import BlockId
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
    written = replace(
        job.checkpoint, path=shard.parent, config=config, records=records, fp8_tile=None,
        forms=forms.forms, spare=frozenset(forms.spare),
    )  # fmt: skip
    blocks = tuple(block for block in job.model.spec.blocks if block.id.layer == work.index)
    bound = bind(replace(job.model.spec, blocks=blocks), written)
    found: dict[BlockId, Any] = lay_out(bound, target(Scheme()))
    return found
