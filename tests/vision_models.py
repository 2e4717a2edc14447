"""Small random models that see, as transformers makes and publishes them."""

import io
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from hmt.contracts.request import Completion, Request, Sampling

VOCABULARY = 4096
IMAGE, BEGIN, END = 6, 4, 5  # tokens: <|image|> and others of the tokenizer
_TOKENS = {
    "image_token_id": IMAGE, "vision_start_token_id": BEGIN, "vision_end_token_id": END,
    "video_token_id": 7,
}  # fmt: skip
_TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_GRID = {"num_heads": 2, "patch_size": 4, "out_hidden_size": 32, "temporal_patch_size": 2}
_QWEN25 = _GRID | {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "window_size": 16,
    "fullatt_block_indexes": [1],
}  # fmt: skip
_EXAONE = {
    "model_type": "exaone4",
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}
_EXAONE_TOWER = _QWEN25 | {"model_type": "exaone4_5_vision", "num_key_value_heads": 2}
_QWEN3 = _GRID | {
    "depth": 3, "hidden_size": 16, "intermediate_size": 24, "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 2],
}  # fmt: skip
_CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 24, "patch_size": 4,
}  # fmt: skip
_SIGLIP = _CLIP | {"model_type": "siglip_vision_model", "num_hidden_layers": 2}


def _turned(sections: list[int], **more: Any) -> dict[str, Any]:
    return {"rope_theta": 1000.0, "rope_type": "default", "mrope_section": sections} | more


_GLM = _GRID | {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "image_size": 16,
}  # fmt: skip
_GLM_TEXT = {
    "rope_parameters": _turned([2, 1, 1], partial_rotary_factor=0.5), "head_dim": 16,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_GLM_DENSE = {
    "rope_parameters": _turned([2, 1, 1], partial_rotary_factor=0.5), "head_dim": 16,
}  # fmt: skip
_GLM_TOKENS = {"image_token_id": IMAGE, "image_start_token_id": BEGIN, "image_end_token_id": END}
_QWEN35 = {name: size for name, size in _QWEN3.items() if name != "deepstack_visual_indexes"}
_HYBRID = {
    "rope_parameters": _turned([2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.25),
    "head_dim": 32, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip


# By name: the type, its text's fields, its tower's and its own.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": ("qwen2_5_vl", {"rope_parameters": _turned([2, 1, 1])}, _QWEN25, _TOKENS),
    "qwen2_5_vl-wide": (
        "qwen2_5_vl",
        {"rope_parameters": _turned([1, 3, 4]), "num_attention_heads": 2},
        _QWEN25 | {"depth": 3, "fullatt_block_indexes": [0], "window_size": 32, "patch_size": 2},
        _TOKENS,
    ),
    "qwen2_5_vl-tied": (
        "qwen2_5_vl",
        {"rope_parameters": _turned([0, 2, 2])},
        _QWEN25 | {"fullatt_block_indexes": []},
        _TOKENS | {"tie_word_embeddings": True},
    ),
    "qwen3_vl": (
        "qwen3_vl",
        {"rope_parameters": _turned([2, 1, 1], mrope_interleaved=True), "head_dim": 8},
        _QWEN3,
        _TOKENS,
    ),
    "qwen3_vl-flat": (
        "qwen3_vl",
        {"rope_parameters": _turned([3, 3, 2], mrope_interleaved=True), "head_dim": 16},
        _QWEN3 | {"deepstack_visual_indexes": [1], "num_heads": 1},
        _TOKENS | {"tie_word_embeddings": True},
    ),
    "qwen3_vl-deep": (
        "qwen3_vl",
        {"rope_parameters": _turned([4, 2, 2], mrope_interleaved=True), "head_dim": 16},
        _QWEN3 | {"deepstack_visual_indexes": [0, 1, 2], "patch_size": 2},
        _TOKENS,
    ),
    "qwen3_vl_moe": (
        "qwen3_vl_moe",
        {
            "rope_parameters": _turned([2, 1, 1], mrope_interleaved=True), "head_dim": 8,
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        },
        _QWEN3,
        _TOKENS,
    ),
    "qwen2_vl": (
        "qwen2_vl",
        {"rope_parameters": _turned([2, 1, 1])},
        {
            "depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4,
            "mlp_ratio": 2,
        },
        _TOKENS,
    ),
    "qwen3_5": ("qwen3_5", _HYBRID, _QWEN35, _TOKENS),
    "qwen3_5_moe": (
        "qwen3_5_moe",
        _HYBRID | {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
        },
        _QWEN35,
        _TOKENS,
    ),
    "glm4v_moe": ("glm4v_moe", _GLM_TEXT, _GLM, _GLM_TOKENS),
    "glm4v_moe-biased": (
        "glm4v_moe",
        _GLM_TEXT | {"attention_bias": True, "n_shared_experts": 2, "routed_scaling_factor": 1.5},
        _GLM | {"attention_bias": True, "depth": 3},
        _GLM_TOKENS,
    ),
    "glm4v_moe-wide": (
        "glm4v_moe",
        _GLM_TEXT | {
            "rope_parameters": _turned([1, 4, 3], partial_rotary_factor=1.0),
            "first_k_dense_replace": 0,
        },
        _GLM | {"num_heads": 1, "patch_size": 2},
        _GLM_TOKENS,
    ),
    "glm4v": ("glm4v", _GLM_DENSE, _GLM, _GLM_TOKENS),
    "glm4v-biased": (
        "glm4v",
        _GLM_DENSE | {"attention_bias": True, "num_key_value_heads": 4},
        _GLM | {"attention_bias": True, "depth": 3},
        _GLM_TOKENS,
    ),
    "glm4v-wide": (
        "glm4v",
        _GLM_DENSE | {"rope_parameters": _turned([1, 1, 2], partial_rotary_factor=0.5)},
        _GLM | {"num_heads": 1, "patch_size": 2},
        _GLM_TOKENS | {"tie_word_embeddings": True},
    ),
    "exaone4_5": ("exaone4_5", _EXAONE, _EXAONE_TOWER, {"image_token_id": IMAGE}),
    "exaone4_5-windows": (
        "exaone4_5",
        _EXAONE | {"sliding_window": 12, "sliding_window_pattern": 2},
        _EXAONE_TOWER | {"depth": 3, "window_size": 32, "num_key_value_heads": 1},
        {"image_token_id": IMAGE},
    ),
    "exaone4_5-tied": (
        "exaone4_5",
        _EXAONE | {"num_key_value_heads": 4},
        _EXAONE_TOWER | {"patch_size": 2, "fullatt_block_indexes": [0]},
        {"image_token_id": IMAGE, "tie_word_embeddings": True},
    ),
    "llava": ("llava", {"model_type": "llama"}, _CLIP, {"image_token_index": IMAGE}),
    "llava-mistral": (
        "llava",
        {"model_type": "mistral", "sliding_window": None, "head_dim": 16},
        _CLIP | {"num_hidden_layers": 2},
        {"image_token_index": IMAGE, "vision_feature_select_strategy": "full"},
    ),
    "llava-olmo2": ("llava", {"model_type": "olmo2"}, _CLIP, {"image_token_index": IMAGE}),
    "llava-siglip": (
        "llava",
        {"model_type": "qwen2"},
        _SIGLIP,
        {
            "image_token_index": IMAGE, "vision_feature_select_strategy": "full",
            "vision_feature_layer": -1,
        },
    ),
}  # fmt: skip
# A chat whose parts are text and images, as Qwen's templates write it.
TEMPLATE = """{% for message in messages %}<|{{ message.role }}|>{% if message.content is string %}\
{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}\
[<|image|>]{% elif part.type == 'video' %}[<|pad|>]\
{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}
{% endfor %}<|assistant|>"""


def vision_model(name: str, **tower: Any) -> PreTrainedModel:
    """The model of a case, in f32, with random numbers; `tower` are other fields of its tower."""
    kind, text, vision, own = CASES[name]
    config = CONFIG_MAPPING[kind](text_config=_TEXT | text, vision_config=vision | tower, **own)
    config.text_config.tie_word_embeddings = config.tie_word_embeddings
    config._attn_implementation = config._experts_implementation = "eager"
    made = getattr(transformers, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[kind])
    model = made(config).float().eval()
    torch.manual_seed(len(name))
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=0.2)
    model.tie_weights()
    return model


def publish(model: PreTrainedModel, folder: Path) -> None:
    """Write a checkpoint with everything that images need."""
    model.save_pretrained(folder)
    grid = model.config.model_type != "llava"
    vision = model.config.vision_config
    if grid:
        processor = {
            "image_processor_type": (
                "Glm4vImageProcessor" if "glm" in model.config.model_type
                else "Qwen2VLImageProcessor"
            ),
            "patch_size": vision.patch_size,
            "temporal_patch_size": 2, "merge_size": 2,
            "size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 64},
        }  # fmt: skip
    else:
        side = {"height": vision.image_size, "width": vision.image_size}
        processor = {
            "image_processor_type": "CLIPImageProcessor", "crop_size": side,
            "size": {"shortest_edge": vision.image_size},
        }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    source = files("hmt") / "embedded" / "mini-dense" / "tokenizer.json"
    (folder / "tokenizer.json").write_text(source.read_text())
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Noise over a slope, so that every pixel counts."""
    noise = np.random.default_rng(seed).integers(0, 90, (height, width, 3))
    slope = np.linspace(0, 160, width)[None, :, None]
    return Image.fromarray((noise + slope).astype(np.uint8))


def file_of(image: Image.Image, kind: str = "PNG") -> bytes:
    """An image as a file."""
    data = io.BytesIO()
    image.save(data, kind)
    return data.getvalue()


def reference_logits(
    model: PreTrainedModel, folder: Path, tokens: list[int], images: list[Image.Image]
) -> torch.Tensor:
    """transformers' logits of `tokens`, in which images are expanded: f32 [tokens, vocabulary]."""
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    inputs = dict(processor(images=images, return_tensors="pt"))
    ids = torch.tensor([tokens])
    if "image_grid_thw" in inputs:
        inputs["mm_token_type_ids"] = (ids == IMAGE).int()
    with torch.inference_mode():
        return model(input_ids=ids, **inputs).logits[0]


def scored_request(prompt: Any, images: Any, **more: Any) -> Request:
    """A greedy request of 5 tokens that tells log-probabilities of prompt and answer."""
    given: dict[str, Any] = {
        "max_new_tokens": 5, "ignore_eos": True, "prompt_logprobs": 0,
        "sampling": Sampling(logprobs=0),
    }  # fmt: skip
    return Request(input=prompt, images=images, **(given | more))


def logprobs_of(answer: Completion) -> list[float]:
    """Of each token of a prompt from the second on, and of its answer."""
    return [one.logprob for one in (*answer.prompt_logprobs, *answer.logprobs)]
