"""Models that see with random weights, of published models' sizes."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image

from hmt.profiling.random_model import Tensor, write_random_model

IMAGE, BEGIN, END = 6, 4, 5  # tokens, of the embedded tokenizer
_TOKENS: Final = {
    "image_token_id": IMAGE,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
    "video_token_id": 7,
}
_DONE: Final = "preprocessor_config.json"  # written last


@dataclass(frozen=True, slots=True)
class VisionShape:
    """Fields of a model's config.json, and of its image processor's.

    kind     model_type
    text     of the language model
    vision   of the encoder
    pixels   the fewest and the most that images are resized to
    more     fields besides, of config.json and of the image processor's
    """

    kind: str
    architecture: str
    text: dict[str, Any]
    vision: dict[str, Any]
    pixels: tuple[int, int]
    more: tuple[dict[str, Any], dict[str, Any]] = ({}, {})

    def with_layers(self, layers: int) -> dict[str, Any]:
        """`vision` with so many layers, of which the last is as the whole's last."""
        changed = {k: [layers - 1] for k in self.vision if k.endswith("_indexes")}
        name = "depth" if "depth" in self.vision else "num_hidden_layers"
        return self.vision | changed | {name: layers}

    def config(self, known_tokens: int) -> dict[str, Any]:
        """What config.json says; `known_tokens` does not count."""
        from transformers import CONFIG_MAPPING

        text = {"max_position_embeddings": 32768, "bos_token_id": None, "eos_token_id": None}
        kind: Any = CONFIG_MAPPING[self.kind]
        made = kind(
            text_config=text | self.text,
            vision_config=self.vision,
            tie_word_embeddings=False,
            **_TOKENS,
            **self.more[0],
        )
        content: dict[str, Any] = made.to_dict()
        return content | {"architectures": [self.architecture], "dtype": "bfloat16"}

    def tensors(self, config: dict[str, Any]) -> Iterator[Tensor]:
        """Names and shapes as transformers' modules have them."""
        import transformers

        kind = getattr(transformers, self.architecture)
        with torch.device("meta"):
            model = kind._from_config(kind.config_class(**config))
        for name, tensor in model.state_dict().items():
            yield name, tuple(tensor.shape)


def _qwen25(text: dict[str, Any], sections: list[int], vision: dict[str, Any]) -> VisionShape:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    tower = {"patch_size": 14, "temporal_patch_size": 2, "window_size": 112}
    return VisionShape(
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        {"rope_parameters": rope, "hidden_act": "silu"} | text,
        tower | {"out_hidden_size": text["hidden_size"]} | vision,
        (56 * 56, 28 * 28 * 16384),
    )


def _qwen3(text: dict[str, Any], sections: list[int], vision: dict[str, Any]) -> VisionShape:
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": sections}
    tower = {"patch_size": 16, "temporal_patch_size": 2, "num_position_embeddings": 2304}
    return VisionShape(
        "qwen3_vl",
        "Qwen3VLForConditionalGeneration",
        {"rope_parameters": rope | {"mrope_interleaved": True}} | text,
        tower | {"out_hidden_size": text["hidden_size"]} | vision,
        (256 * 256, 4096 * 4096),
    )


def _llava(text: dict[str, Any], vision: dict[str, Any]) -> VisionShape:
    side = vision["image_size"]
    square = {"height": side, "width": side}
    return VisionShape(
        "llava",
        "LlavaForConditionalGeneration",
        {"model_type": "qwen2"} | text,
        {"model_type": "siglip_vision_model", "vision_use_head": False} | vision,
        (side * side, side * side),
        (
            {
                "image_token_index": IMAGE,
                "vision_feature_layer": -1,
                "vision_feature_select_strategy": "full",
            },
            {"image_processor_type": "SiglipImageProcessor", "size": square},
        ),
    )


_SMALL = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
SHAPES: Final = {
    "qwen2.5-vl-7b": _qwen25(
        {
            "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
            "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        },
        [16, 24, 24],
        {
            "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    ),
    "qwen3-vl-8b": _qwen3(
        {
            "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
            "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
            "head_dim": 128,
        },
        [24, 20, 20],
        {
            "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
            "deepstack_visual_indexes": [8, 16, 24],
        },
    ),
    "siglip-so400m": _llava(  # of as many pixels as Gemma 3 gives it
        {
            "vocab_size": 152064, "hidden_size": 2560, "intermediate_size": 10240,
            "num_hidden_layers": 34, "num_attention_heads": 20, "num_key_value_heads": 4,
        },
        {
            "num_hidden_layers": 27, "hidden_size": 1152, "intermediate_size": 4304,
            "num_attention_heads": 16, "image_size": 896, "patch_size": 14,
        },
    ),
    "qwen2.5-vl-small": _qwen25(
        _SMALL,
        [8, 12, 12],
        {
            "depth": 4, "hidden_size": 320, "intermediate_size": 856, "num_heads": 4,
            "fullatt_block_indexes": [3],
        },
    ),
    "qwen3-vl-small": _qwen3(
        _SMALL | {"head_dim": 64},
        [12, 10, 10],
        {
            "depth": 4, "hidden_size": 320, "intermediate_size": 856, "num_heads": 4,
            "deepstack_visual_indexes": [1],
        },
    ),
}  # fmt: skip


def written(folder: Path, shape: VisionShape) -> Path:
    """`folder`, with a checkpoint of `shape` in bf16; made unless it is there."""
    if not (folder / _DONE).exists():
        write_random_model(folder, shape, shard_bytes=1 << 30)
        least, most = shape.pixels
        processor = {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": shape.vision["patch_size"],
            "temporal_patch_size": 2,
            "merge_size": 2,
            "size": {"shortest_edge": least, "longest_edge": most},
        } | shape.more[1]
        (folder / _DONE).write_text(json.dumps(processor))
    return folder


def picture(side: int, seed: int) -> Image.Image:
    """Noise over a slope, in which no two pixels need be alike."""
    noise = np.random.default_rng(seed).integers(0, 90, (side, side, 3))
    return Image.fromarray((noise + np.linspace(0, 160, side)[None, :, None]).astype(np.uint8))
