"""Encoders of images in files of their own, which llama.cpp calls mmproj.

What their keys and names mean: llama.cpp's tools/mtmd/clip.cpp, and the vision models of its
converter.  Sizes are read from tensors where these tell them, so that a file cannot ask for more
than it holds.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from hmt.base.errors import CheckpointError, HeaderError
from hmt.contracts.checkpoint import (
    FileRange,
    Form,
    FormName,
    Joined,
    Published,
    PublishedPart,
    TensorRecord,
)
from hmt.formats.gguf.header import GgufHeader
from hmt.formats.gguf.keys import Keys
from hmt.formats.gguf.names import FLOATS, plain_form

CLIP: Final = "clip"  # general.architecture of these files
_IN_LAYER: Final = re.compile(r"v\.blk\.(\d+)\.(\w+)\.(weight|bias)")
_DEEPSTACK: Final = re.compile(r"v\.deepstack\.(\d+)\.(\w+)\.(weight|bias)")
_FRAMES: Final = ("v.patch_embd.weight", "v.patch_embd.weight.1")
_QUERIES: Final = ("attn_q", "attn_k", "attn_v")
_WINDOW: Final = 112  # pixels, where a file does not say
_MERGE: Final = "vision.spatial_merge_size"
_MOST_MERGE, _MOST_WINDOW = 16, 4096
_SOUND: Final = ("a.", "mm.a.")  # parts of encoders of sound, which are left aside


@dataclass(frozen=True)
class ImageEncoderFile:
    """An encoder in a file, read with that of the language model it belongs to.

    vision      vision_config of config.json
    processor   preprocessor_config.json
    forms       parameters by transformers' names
    out_width   numbers of a token's features
    deepstack   layers that are given features besides
    rows        tokens that stand for an image; 0: its processor says how many
    """

    vision: dict[str, Any]
    processor: dict[str, Any]
    forms: dict[str, Form]
    out_width: int
    deepstack: int = 0
    rows: int = 0


@dataclass(frozen=True)
class Projector:
    """One of llama.cpp's types of projectors.

    models      type and class of transformers' model, by the language model's architecture
    tokens      tokens that config.json numbers, by its fields
    vision      fields of vision_config besides those that all have
    layer       names of tensors in a layer, trunk of those outside, deepstack of those for layers
    processor   what its image processor does that files do not say: as published with the models
    at, blocks  how names of parameters begin, and those of a layer behind that
    out         the tensor, and which of its sizes features have
    square      images are resized to one size, and names of sizes are SigLIP's
    around      names of tokens in front of an image's and behind them
    """

    models: Mapping[str, tuple[str, str]]
    tokens: Mapping[str, str]
    vision: Callable[[Keys, Mapping[str, TensorRecord]], dict[str, Any]]
    layer: Mapping[str, str]
    trunk: Mapping[str, str]
    processor: Mapping[str, Any]
    deepstack: Mapping[str, str] = field(default_factory=dict)
    at: str = "model.visual."
    blocks: str = "blocks.{}."
    out: tuple[str, int] = ("mm.2.weight", 0)
    square: bool = False
    around: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())


def _silu_windows(keys: Keys, records: Mapping[str, TensorRecord]) -> dict[str, Any]:
    """Qwen2.5-VL's: the last layer of each so many sees all of an image, others a window."""
    depth, side = _depth(records), _size(records, _FRAMES[0], 3) * keys.count(_MERGE, 2)
    every, window = keys.number("vision.n_wa_pattern", 0), keys.count("vision.window_size", _WINDOW)
    if not side <= window <= _MOST_WINDOW:
        raise keys.unread("vision.window_size", f"and a token has {side} pixels")
    full = [number for number in range(depth) if not every or (number + 1) % every == 0]
    return {
        "hidden_size": _width(records),
        "intermediate_size": _wide(records),
        "hidden_act": "silu",
        "fullatt_block_indexes": full,
        "window_size": window,
        "out_hidden_size": _size(records, "mm.2.weight", 0),
    }


def _quick_gelu(keys: Keys, records: Mapping[str, TensorRecord]) -> dict[str, Any]:
    """Qwen2-VL's."""
    width, wide = _width(records), _wide(records)
    return {
        "embed_dim": width,
        "hidden_size": _size(records, "mm.2.weight", 0),
        "hidden_act": "quick_gelu",
        "mlp_ratio": wide / width if wide % width else wide // width,
    }


def _deepstack(keys: Keys, records: Mapping[str, TensorRecord]) -> dict[str, Any]:
    """Qwen3-VL's, some of whose layers tell the language model's first layers what they see."""
    layers = sorted({int(m[1]) for m in map(_DEEPSTACK.fullmatch, records) if m})
    return {
        "hidden_size": _width(records),
        "intermediate_size": _wide(records),
        "hidden_act": "gelu_pytorch_tanh",
        "num_position_embeddings": _size(records, "v.position_embd.weight", 0),
        "deepstack_visual_indexes": layers,
        "out_hidden_size": _size(records, "mm.2.weight", 0),
    }


def _siglip(keys: Keys, records: Mapping[str, TensorRecord]) -> dict[str, Any]:
    """Gemma 3's, whose images are squares of as many patches as there are positions."""
    patches, patch = _size(records, "v.position_embd.weight", 0), _size(records, _FRAMES[0], 3)
    side = math.isqrt(patches)
    if side * side != patches or keys.count("vision.image_size", side * patch) != side * patch:
        raise keys.unread("vision.image_size", f"and the file has positions of {patches} patches")
    return {
        "model_type": "siglip_vision_model",
        "hidden_size": _width(records),
        "intermediate_size": _wide(records),
        "hidden_act": "gelu_pytorch_tanh",
        "image_size": side * patch,
        "vision_use_head": False,
    }


_QWEN_TOKENS: Final = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_QWEN_LAYER: Final = {
    "ln1": "norm1",
    "ln2": "norm2",
    "attn_qkv": "attn.qkv",
    "attn_out": "attn.proj",
}
_QWEN_TRUNK: Final = {
    "v.patch_embd": "patch_embed.proj",
    "v.post_ln": "merger.ln_q",
    "mm.0": "merger.mlp.0",
    "mm.2": "merger.mlp.2",
}
_QWEN_PIXELS: Final = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 3136, "longest_edge": 12845056},
}
PROJECTORS: Final[Mapping[str, Projector]] = {
    "qwen2vl_merger": Projector(
        {"qwen2vl": ("qwen2_vl", "Qwen2VLForConditionalGeneration")},
        _QWEN_TOKENS,
        _quick_gelu,
        {**_QWEN_LAYER, "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        _QWEN_TRUNK,
        _QWEN_PIXELS,
    ),
    "qwen2.5vl_merger": Projector(
        {"qwen2vl": ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration")},
        _QWEN_TOKENS,
        _silu_windows,
        {
            **_QWEN_LAYER,
            "ffn_gate": "mlp.gate_proj",
            "ffn_up": "mlp.up_proj",
            "ffn_down": "mlp.down_proj",
        },
        _QWEN_TRUNK,
        _QWEN_PIXELS,
    ),
    "qwen3vl_merger": Projector(
        {
            "qwen3vl": ("qwen3_vl", "Qwen3VLForConditionalGeneration"),
            "qwen3vlmoe": ("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"),
            "qwen35": ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
            "qwen35moe": ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
        },
        _QWEN_TOKENS,
        _deepstack,
        {**_QWEN_LAYER, "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
        {
            "v.patch_embd": "patch_embed.proj",
            "v.position_embd": "pos_embed",
            "v.post_ln": "merger.norm",
            "mm.0": "merger.linear_fc1",
            "mm.2": "merger.linear_fc2",
        },
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        },
        {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"},
    ),
    "gemma3": Projector(
        {"gemma3": ("gemma3", "Gemma3ForConditionalGeneration")},
        {
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
        _siglip,
        {
            "ln1": "layer_norm1",
            "ln2": "layer_norm2",
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_out": "self_attn.out_proj",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
        {
            "v.patch_embd": "vision_tower.embeddings.patch_embedding",
            "v.position_embd": "vision_tower.embeddings.position_embedding",
            "v.post_ln": "vision_tower.post_layernorm",
            "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
        },
        {"image_processor_type": "Gemma3ImageProcessor"},
        at="model.",
        blocks="vision_tower.encoder.layers.{}.",
        out=("mm.input_projection.weight", 1),
        square=True,
        around=(("\n\n", "<start_of_image>"), ("<end_of_image>", "\n\n")),
    ),
}
_SHIFTED: Final = ("mm.soft_emb_norm.weight",)  # norms to which 1 has been added


def projector_of(header: GgufHeader) -> Projector:
    """Raises CheckpointError for a file that is no encoder of images that HMT runs."""
    kind = header.metadata.get("general.architecture")
    if kind != CLIP:
        raise CheckpointError(
            f"{header.path} is of architecture {kind!r:.60}, and encoders of images are "
            f"{CLIP!r}: give the model's mmproj file"
        )
    name = header.metadata.get("clip.vision.projector_type") or header.metadata.get(
        "clip.projector_type"
    )
    found = PROJECTORS.get(name) if isinstance(name, str) else None
    if found is None:
        raise CheckpointError(
            f"{header.path} has a projector of type {name!r:.60}; HMT reads "
            f"{', '.join(sorted(PROJECTORS))}: use the model's safetensors"
        )
    return found


def read_encoder(header: GgufHeader, projector: Projector) -> ImageEncoderFile:
    """Raises CheckpointError, HeaderError where something is missing or absurd."""
    records = header.records
    keys = Keys(header.metadata, CLIP, str(header.path), records)
    width, depth = _width(records), _depth(records)
    heads, patch = keys.count("vision.attention.head_count"), _size(records, _FRAMES[0], 3)
    merge = keys.count(_MERGE, 2)
    if width % heads or merge > _MOST_MERGE:
        raise HeaderError(
            f"{header.path}: {heads} heads of {width} numbers, or {merge} x {merge} patches of a "
            "token, are absurd: download it again"
        )
    if keys.count("vision.block_count", depth) != depth:
        raise keys.unread("vision.block_count", f"and the file has layers 0 to {depth - 1}")
    if keys.count("vision.patch_size", patch) != patch:
        raise keys.unread("vision.patch_size", f"and its kernels are of {patch} pixels")
    vision = projector.vision(keys, records) | {"patch_size": patch}
    rows = 0
    if projector.square:
        vision |= {"num_hidden_layers": depth, "num_attention_heads": heads}
        scale, side = keys.count("vision.projector.scale_factor", 4), vision["image_size"] // patch
        if not 0 < scale <= side or side % scale:
            raise keys.unread("vision.projector.scale_factor", f"and an image has {side} patches")
        rows = (side // scale) ** 2
    else:
        vision |= {
            "depth": depth,
            "num_heads": heads,
            "spatial_merge_size": merge,
            "temporal_patch_size": len(_FRAMES),
        }
    layers = vision.get("deepstack_visual_indexes", [])
    forms = _forms(header, projector, layers)
    _check_all_read(header, forms)
    return ImageEncoderFile(
        vision,
        _square(keys, projector, vision)
        if projector.square
        else _processor(keys, projector, patch, merge),
        forms,
        _size(records, *projector.out),
        len(layers),
        rows,
    )


def _square(keys: Keys, projector: Projector, vision: Mapping[str, Any]) -> dict[str, Any]:
    side = vision["image_size"]
    found = {**projector.processor, "size": {"height": side, "width": side}}
    return found | {
        name: keys.by_layer(f"vision.{name}", 3) for name in ("image_mean", "image_std")
    }


def _processor(keys: Keys, projector: Projector, patch: int, merge: int) -> dict[str, Any]:
    sizes: dict[str, Any] = {"patch_size": patch, "merge_size": merge, "temporal_patch_size": 2}
    found = {**projector.processor, **sizes}
    edges = dict(found["size"])
    for edge, key in (("shortest_edge", "min"), ("longest_edge", "max")):
        edges[edge] = keys.count(f"vision.image_{key}_pixels", edges[edge])
    found["size"] = edges
    for name in ("image_mean", "image_std"):
        found[name] = keys.by_layer(f"vision.{name}", 3)
    return found


def _forms(header: GgufHeader, projector: Projector, deepstack: list[int]) -> dict[str, Form]:
    records = header.records
    forms: dict[str, Form] = {}
    swapped = _swapped(records)
    for record in records.values():
        stem, _, kind = record.name.rpartition(".")
        name = projector.trunk.get(stem)
        if (match := _IN_LAYER.fullmatch(record.name)) is not None:
            own = projector.layer.get(swapped.get(match[2], match[2]))
            name = own and f"{projector.blocks.format(match[1])}{own}"
        elif (match := _DEEPSTACK.fullmatch(record.name)) is not None:
            own = projector.deepstack.get(match[2])
            name = own and f"deepstack_merger_list.{deepstack.index(int(match[1]))}.{own}"
        if name:
            minus = float(record.name in _SHIFTED)
            forms[f"{projector.at}{name}.{kind}"] = plain_form(record, minus=minus)
    if projector.square:
        first = records.get(projector.out[0])
        assert first is not None
        forms[f"{projector.at}multi_modal_projector.mm_input_projection_weight"] = plain_form(first)
        return forms
    for layer in range(_depth(records)):
        for kind in ("weight", "bias"):
            parts = [records.get(f"v.blk.{layer}.{part}.{kind}") for part in _QUERIES]
            there = [part for part in parts if part is not None]
            if len(there) == len(_QUERIES) and "attn_qkv" in projector.layer:
                rows = sum(part.shape[0] for part in there)
                name = f"{projector.at}blocks.{layer}.{projector.layer['attn_qkv']}.{kind}"
                pieces = tuple(plain_form(part) for part in there)
                forms[name] = Joined(pieces, (rows, *there[0].shape[1:]))
    forms[f"{projector.at}{projector.trunk['v.patch_embd']}.weight"] = _kernel(header)
    return forms


def _check_all_read(header: GgufHeader, forms: Mapping[str, Form]) -> None:
    """Raise CheckpointError for a tensor that is no parameter: numbers would be others without."""
    used: set[str] = set()
    for form in forms.values():
        for piece in form.pieces if isinstance(form, Joined) else (form,):
            if isinstance(piece, TensorRecord):
                used.add(piece.name)
            else:
                used.update(part.tensor for part in piece.parts.values())
    left = [n for n in header.records if n not in used and not n.startswith(_SOUND)]
    if left:
        raise CheckpointError(
            f"{header.path} has {len(left)} tensors that HMT does not know in an encoder of this "
            f"type, first {left[0]!r}: use the model's safetensors, or a newer HMT"
        )


def _swapped(records: Mapping[str, TensorRecord]) -> dict[str, str]:
    """Files from before 2025 call a layer's first matrix ffn_down, and its second ffn_up."""
    name, width = "v.blk.0.ffn_up.weight", _width(records)
    if _size(records, name, 0) != width or _size(records, name, 1) == width:
        return {}
    return {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}


def _kernel(header: GgufHeader) -> Published:
    """The convolution over two frames, of which a file has one after the other."""
    frames = [header.records.get(name) for name in _FRAMES]
    there = [frame for frame in frames if frame is not None]
    first = there[0] if there else None
    if first is None or len(there) != len(_FRAMES) or len(first.shape) != 4:
        raise HeaderError(f"{header.path} has no kernels {' and '.join(_FRAMES)} of 4 sizes")
    if any(
        (f.dtype, f.shape) != (first.dtype, first.shape) or f.dtype not in FLOATS for f in there
    ):
        raise HeaderError(
            f"{header.path}: {' and '.join(_FRAMES)} must be alike, and in {', '.join(FLOATS)}"
        )
    form = FormName("gguf frames", (("kind", first.dtype), ("frames", len(there))))
    parts = {
        str(number): PublishedPart(f.name, FileRange(f.file, f.offset, f.nbytes), 0)
        for number, f in enumerate(there)
    }
    rows, channels, *sides = first.shape
    return Published(form, (rows, channels, len(there), *sides), parts)


def _depth(records: Mapping[str, TensorRecord]) -> int:
    layers = {int(match[1]) for match in map(_IN_LAYER.fullmatch, records) if match}
    if sorted(layers) != list(range(len(layers))):
        raise HeaderError(f"an encoder of images has layers {sorted(layers)[:8]}, not all from 0")
    return len(layers)


def _width(records: Mapping[str, TensorRecord]) -> int:
    return _size(records, "v.blk.0.ln1.weight", 0)


def _wide(records: Mapping[str, TensorRecord]) -> int:
    """Numbers between the two matrices of a layer's network, whichever is called what."""
    return max(_size(records, f"v.blk.0.{name}.weight", 0) for name in ("ffn_up", "ffn_down"))


def _size(records: Mapping[str, TensorRecord], name: str, axis: int) -> int:
    record = records.get(name)
    if record is None or len(record.shape) <= axis:
        raise HeaderError(f"an encoder of images has no tensor {name} of more than {axis} sizes")
    return record.shape[axis]


def beside(path: Path) -> list[Path]:
    """Files of encoders beside a model's, or in its folder."""
    folder = path if path.is_dir() else path.parent
    return sorted(file for file in folder.glob("*.gguf") if is_mmproj(file))


def is_mmproj(file: Path) -> bool:
    """By its name."""
    return file.name.lower().startswith("mmproj")


def config_with_encoder(
    config: Mapping[str, Any],
    metadata: Mapping[str, Any],
    header: GgufHeader,
) -> tuple[dict[str, Any], ImageEncoderFile]:
    """The config.json of a model that sees, of its language model's; and its encoder.

    config, metadata   of the file with the language model
    header             of the file with the encoder
    Raises CheckpointError, HeaderError where they do not belong together, or are not read.
    """
    projector = projector_of(header)
    architecture = metadata["general.architecture"]
    model = projector.models.get(architecture)
    if model is None:
        raise CheckpointError(
            f"{header.path} belongs to models of architecture "
            f"{' or '.join(sorted(projector.models))}, and this one is {architecture!r}"
        )
    encoder = read_encoder(header, projector)
    wanted = config["hidden_size"], config.get("deepstack_layers", encoder.deepstack)
    if (encoder.out_width, encoder.deepstack) != wanted:
        raise CheckpointError(
            f"{header.path} belongs to another model: it makes features of {encoder.out_width} "
            f"numbers, for {encoder.deepstack} layers besides the first, and this model's "
            f"embeddings have {wanted[0]}, with {wanted[1]} such layers"
        )
    tokens = metadata.get("tokenizer.ggml.tokens")
    there = tokens if isinstance(tokens, list) else []
    numbers = {token: number for number, token in enumerate(there)}
    named = {key: numbers[t] for key, t in projector.tokens.items() if t in numbers}
    first, text = next(iter(projector.tokens.items()))
    if first not in named:
        raise CheckpointError(f"the model's vocabulary has no token {text}, for images")
    kind, causal = model
    rope = dict(config["rope_parameters"])
    processor = dict(encoder.processor)
    if encoder.rows:
        named["mm_tokens_per_image"] = encoder.rows
        front, behind = ([numbers[t] for t in side if t in numbers] for side in projector.around)
        processor["written"] = {"front": front, "rows": encoder.rows, "behind": behind}
    sections = metadata.get(f"{architecture}.rope.dimension_sections")
    if isinstance(sections, list):
        rope["mrope_section"] = sections[:3]
    if kind.startswith("qwen3"):
        rope["mrope_interleaved"] = True
    own = {"model_type": f"{kind}_text", "rope_parameters": rope}
    text_config = {k: v for k, v in config.items() if k != "architectures"} | own
    return {
        "architectures": [causal],
        "model_type": kind,
        "tie_word_embeddings": config["tie_word_embeddings"],
        "text_config": text_config,
        "vision_config": encoder.vision,
        **named,
    }, replace(encoder, processor=processor)
