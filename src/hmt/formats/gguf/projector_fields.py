"""What GGUF files say of encoders of images and of how images are prepared.

Functions of towers give fields of vision_config, by keys and sizes of tensors; those of images
(`Prepared` of projector_types.py) give fields of config.json and of the image processor.  All raise
HeaderError for what is missing or absurd, and CheckpointError for what HMT does not compute.  What
keys mean: llama.cpp's tools/mtmd/clip.cpp, and the vision models of its converter.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, Final

from hmt.base.errors import CheckpointError, HeaderError
from hmt.contracts.checkpoint import TensorRecord
from hmt.formats.gguf.keys import Keys

IN_LAYER: Final = re.compile(r"v\.blk\.(\d+)\.(\w+)\.(weight|bias)")
DEEPSTACK: Final = re.compile(r"v\.deepstack\.(\d+)\.(\w+)\.(weight|bias)")
FRAMES: Final = ("v.patch_embd.weight", "v.patch_embd.weight.1")
MERGE: Final = "vision.spatial_merge_size"
_WINDOW: Final = 112  # pixels, where a file does not say
_MOST_WINDOW: Final = 4096
_MOST_MERGE: Final = 16
_TILES, _MOST_TILES = 12, 64
_MOST_SIDE: Final = 1 << 14  # pixels of an image
_PIXTRAL_EPSILON: Final = 1e-5  # of its norms, which its model has by itself


def silu_windows(keys: Keys, records: Mapping[str, TensorRecord]) -> dict[str, Any]:
    """Qwen2.5-VL's: the last layer of each so many sees all of an image, others a window."""
    depth, side = depth_of(records), size_of(records, FRAMES[0], 3) * keys.count(MERGE, 2)
    every, window = keys.number("vision.n_wa_pattern", 0), keys.count("vision.window_size", _WINDOW)
    if not side <= window <= _MOST_WINDOW:
        raise keys.unread("vision.window_size", f"and a token has {side} pixels")
    full = [number for number in range(depth) if not every or (number + 1) % every == 0]
    return {
        "hidden_size": width_of(records),
        "intermediate_size": wide_of(records),
        "hidden_act": "silu",
        "fullatt_block_indexes": full,
        "window_size": window,
        "out_hidden_size": size_of(records, "mm.2.weight", 0),
    }


def quick_gelu(keys: Keys, records: Mapping[str, TensorRecord]) -> dict[str, Any]:
    """Qwen2-VL's."""
    width, wide = width_of(records), wide_of(records)
    return {
        "embed_dim": width,
        "hidden_size": size_of(records, "mm.2.weight", 0),
        "hidden_act": "quick_gelu",
        "mlp_ratio": wide / width if wide % width else wide // width,
    }


def deepstack(keys: Keys, records: Mapping[str, TensorRecord]) -> dict[str, Any]:
    """Qwen3-VL's, some of whose layers tell the language model's first layers what they see."""
    layers = sorted({int(m[1]) for m in map(DEEPSTACK.fullmatch, records) if m})
    return {
        "hidden_size": width_of(records),
        "intermediate_size": wide_of(records),
        "hidden_act": "gelu_pytorch_tanh",
        "num_position_embeddings": size_of(records, "v.position_embd.weight", 0),
        "deepstack_visual_indexes": layers,
        "out_hidden_size": size_of(records, "mm.2.weight", 0),
    }


def siglip(keys: Keys, records: Mapping[str, TensorRecord]) -> dict[str, Any]:
    """Gemma 3's, whose images are squares of as many patches as there are positions."""
    patches, patch = size_of(records, "v.position_embd.weight", 0), size_of(records, FRAMES[0], 3)
    side = math.isqrt(patches)
    if side * side != patches or keys.count("vision.image_size", side * patch) != side * patch:
        raise keys.unread("vision.image_size", f"and the file has positions of {patches} patches")
    return {
        "model_type": "siglip_vision_model",
        "hidden_size": width_of(records),
        "intermediate_size": wide_of(records),
        "hidden_act": "gelu_pytorch_tanh",
        "image_size": side * patch,
        "vision_use_head": False,
    }


def squares(
    keys: Keys, vision: Mapping[str, Any], records: Mapping[str, TensorRecord]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of Gemma 3."""
    side, (_, rows) = vision["image_size"], _scaled(keys, vision, 4)
    return {"mm_tokens_per_image": rows}, {"size": {"height": side, "width": side}}


def intern(keys: Keys, records: Mapping[str, TensorRecord]) -> dict[str, Any]:
    """InternVL's, with a position for what is no patch in front."""
    return {
        "model_type": "internvl_vision",
        "hidden_size": width_of(records),
        "intermediate_size": wide_of(records),
        "hidden_act": "silu" if keys.flag("use_silu", False) else "gelu",
        "layer_norm_eps": keys.number("vision.attention.layer_norm_epsilon", 1e-6),
        "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in records else "rms_norm",
        "use_qk_norm": "v.blk.0.attn_q_norm.weight" in records,
        "attention_bias": "v.blk.0.attn_q.bias" in records,
        "image_size": _side(keys, records),
    }


def tiles(
    keys: Keys, vision: Mapping[str, Any], records: Mapping[str, TensorRecord]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of InternVL, which cuts images into squares."""
    side, least = vision["image_size"], keys.count("vision.preproc_min_tiles", 1)
    most = keys.count("vision.preproc_max_tiles", _TILES)
    if not least <= most <= _MOST_TILES:
        raise keys.unread("vision.preproc_max_tiles", f"and an image has at least {least} tiles")
    scale, rows = _scaled(keys, vision, 2)
    wide = size_of(records, "mm.model.mlp.1.weight", 1)
    if wide != vision["hidden_size"] * scale**2:
        raise keys.unread("vision.projector.scale_factor", f"and tokens are made of {wide} numbers")
    own = {
        "image_seq_length": rows,
        "downsample_ratio": 1 / scale,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
    }
    return own, {
        "size": {"height": side, "width": side},
        "crop_to_patches": True,
        "min_patches": least,
        "max_patches": most,
    }


def idefics(keys: Keys, records: Mapping[str, TensorRecord]) -> dict[str, Any]:
    """Idefics 3's and SmolVLM's, whose tiles have as many patches as there are positions."""
    return siglip(keys, records) | {
        "model_type": "idefics3_vision",
        "layer_norm_eps": keys.number("vision.attention.layer_norm_epsilon", 1e-6),
    }


def written_tiles(
    keys: Keys, vision: Mapping[str, Any], records: Mapping[str, TensorRecord]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of Idefics 3 and SmolVLM, which cut images into tiles and write where each was."""
    side, (scale, rows) = vision["image_size"], _scaled(keys, vision, 2)
    wide = size_of(records, "mm.model.fc.weight", 1)
    if wide != vision["hidden_size"] * scale**2:
        raise keys.unread("vision.projector.scale_factor", f"and tokens are made of {wide} numbers")
    longest = keys.count("vision.preproc_image_size", side)
    if not side <= longest <= _MOST_SIDE:
        raise keys.unread("vision.preproc_image_size", f"and a tile has {side} pixels")
    return {"scale_factor": scale}, {
        "size": {"longest_edge": longest},
        "max_image_size": {"longest_edge": side},
        "written": {"processor": {"image_seq_len": rows}},
    }


def clip(keys: Keys, records: Mapping[str, TensorRecord]) -> dict[str, Any]:
    """LLaVA's, with a position for the class in front."""
    if "v.class_embd" not in records:
        raise CheckpointError(
            f"{keys.what} has no v.class_embd: HMT reads files of LLaVA with towers of CLIP, and "
            "others (SigLIP) as safetensors"
        )
    act = "gelu" if keys.flag("use_gelu", False) else "quick_gelu"
    return {
        "model_type": "clip_vision_model",
        "hidden_size": width_of(records),
        "intermediate_size": wide_of(records),
        "hidden_act": "silu" if keys.flag("use_silu", False) else act,
        "layer_norm_eps": keys.number("vision.attention.layer_norm_epsilon", 1e-5),
        "image_size": _side(keys, records),
    }


def patches_of_clip(
    keys: Keys, vision: Mapping[str, Any], records: Mapping[str, TensorRecord]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of LLaVA: a token for each patch, as the last layer that the file has leaves it.

    Of 1.5 patches of a square, of 1.6 (LLaVA-NeXT) of that and of tiles.
    """
    side, merged = vision["image_size"], keys.text("vision.mm_patch_merge_type") or "flat"
    depth = vision["num_hidden_layers"]
    layer = keys.number("vision.feature_layer", depth)
    if type(layer) is not int or not 0 < layer <= depth:
        raise keys.unread("vision.feature_layer", f"and the file has {depth} layers")
    own = {
        "vision_feature_layer": layer,
        "vision_feature_select_strategy": "default",
        "image_seq_length": (side // vision["patch_size"]) ** 2,
        "multimodal_projector_bias": "mm.0.bias" in records,
    }
    sizes = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
    if merged == "flat":
        return own, sizes
    if merged != "spatial_unpad":
        raise keys.unread("vision.mm_patch_merge_type", "and HMT reads flat and spatial_unpad")
    points = _pinpoints(keys, side)
    del own["image_seq_length"]
    own |= {
        "model_type": "llava_next",
        "architectures": ["LlavaNextForConditionalGeneration"],
        "image_grid_pinpoints": points,
    }
    written = {
        "patch_size": vision["patch_size"],
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
        "image_token": "<image>",
    }
    return own, sizes | {
        "image_processor_type": "LlavaNextImageProcessor",
        "image_grid_pinpoints": points,
        "written": {"processor": written},
    }


def _pinpoints(keys: Keys, side: int) -> list[list[int]]:
    """Heights and widths that images are resized to, which files have as widths and heights."""
    name, flat = "vision.image_grid_pinpoints", keys.numbers("vision.image_grid_pinpoints")
    fits = (
        isinstance(size, int) and side <= size <= _MOST_SIDE and size % side == 0 for size in flat
    )
    if not flat or len(flat) % 2 or len(flat) > 2 * _MOST_TILES or not all(fits):
        raise keys.unread(name, f"and tiles have {side} pixels")
    points = [[high, wide] for wide, high in zip(flat[::2], flat[1::2], strict=True)]
    if max(high * wide for high, wide in points) > _MOST_TILES * side**2:
        raise keys.unread(name, f"and the most is {_MOST_TILES} tiles of {side} pixels")
    return points


def _side(keys: Keys, records: Mapping[str, TensorRecord]) -> int:
    """Pixels of a square image, by its positions, of which the first is of no patch."""
    width, patch = width_of(records), size_of(records, FRAMES[0], 3)
    positions = records.get("v.position_embd.weight")
    rows = math.prod(positions.shape) // width if positions is not None else 0
    side = math.isqrt(max(rows - 1, 0))
    if (
        side < 1
        or side**2 + 1 != rows
        or keys.count("vision.image_size", side * patch) != side * patch
    ):
        raise keys.unread("vision.image_size", f"and the file has {rows} positions")
    return side * patch


def _scaled(keys: Keys, vision: Mapping[str, Any], default: int) -> tuple[int, int]:
    """Patches of a token in each direction, and tokens of a square image."""
    patches = vision["image_size"] // vision["patch_size"]
    scale = keys.count("vision.projector.scale_factor", default)
    if not 0 < scale <= patches or patches % scale:
        raise keys.unread("vision.projector.scale_factor", f"and an image has {patches} patches")
    return scale, (patches // scale) ** 2


def axial(keys: Keys, records: Mapping[str, TensorRecord]) -> dict[str, Any]:
    """Pixtral's, whose positions are rotary, on two axes."""
    epsilon = keys.number("vision.attention.layer_norm_epsilon", _PIXTRAL_EPSILON)
    if not math.isclose(epsilon, _PIXTRAL_EPSILON, rel_tol=1e-3):
        raise keys.unread("vision.attention.layer_norm_epsilon", f"not {_PIXTRAL_EPSILON}")
    queries = size_of(records, "v.blk.0.attn_q.weight", 0)
    dim, left = divmod(queries, keys.count("vision.attention.head_count"))
    if left or dim % 4:
        raise keys.unread("vision.attention.head_count", f"and queries have {queries} numbers")
    return {
        "model_type": "pixtral",
        "hidden_size": width_of(records),
        "intermediate_size": wide_of(records),
        "head_dim": dim,
        "hidden_act": "gelu" if keys.flag("use_gelu", False) else "silu",
        "image_size": keys.count("vision.image_size"),
    }


def rows_of_tokens(
    keys: Keys, vision: Mapping[str, Any], records: Mapping[str, TensorRecord]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of Mistral 3, and of Pixtral 12B, a LLaVA to transformers, which merges no patches."""
    merge, patch, name = keys.count(MERGE, 1), vision["patch_size"], "mm.patch_merger.weight"
    merges = name in records
    merged = size_of(records, name, 1) if merges else vision["hidden_size"]
    if merge > _MOST_MERGE or merged != vision["hidden_size"] * merge**2:
        raise keys.unread(MERGE, f"and its tokens are made of {merged} numbers")
    longest = vision["image_size"]
    if not patch * merge <= longest <= _MOST_SIDE:
        raise keys.unread("vision.image_size", f"and a token has {patch * merge} pixels")
    own: dict[str, Any] = {
        "vision_feature_layer": -1,
        "multimodal_projector_bias": "mm.1.bias" in records,
    }
    if merges:
        own |= {"spatial_merge_size": merge}
    else:
        own |= {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
        own |= {"vision_feature_select_strategy": "full"}
    return own, {"size": {"longest_edge": longest}, "patch_size": patch}


def depth_of(records: Mapping[str, TensorRecord]) -> int:
    """Layers.  Raises HeaderError where some are missing."""
    layers = {int(match[1]) for match in map(IN_LAYER.fullmatch, records) if match}
    if sorted(layers) != list(range(len(layers))):
        raise HeaderError(f"an encoder of images has layers {sorted(layers)[:8]}, not all from 0")
    return len(layers)


def width_of(records: Mapping[str, TensorRecord]) -> int:
    """Numbers of a patch between layers.  Raises HeaderError."""
    return size_of(records, "v.blk.0.ln1.weight", 0)


def wide_of(records: Mapping[str, TensorRecord]) -> int:
    """Numbers between the two matrices of a layer's network, whichever is called what."""
    return max(size_of(records, f"v.blk.0.{name}.weight", 0) for name in ("ffn_up", "ffn_down"))


def size_of(records: Mapping[str, TensorRecord], name: str, axis: int) -> int:
    """One of a tensor's sizes.  Raises HeaderError where it has none."""
    record = records.get(name)
    if record is None or len(record.shape) <= axis:
        raise HeaderError(f"an encoder of images has no tensor {name} of more than {axis} sizes")
    return record.shape[axis]
