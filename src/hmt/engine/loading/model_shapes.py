"""Models of which only the configuration is there: enough to plan, as if they were packs."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hmt.base.errors import CheckpointError, ConfigError
from hmt.contracts.blocks import TRUNK, BlockId, BlockKind, BlockSpec, ParamSpec, Role
from hmt.contracts.checkpoint import FileRange
from hmt.contracts.encoding import Activations, Encoding
from hmt.contracts.model import Model
from hmt.engine.config import EngineConfig
from hmt.engine.loading.demand import demand_of
from hmt.engine.loading.source import target
from hmt.formats.gguf import FILE_TYPES, FileType
from hmt.models import open_model
from hmt.planner import Demand
from hmt.planner.builtin import builtin_names, builtin_text
from hmt.quant import Format, Scheme
from hmt.quant.repacking import gguf_format
from hmt.weights import BlockLayout, lay_out
from hmt.weights.binding import BoundBlock, BoundParam, BoundPart
from hmt.weights.layout import AlignedRead

_DTYPES = {
    "bfloat16": Encoding.BF16,
    "float16": Encoding.F16,
    "float32": Encoding.F32,
}
_NOWHERE = Path("config.json")
_MXFP4_GROUP = 32
_FILE_TYPE = "gguf_file_type"  # the field of a configuration in which its GGUF file's is kept
# What GGUF calls the matrices that file types treat apart from others.
_GGUF_NAMES = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "qkv": "attn_qkv",
    "kv_b_proj": "attn_v", "o_proj": "attn_output", "down_proj": "ffn_down",
}  # fmt: skip


def shape_names() -> list[str]:
    """Models whose configurations come with HMT."""
    return builtin_names("shapes", ".json")


def read_shape(model: str) -> dict[str, Any]:
    """The configuration of a model by name, or by a file or folder.

    With ":Q4_K_M" or another of FILE_TYPES behind it, the model is a GGUF file of that type.
    Raises MissingFileError and CheckpointError, and ConfigError for a type that there is not.
    """
    model, colon, file_type = model.rpartition(":")
    if colon and not Path(f"{model}:{file_type}").expanduser().exists():
        return _read_shape(model) | {_FILE_TYPE: _file_type_called(file_type)}
    return _read_shape(f"{model}{colon}{file_type}")


def _file_type_called(name: str) -> str:
    if name.upper() not in FILE_TYPES:
        raise ConfigError(f"GGUF files of type {name!r:.40}: choose {', '.join(FILE_TYPES)}")
    return name.upper()


def _read_shape(model: str) -> dict[str, Any]:
    path = Path(model).expanduser()
    path = path / "config.json" if path.is_dir() else path
    source = str(path) if path.is_file() else model
    try:
        config = json.loads(builtin_text(source, "shapes", ".json", "shapes"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} must hold a JSON object, as a model's config.json does")
    return config


def shape_demand(config: Mapping[str, Any], options: EngineConfig, folder: Path = Path()) -> Demand:
    """What the model of a configuration needs, as a pack of the wanted encoding.

    folder   where the configuration is, for messages

    Raises UnknownArchitectureError and CheckpointError; see hmt.models.
    """
    published = _published(config)
    exact = options.activations == "exact"
    dtype = torch.float32 if published is Encoding.F32 else torch.bfloat16
    if options.dtype != "auto":
        dtype = getattr(torch, options.dtype)
    model = open_model(config, folder, dtype)
    layouts = _layouts(model, config, options.quantization or Scheme(), exact=exact)
    try:
        return demand_of(model, layouts, options, options.kv_quant)
    except ValueError as error:  # heads whose numbers do not fill words
        raise CheckpointError(f"{folder}/config.json describes no model here: {error}") from None


def _layouts(
    model: Model, config: Mapping[str, Any], scheme: Scheme, *, exact: bool
) -> dict[BlockId, BlockLayout]:
    """The layout of every block; blocks of equal shapes share that of the first of them."""
    alike: dict[object, BlockSpec] = {}
    first: dict[BlockId, BlockId] = {}
    formats = {
        block.id: tuple(
            _format(param, block.id, config, model.spec.layers, exact=exact)
            for param in block.params
        )
        for block in model.spec.blocks
    }
    for block in model.spec.blocks:
        form: object = (
            block.id
            if block.id.layer == TRUNK
            else (
                block.id.kind,
                tuple((p.name, p.shape, p.role) for p in block.params),
                formats[block.id],
            )
        )
        first[block.id] = alike.setdefault(form, block).id
    bound = {
        block.id: BoundBlock(block.id, tuple(map(_bound, block.params, formats[block.id])))
        for block in alike.values()
    }
    layouts = {
        block: _packed(layout)
        for block, layout in lay_out(bound, target(scheme), in_place=False).items()
    }
    return {block: layouts[representative] for block, representative in first.items()}


def _format(
    param: ParamSpec, block: BlockId, config: Mapping[str, Any], layers: int, *, exact: bool
) -> Format:
    """The form in which a parameter would be published."""
    file_type = config.get(_FILE_TYPE)
    if file_type is not None and param.role is not Role.VECTOR:
        form = gguf_format(_ggml_type(FILE_TYPES[file_type], param, block, layers))
        return form.with_activations(Activations.FLOAT if exact else Activations.INT8_TOKEN)
    tile = _fp8_tile(config)
    if _has_mxfp4_experts(config) and block.kind is BlockKind.EXPERT and param.role is Role.LINEAR:
        return Format(Encoding.MXFP4, _MXFP4_GROUP)
    if tile is not None and block.kind is BlockKind.EXPERT and config.get("expert_dtype") == "fp4":
        return Format(Encoding.MXFP4, _MXFP4_GROUP)
    if tile is not None and param.role is Role.LINEAR and block.kind is not BlockKind.HEAD:
        return Format(Encoding.FP8_BLOCK, tile=tile)
    return Format(_published(config))


def _ggml_type(file_type: FileType, param: ParamSpec, block: BlockId, layers: int) -> str:
    name = _GGUF_NAMES.get(param.name.removeprefix("shared_"), "")
    if block.kind is BlockKind.EMBEDDING:
        name = "token_embd"
    elif block.kind is BlockKind.HEAD:
        name = "output"
    return file_type.type_of(name, block.layer, layers, param.shape[-1])


def _bound(param: ParamSpec, form: Format) -> BoundParam:
    """A parameter as it would be published; of its bytes, which are nowhere, only the sizes."""
    parts = tuple(
        BoundPart(part.name, FileRange(_NOWHERE, 0, part.nbytes), part.nbytes // param.shape[0])
        for part in form.components(param.shape)
    )
    return BoundParam(param, param.sources[0], form, parts)


def _packed(layout: BlockLayout) -> BlockLayout:
    """The layout as a pack has it: one read of the whole slot, and nothing to convert."""
    reads: tuple[AlignedRead, ...] = ()
    if layout.slot_bytes:
        whole = FileRange(_NOWHERE, 0, layout.slot_bytes)
        reads = (AlignedRead(whole, 0, layout.slot_bytes),)
    return replace(layout, reads=reads, staged=())


def _published(config: Mapping[str, Any]) -> Encoding:
    name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if not isinstance(name, str) or name not in _DTYPES:
        raise CheckpointError(f"dtype {name!r:.40} is not one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _has_mxfp4_experts(config: Mapping[str, Any]) -> bool:
    quantization = config.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"


def _fp8_tile(config: Mapping[str, Any]) -> tuple[int, int] | None:
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict) or quantization.get("quant_method") != "fp8":
        return None
    tile = quantization.get("weight_block_size") or (128, 128)
    two = isinstance(tile, list | tuple) and len(tile) == 2
    if not two or not all(type(side) is int and side > 0 for side in tile):
        raise CheckpointError(f"weight_block_size {tile!r:.40} is not two sizes, as [128, 128]")
    rows, columns = tile
    return rows, columns
