"""Small random models whose images are written as transformers' processors write them."""

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from vision_models import BEGIN, END, IMAGE, VOCABULARY

from hmt.models.vision.processing import with_text

_TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "head_dim": 16,
}  # fmt: skip
_TOWER = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 24, "patch_size": 4,
}  # fmt: skip
_SIGLIP = _TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False}
_CLIP = _TOWER | {"model_type": "clip_vision_model", "num_hidden_layers": 3}
_PIXTRAL = _TOWER | {"model_type": "pixtral", "head_dim": 8, "image_size": 64}
_INTERN = _TOWER | {"image_size": [24, 24], "patch_size": [4, 4]}
_SQUARE = {"height": 24, "width": 24}
_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
_GEMMA = {
    "sliding_window": 12, "layer_types": _LAYERS, "query_pre_attn_scalar": 16, "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}  # fmt: skip
_GEMMA_OWN = {
    "image_token_index": IMAGE, "boi_token_index": BEGIN, "eoi_token_index": END,
    "mm_tokens_per_image": 9,
}  # fmt: skip
_GEMMA4 = _GEMMA | {
    "num_hidden_layers": 4, "layer_types": [*_LAYERS, "full_attention"], "pad_token_id": 7,
    "global_head_dim": 16, "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
}  # fmt: skip
_GEMMA4_TOWER = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "patch_size": 2, "position_embedding_size": 128,
}  # fmt: skip
_GEMMA4_OWN = {"image_token_id": IMAGE, "boi_token_id": BEGIN, "eoi_token_id": END}
_POINTS = [[24, 48], [48, 24], [48, 48], [72, 24]]
_NEXT = {"image_token_index": IMAGE, "image_grid_pinpoints": _POINTS}
_NEXT_PROCESSOR = {
    "patch_size": 4, "vision_feature_select_strategy": "default", "image_token": "<|image|>",
    "num_additional_image_tokens": 1,
}  # fmt: skip
_FULL = {"vision_feature_select_strategy": "full"}
_ONE = _NEXT | _FULL | {"vision_feature_layer": -1, "video_token_index": 7}
_ONE_PROCESSOR = {
    "num_image_tokens": 36, "image_token": "<|image|>", "video_token": "<|pad|>",
    "vision_aspect_ratio": "anyres_max_9",
} | _FULL  # fmt: skip
_INTERN_OWN = {"image_token_id": IMAGE, "image_seq_length": 9}
_IDEFICS_OWN = {"image_token_id": IMAGE, "scale_factor": 2, "pad_token_id": 7}
# By type: its image processor's fields, names of tokens for its tokenizer, and what those are
# called in the file.
_IMAGES: dict[str, dict[str, Any]] = {
    "gemma3": {"image_processor_type": "Gemma3ImageProcessor", "size": _SQUARE},
    "gemma4": {
        "image_processor_type": "Gemma4ImageProcessor", "patch_size": 2, "max_soft_tokens": 70,
    },
    "mistral3": {
        "image_processor_type": "PixtralImageProcessor", "patch_size": 4,
        "size": {"longest_edge": 48},
    },
    "internvl": {
        "image_processor_type": "GotOcr2ImageProcessor", "size": _SQUARE, "max_patches": 3,
        "crop_to_patches": True,
    },
    "llava_next": {
        "image_processor_type": "LlavaNextImageProcessor", "size": {"shortest_edge": 24},
        "crop_size": _SQUARE, "image_grid_pinpoints": _POINTS,
    },
    "llava_next_video": {
        "image_processor_type": "LlavaNextImageProcessor", "size": {"shortest_edge": 24},
        "crop_size": _SQUARE, "image_grid_pinpoints": _POINTS,
    },
    "llava_onevision": {
        "image_processor_type": "LlavaOnevisionImageProcessor", "size": _SQUARE,
        "image_grid_pinpoints": _POINTS,
    },
    "deepseek_vl": {
        "image_processor_type": "DeepseekVLImageProcessor", "size": _SQUARE, "min_size": 4,
    },
    "idefics3": {
        "image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 48},
        "max_image_size": {"longest_edge": 24},
    },
}  # fmt: skip
_NAMES = {
    "gemma3": {"boi_token": BEGIN, "eoi_token": END, "image_token": IMAGE},
    "gemma4": {
        "boi_token": BEGIN, "eoi_token": END, "image_token": IMAGE, "audio_token": 3,
        "boa_token": 1, "eoa_token": 2,
    },
    "deepseek_vl": {"image_token": IMAGE},
    "internvl": {
        "start_image_token": BEGIN, "end_image_token": END, "context_image_token": IMAGE,
        "video_token": 7,
    },
}  # fmt: skip
_CALLED = {
    "mistral3": {BEGIN: "[IMG_BREAK]", END: "[IMG_END]", IMAGE: "[IMG]"},
    "idefics3": {BEGIN: "<fake_token_around_image>", END: "<end_of_utterance>", IMAGE: "<image>"},
}

Case = tuple[str, Mapping[str, Any], Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]
# By name: the type, its text's fields, its tower's, its own, and its processor's.
FAMILIES: dict[str, Case] = {
    "gemma3": ("gemma3", _GEMMA, _SIGLIP, _GEMMA_OWN, {"image_seq_length": 9}),
    "mistral3": (
        "mistral3",
        {"model_type": "mistral", "sliding_window": None},
        _PIXTRAL,
        {"image_token_index": IMAGE, "spatial_merge_size": 2, "vision_feature_layer": -1},
        {},
    ),
    "internvl": ("internvl", {"model_type": "qwen2"}, _INTERN, _INTERN_OWN, _INTERN_OWN),
    "llava_next": ("llava_next", {"model_type": "mistral"}, _CLIP, _NEXT, _NEXT_PROCESSOR),
    "llava_onevision": ("llava_onevision", {"model_type": "qwen2"}, _SIGLIP, _ONE, _ONE_PROCESSOR),
    "idefics3": ("idefics3", {"model_type": "llama"}, _TOWER, _IDEFICS_OWN, {"image_seq_len": 9}),
}
FAMILIES["pixtral"] = (  # of 12B: a LLaVA whose patches are tokens, each row with one behind it
    "llava",
    {"model_type": "mistral", "sliding_window": None},
    _PIXTRAL,
    {"image_token_index": IMAGE, "vision_feature_layer": -1} | _FULL,
    {},
)
# Of a type that no list in HMT names.
FAMILIES["deepseek_vl"] = (
    "deepseek_vl",
    {"model_type": "llama"},
    _SIGLIP,
    {"image_token_id": IMAGE, "tie_word_embeddings": False},
    {"num_image_tokens": 36},
)
FAMILIES["gemma4"] = (
    "gemma4",
    _GEMMA4 | {"use_bidirectional_attention": "vision"},
    _GEMMA4_TOWER,
    _GEMMA4_OWN,
    {},
)
# Further sizes of each, for tests that take their time.
MORE: dict[str, Case] = {
    "gemma3-narrow": (
        "gemma3",
        _GEMMA | {"sliding_window": 5, "num_key_value_heads": 1},
        _SIGLIP | {"image_size": 16},
        _GEMMA_OWN | {"mm_tokens_per_image": 4},
        {"image_seq_length": 4},
    ),
    "gemma3-full": (
        "gemma3",
        _GEMMA | {"layer_types": ["full_attention"] * 3},
        _SIGLIP | {"image_size": 32},
        _GEMMA_OWN | {"mm_tokens_per_image": 16},
        {"image_seq_length": 16},
    ),
    "gemma4-layers": (
        "gemma4",
        _GEMMA4 | {"hidden_size_per_layer_input": 8},
        _GEMMA4_TOWER | {"use_clipped_linears": True},
        _GEMMA4_OWN,
        {},
    ),
    "gemma4-shared": (
        "gemma4",
        _GEMMA4
        | {
            "num_kv_shared_layers": 2,
            "use_bidirectional_attention": "vision",
            "hidden_size_per_layer_input": 8,
        },
        _GEMMA4_TOWER | {"standardize": True, "num_key_value_heads": 1},
        _GEMMA4_OWN,
        {},
    ),
    "mistral3-unmerged": (
        "mistral3",
        {"model_type": "mistral", "sliding_window": None},
        _PIXTRAL | {"num_hidden_layers": 3},
        {"image_token_index": IMAGE, "spatial_merge_size": 1, "vision_feature_layer": -2},
        {},
    ),
    "mistral3-coarse": (
        "mistral3",
        {"model_type": "mistral", "sliding_window": None, "num_key_value_heads": 4},
        _PIXTRAL | {"patch_size": 2},
        {"image_token_index": IMAGE, "spatial_merge_size": 3, "vision_feature_layer": -1},
        {},
    ),
    "internvl-normed": (
        "internvl",
        {"model_type": "qwen3"},
        _INTERN | {"use_qk_norm": True, "norm_type": "rms_norm"},
        _INTERN_OWN | {"vision_feature_layer": -2},
        _INTERN_OWN,
    ),
    "internvl-biased": (
        "internvl",
        {"model_type": "llama"},
        _INTERN | {"attention_bias": True, "use_absolute_position_embeddings": False},
        _INTERN_OWN | {"tie_word_embeddings": True},
        _INTERN_OWN,
    ),
    "llava_next_video": (
        "llava_next_video",
        {"model_type": "llama"},
        _CLIP,
        _NEXT | {"video_token_index": 7},
        _NEXT_PROCESSOR | {"video_token": "<|pad|>"},
    ),
    "llava_next_video-qwen2": (
        "llava_next_video",
        {"model_type": "qwen2"},
        _CLIP | {"num_hidden_layers": 2},
        _NEXT | {"video_token_index": 7, "spatial_pool_mode": "max"},
        _NEXT_PROCESSOR | {"video_token": "<|pad|>"},
    ),
    "llava_next-full": (
        "llava_next",
        {"model_type": "llama"},
        _SIGLIP,
        _NEXT | _FULL | {"vision_feature_layer": -1},
        _NEXT_PROCESSOR | _FULL | {"num_additional_image_tokens": 0},
    ),
    "llava_next-layers": (
        "llava_next",
        {"model_type": "qwen2"},
        _CLIP,
        _NEXT | {"vision_feature_layer": [-1, -3]},
        _NEXT_PROCESSOR,
    ),
    "llava_onevision-small": (
        "llava_onevision",
        {"model_type": "qwen2", "num_key_value_heads": 4},
        _SIGLIP,
        _ONE | {"vision_aspect_ratio": "anyres_max_1"},
        _ONE_PROCESSOR | {"vision_aspect_ratio": "anyres_max_1"},
    ),
    "llava_onevision-deep": (
        "llava_onevision",
        {"model_type": "llama"},
        _SIGLIP | {"num_hidden_layers": 4},
        _ONE | {"vision_feature_layer": -2},
        _ONE_PROCESSOR,
    ),
    "idefics3-unshuffled": (
        "idefics3",
        {"model_type": "llama", "num_key_value_heads": 4},
        _TOWER,
        _IDEFICS_OWN | {"scale_factor": 3},
        {"image_seq_len": 4},
    ),
    "idefics3-tied": (
        "idefics3",
        {"model_type": "llama"},
        _TOWER | {"num_hidden_layers": 3},
        _IDEFICS_OWN | {"tie_word_embeddings": True},
        {"image_seq_len": 9},
    ),
}


def family_model(case: Case) -> PreTrainedModel:
    """The model of a case, in f32, with random numbers."""
    kind, text, vision, own, _ = case
    config = CONFIG_MAPPING[kind](text_config=_TEXT | text, vision_config=dict(vision), **own)
    config.text_config.tie_word_embeddings = config.tie_word_embeddings
    config._attn_implementation = "eager"
    made = getattr(transformers, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[kind])
    model = made(config).float().eval()
    torch.manual_seed(len(str(case)))
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=0.2)
        for name, buffer in model.named_buffers():
            if name.endswith(("_min", "_max")):  # of clipped layers: infinite until trained
                buffer.fill_(-2.0 if name.endswith("_min") else 2.0)
    model.tie_weights()
    return model


def publish_family(case: Case, model: PreTrainedModel, folder: Path) -> None:
    """Write a checkpoint with everything that images need."""
    kind, _, vision, _, processor = case
    model.save_pretrained(folder)
    kind = "mistral3" if vision.get("model_type") == "pixtral" else kind
    images = dict(_IMAGES[kind])
    if kind == "gemma3":
        images["size"] = {"height": vision["image_size"], "width": vision["image_size"]}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    if processor:
        (folder / "processor_config.json").write_text(json.dumps(processor))
    source = files("hmt") / "embedded" / "mini-dense" / "tokenizer.json"
    tokenizer = json.loads(source.read_text())
    called = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    for token in tokenizer["added_tokens"]:
        token["content"] = _CALLED.get(kind, {}).get(token["id"], token["content"])
    for number, name in _CALLED.get(kind, {}).items():
        vocabulary = tokenizer["model"]["vocab"]
        if called[number] in vocabulary:
            vocabulary[name] = vocabulary.pop(called[number])
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = {name: called[number] for name, number in _NAMES.get(kind, {}).items()}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "extra_special_tokens": names})
    )


def family_logits(
    model: PreTrainedModel, folder: Path, tokens: list[int], images: list[Image.Image]
) -> torch.Tensor:
    """transformers' logits of `tokens`, in which images are written: f32 [tokens, vocabulary]."""
    config = model.config
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    more: dict[str, Any] = {}
    if config.vision_config.model_type == "pixtral":
        side = config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1)
        more["patch_size"] = {"height": side, "width": side}
    if config.model_type == "idefics3":
        images = [images]  # type: ignore[list-item]
    inputs = dict(processor(images=images, return_tensors="pt", **more))
    for name in ("num_patches", "num_crops", "num_soft_tokens_per_image", "rows", "cols"):
        inputs.pop(name, None)
    ids = torch.tensor([tokens])
    if config.model_type == "gemma3":
        inputs["token_type_ids"] = (ids == IMAGE).int()
    if config.model_type == "gemma4":
        inputs["mm_token_type_ids"] = (ids == IMAGE).int()
    with torch.inference_mode():
        return model(input_ids=ids, **inputs).logits[0]


def processor_of(model: PreTrainedModel, folder: Path) -> Any:
    """transformers' processor of images and text, without that of videos."""
    images = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    return with_text(model.config, folder, IMAGE, images)._processor
