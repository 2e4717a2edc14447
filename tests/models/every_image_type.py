"""A small random model of every type that transformers has for images and text, asked about images.

Each is made of its type's own defaults, as those of `every_type`, with small towers and image
processors; what else its code needs is written down below.
"""

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import every_type
import torch
import transformers
from PIL import Image
from transformers import CONFIG_MAPPING
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from vision_models import BEGIN, END, IMAGE, logprobs_of, picture, scored_request

import hmt
from hmt.base.errors import HMTError

SIDE, PATCH = 24, 4
# Tokens that processors know by name, behind those of the tokenizer.
_ADDED = (
    "<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>", "<img>", "</img>",
    "<imgpad>", "<|im_start|>", "<|im_end|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>",
    "<|IMG_LINE_BREAK|>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", "<|patch|>",
    "<|tile_x_separator|>", "<|tile_y_separator|>", "[IMG_BREAK]", "[IMG_END]", "[IMG]",
    "<|media_pad|>", "<|IMAGE_PAD|>", "<|imgpad|>", "<im_patch>", "<im_start>", "<im_end>",
    "<patch_newline>", "TILE_GLOBAL", "TILE_1", "TILE_2", "<racm3:break>", "<eoss>", "<video>",
    "<slice>", "</slice>", "<image_id>", "</image_id>", "<frame_start>", "<im_col>",
    "<low_res_im_start>",
    "<row_1_col_1>", "<row_1_col_2>", "<row_2_col_1>", "<row_2_col_2>", "]<]image[>[",
    "]<]video[>[",
)  # fmt: skip
_FIRST = 4096
_VOCABULARY = 4160
_TOWER = {
    "depth": 2, "num_hidden_layers": 2, "num_layers": 2, "image_size": SIDE, "patch_size": PATCH,
    "hidden_size": 32, "embed_dim": 32, "intermediate_size": 48, "num_heads": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "out_hidden_size": 64,
    "fullatt_block_indexes": [1], "deepstack_visual_indexes": [0], "vision_use_head": False,
    "num_position_embeddings": 16, "window_size": 16,
}  # fmt: skip
_NAMED = {"image_token_id": IMAGE, "image_token_index": IMAGE, "vision_start_token_id": BEGIN,
          "vision_end_token_id": END, "image_start_token_id": BEGIN, "image_end_token_id": END,
          "boi_token_id": BEGIN, "eoi_token_id": END, "boi_token_index": BEGIN,
          "eoi_token_index": END, "video_token_id": 7, "video_token_index": 7}  # fmt: skip
# What else a type needs, by its configuration's fields; vision_config's stand apart.
_ROPES = {kind: {"rope_type": "default", "rope_theta": 1e4}
          for kind in ("full_attention", "sliding_attention")}  # fmt: skip
_HYBRID = {
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1], "mrope_interleaved": True,
    },
}  # fmt: skip
_POINTS = {"image_grid_pinpoints": [[24, 48], [48, 24], [48, 48], [72, 24]]}
_FULL = {"vision_feature_select_strategy": "full"}
_MORE: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {"196": 256}},
    "gemma3": {"mm_tokens_per_image": 9},
    "shieldgemma2": {"mm_tokens_per_image": 9},
    "gemma4": {
        "text_config": {"vocab_size_per_layer_input": _VOCABULARY},
        "vision_config": {
            "model_type": "gemma4_vision", "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
            "head_dim": 8, "patch_size": 2, "position_embedding_size": 128,
        },
    },
    "cohere_compass": {"text_config": {"rope_parameters": _ROPES}},
    "llava_next": _POINTS, "llava_next_video": _POINTS, "granite4_vision": _POINTS,
    "llava_onevision": _POINTS | _FULL,
    "qwen3_5": {"text_config": _HYBRID}, "qwen3_5_moe": {"text_config": _HYBRID},
    "minicpmv4_6": {"image_token_id": IMAGE, "text_config": _HYBRID},
    "minicpmv4_7": {"image_token_id": IMAGE, "text_config": _HYBRID},
    "minicpm_ocr": {"image_token_id": IMAGE, "text_config": _HYBRID},
    "internvl": {"image_seq_length": 9}, "qianfan_ocr": {"image_seq_length": 9},
    "muse_glimmer": {"out_hidden_size": 128, "projector_hidden_size": 64},
    "molmo2": {"adapter_config": {"vision_feature_layer": [0, 1]}},
    "deepseek_vl_hybrid": {"high_res_vision_config": {"global_attn_indexes": [0]}},
    "kimi_k25": {"projection_hidden_size": 32, "projector_hidden_size": 32},
    "vipllava": {"vision_feature_layers": [-1, -2]},
}  # fmt: skip
_VISION: dict[str, dict[str, Any]] = {
    "aria": {"image_size": 980, "patch_size": 70}, "qwen2_vl": {"hidden_size": 64, "mlp_ratio": 2},
    "janus": {"image_size": 96, "projection_dim": 64},
    "got_ocr2": {"image_size": 1024, "patch_size": 16, "output_channels": 32},
    "pp_chart2table": {"image_size": 1024, "patch_size": 16, "output_channels": 32},
}  # fmt: skip
_GRIDS = {"patch_size": PATCH, "temporal_patch_size": 2, "merge_size": 2,
          "size": {"shortest_edge": 256, "longest_edge": 4096}}  # fmt: skip
_SQUARE = {"height": SIDE, "width": SIDE}
_IMAGES: dict[str, dict[str, Any]] = {
    "aria": {"max_image_size": 980, "split_image": False},
    "glm4v_moe": _GRIDS | {"image_processor_type": "Glm4vImageProcessor"},
    "glm_ocr": _GRIDS | {"image_processor_type": "Glm46VImageProcessor"},
    "qwen3_vl_moe": _GRIDS, "qwen2_5_omni_thinker": _GRIDS, "qwen3_omni_moe_thinker": _GRIDS,
    "got_ocr2": {"size": {"height": 1024, "width": 1024}},
    "idefics2": {"size": {"shortest_edge": 16, "longest_edge": 48}, "do_image_splitting": False},
    "idefics3": {"size": {"longest_edge": 48}, "max_image_size": {"longest_edge": 24}},
    "llava_next": _POINTS, "llava_next_video": _POINTS, "granite4_vision": _POINTS,
    "llava_onevision": _POINTS | {"size": _SQUARE},
    "deepseek_vl": {"min_size": 4}, "deepseek_vl_hybrid": {"min_size": 4, "high_res_size": _SQUARE},
    "minicpmv4_6": {"scale_resolution": 64, "patch_size": PATCH},
    "minicpm_ocr": {"scale_resolution": 64, "patch_size": PATCH},
    "minicpmv4_7": {"scale_resolution": 64, "patch_size": PATCH},
    "janus": {"min_size": 4, "size": {"height": 96, "width": 96}},
    "cohere2_vision": {"patch_size": 3},
    "lfm2_vl": {
        "encoder_patch_size": PATCH, "tile_size": SIDE, "max_image_tokens": 16,
        "min_image_tokens": 4, "max_num_patches": 64, "do_image_splitting": False,
    },
    "gemma4": {"patch_size": 2, "max_soft_tokens": 70},
    "lighton_ocr": {"size": {"longest_edge": 48}, "patch_size": PATCH},
    "mistral3": {"size": {"longest_edge": 48}, "patch_size": PATCH},
    "internvl": {"max_patches": 3, "crop_to_patches": True},
    "video_llama_3": {"patch_size": PATCH, "min_pixels": 256, "max_pixels": 4096,
                      "size": {"shortest_edge": 256, "longest_edge": 4096}},
}  # fmt: skip
_LLAVA = {"patch_size": PATCH, "vision_feature_select_strategy": "default",
          "num_additional_image_tokens": 1}  # fmt: skip
_PROCESSOR: dict[str, dict[str, Any]] = {
    "aya_vision": {"patch_size": PATCH, "img_size": SIDE, "downsample_factor": 2},
    "cohere2_vision": {},
    "deepseek_vl": {"num_image_tokens": 36}, "deepseek_vl_hybrid": {"num_image_tokens": 36},
    "gemma3": {"image_seq_length": 9}, "shieldgemma2": {"image_seq_length": 9},
    "internvl": {"image_seq_length": 9}, "qianfan_ocr": {"image_seq_length": 9},
    "idefics3": {"image_seq_len": 9}, "smolvlm": {"image_seq_len": 9},
    "llava_next": _LLAVA, "llava_next_video": _LLAVA, "granite4_vision": _LLAVA,
    "vipllava": _LLAVA, "video_llava": _LLAVA,
    "llava_onevision": {"num_image_tokens": 36, "vision_aspect_ratio": "anyres_max_9"} | _FULL,
    "lighton_ocr": {"patch_size": PATCH, "spatial_merge_size": 2},
    "ovis2": {"image_seq_length": 9}, "paligemma": {"image_seq_length": 36},
    "idefics2": {"image_seq_len": 64},
}  # fmt: skip
# By type: what a row of features is called, where it is not the tokenizer's image_token.
_ROW: dict[str, str] = {
    "aya_vision": "<|IMG_PATCH|>", "got_ocr2": "<imgpad>", "ovis2": "<image>",
    "idefics3": "<image>", "pp_chart2table": "<imgpad>", "cohere_compass": "<|IMAGE_PAD|>",
    "dots3_note": "<|imgpad|>",
    "muse_glimmer": "<|patch|>", "step3p7": "<im_patch>", "minimax_m3_vl": "]<]image[>[",
    "llama4": "<|patch|>",
}  # fmt: skip
# By type: names of tokens that its tokenizer has as attributes, besides those of all.
_NAMES: dict[str, dict[str, str]] = {
    "idefics2": {"image_boundary_token": "<fake_token_around_image>"},
    "minicpmv4_6": {
        "slice_start_token": "<slice>", "slice_end_token": "</slice>",
        "image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>",
    },
    "cohere2_vision": {"img_line_break_token": "<|IMG_LINE_BREAK|>"},
}  # fmt: skip
_NAMES |= {"minicpmv4_7": _NAMES["minicpmv4_6"], "minicpm_ocr": _NAMES["minicpmv4_6"]}


@dataclass(frozen=True)
class Outcome:
    """What became of a type.

    kind   "equal" has transformers' numbers; "refused" was refused, with `reason`; "unbuilt" is
           not built so small, or not asked, by transformers itself; "wrong" should not be
    """

    model_type: str
    kind: str
    reason: str = ""


def types() -> tuple[str, ...]:
    """Every model_type of images and text."""
    return tuple(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def config_of(kind: str) -> Any:
    """A small configuration."""
    made = CONFIG_MAPPING[kind]
    base = made()
    fields = every_type._small(base)
    _lengthen(fields)
    for name in base.sub_configs:
        inner = getattr(base, name, None)
        if inner is None or not hasattr(inner, "to_dict"):
            continue
        if "vision" in name or "image" in name:
            fields[name] |= {
                key: _like(getattr(inner, key), size)
                for key, size in _TOWER.items()
                if getattr(inner, key, None) is not None and key in inner.to_dict()
            }
            fields[name] |= _VISION.get(kind, {})
        elif name == "text_config":
            fields[name]["vocab_size"] = _VOCABULARY
    named = _NAMED | {name: _row(kind) for name in _NAMED if name.startswith("image_token_")}
    for name, token in named.items():
        if isinstance(getattr(base, name, None), int):
            fields[name] = token
    if "text_config" not in base.sub_configs:
        fields["vocab_size"] = _VOCABULARY
    for name, value in [*every_type._MORE.get(kind, {}).items(), *_MORE.get(kind, {}).items()]:
        own = fields.get(name)
        fields[name] = own | value if isinstance(own, dict) else value
    config = made(**fields)
    config._attn_implementation = "eager"
    return config


def _lengthen(fields: dict[str, Any]) -> None:
    """Room for images, in each configuration."""
    for name, value in fields.items():
        if isinstance(value, dict):
            _lengthen(value)
        elif value == every_type._SMALL["max_position_embeddings"] and "embeddings" in name:
            fields[name] = 2048


def _row(kind: str) -> int:
    """The token of a row of features."""
    return _FIRST + _ADDED.index(_ROW[kind]) if kind in _ROW else IMAGE


def _like(value: Any, size: Any) -> Any:
    """`size`, for each direction where the default has several."""
    if isinstance(value, list | tuple) and isinstance(size, int):
        return [size] * len(value)
    return size


def model_of(kind: str) -> Any:
    """In f32, with random numbers."""
    config = config_of(kind)
    made = getattr(transformers, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[kind])
    torch.manual_seed(len(kind))
    model = made(config).float().eval()
    with torch.no_grad():
        for param in model.parameters():
            if not torch.isfinite(param).all():
                param.zero_()
            param.add_(torch.randn_like(param), alpha=0.1)
    model.tie_weights()
    return model


def images_of(kind: str, config: Any) -> dict[str, Any]:
    """preprocessor_config.json: the defaults of its image processor, for small images."""
    names = IMAGE_PROCESSOR_MAPPING_NAMES.get(kind) or {}
    name = names.get("pil") or names.get("torchvision")
    if name is None:
        return {"image_processor_type": "Qwen2VLImageProcessor"} | _IMAGES.get(kind, {})
    fields: dict[str, Any] = {"image_processor_type": name.removesuffix("Pil")}
    made = getattr(transformers, name, None)
    if getattr(made, "is_dummy", False):  # of a library that is not there
        return fields | _IMAGES.get(kind, {})
    for field in ("size", "crop_size", "max_image_size"):
        size = getattr(made, field, None) if made else None
        if size is not None:
            fields[field] = _size(dict(size) if not isinstance(size, int) else size)
    vision = getattr(config, "vision_config", None)
    for field in ("patch_size", "temporal_patch_size"):
        if made and getattr(made, field, None) is not None:
            fields[field] = getattr(vision, field, None) or getattr(made, field)
    for field in ("min_pixels", "max_pixels"):
        if made and getattr(made, field, None) is not None:
            fields[field] = 256 if field[1] == "i" else 4096
    return fields | _IMAGES.get(kind, {})


def _size(size: Any) -> Any:
    if not isinstance(size, dict):
        return SIDE
    if set(size) == {"shortest_edge", "longest_edge"} and size["shortest_edge"] >= 3000:
        return {"shortest_edge": 256, "longest_edge": 4096}  # pixels
    return {key: value and SIDE for key, value in size.items()}


def publish(kind: str, model: Any, folder: Path) -> None:
    """Write a checkpoint with everything that images need."""
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    images = images_of(kind, model.config)
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    if kind in _PROCESSOR:
        (folder / "processor_config.json").write_text(json.dumps(_PROCESSOR[kind]))
    tokenizer = json.loads(
        (files("hmt") / "embedded" / "mini-dense" / "tokenizer.json").read_text()
    )
    for number, name in enumerate(_ADDED):
        token = dict(tokenizer["added_tokens"][0], id=_FIRST + number, content=name, special=True)
        tokenizer["added_tokens"].append(token)
    named = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = {
        "image_token": IMAGE, "boi_token": BEGIN, "eoi_token": END, "start_image_token": BEGIN,
        "end_image_token": END, "context_image_token": IMAGE, "video_token": 7, "audio_token": 3,
        "boa_token": 1, "eoa_token": 2, "image_start_token": BEGIN, "image_end_token": END,
        "image_break_token": 3, "vision_bos_token": BEGIN, "vision_eos_token": END,
    }  # fmt: skip
    names |= {name: _FIRST + _ADDED.index(word) for name, word in _NAMES.get(kind, {}).items()}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "extra_special_tokens": {k: named[n] for k, n in names.items()},
            }
        )
    )


@torch.inference_mode()
def reference_logits(model: Any, processing: Any, tokens: list[int], images: Any) -> torch.Tensor:
    """transformers' logits of `tokens`, in which images are written: f32 [tokens, vocabulary]."""
    known = inspect.signature(model.forward).parameters
    known = dict(known) | dict(inspect.signature(model.base_model.forward).parameters)
    inputs = dict(_processed(processing, images))
    ids = torch.tensor([tokens])
    if "mm_token_type_ids" in known:
        inputs["mm_token_type_ids"] = (ids == processing.token).int()
    if "token_type_ids" in known:
        inputs["token_type_ids"] = (ids == processing.token).int()
    names = [n for n in inputs if n in known and n not in ("input_ids", "attention_mask")]
    return model(input_ids=ids, **{n: inputs[n] for n in names}, use_cache=False).logits[0].float()


def _processed(processing: Any, images: list[Image.Image]) -> Any:
    """What transformers' processor makes of all images at once."""
    processor = processing._processor
    if not hasattr(processor, "tokenizer"):
        side = getattr(processing, "_side", None)
        more = {"patch_size": {"height": side, "width": side}} if side else {}
        return processor(images=images, return_tensors="pt", **more)
    options = {"text": [processing._place * len(images)], "padding": False, "return_tensors": "pt"}
    try:
        return processor(images=images, **options)
    except ValueError:  # it takes images by prompt
        return processor(images=[images], **options)


def outcome_of(kind: str, folder: Path) -> Outcome:
    """Build it, and ask it about two images, and about one, beside transformers."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    try:
        model = model_of(kind)
        publish(kind, model, folder)
    except Exception as error:
        return Outcome(kind, "unbuilt", repr(error)[:300])
    options = {"host_memory": "1GiB", "dtype": "float32", "context": 2048, "max_batch": 1}
    with hmt.Engine(**options, max_prefill_tokens=256, threads=1) as engine:
        try:
            loaded = engine.load_model(folder)
        except HMTError as error:
            said = str(error).split("config.json: ")[-1].replace(str(folder), "the checkpoint")
            return Outcome(kind, "refused", said)
        if why := loaded._input.images_refused:
            return Outcome(kind, "refused", why)
        try:
            apart, allowed = _difference(loaded, model, (picture(37, 21), picture(18, 50, 1)))
            if apart <= allowed:
                return Outcome(kind, "equal")
            # Some of transformers' towers compute other numbers of several images at once.
            alone, allowed = _difference(loaded, model, (picture(37, 21),))
        except Exception as error:
            return Outcome(kind, "unbuilt", repr(error)[:300])
    if alone <= allowed:
        return Outcome(kind, "equal", "transformers computes others of several images together")
    return Outcome(kind, "wrong", f"{apart:.1e} apart, {allowed:.1e} allowed")


def _difference(loaded: Any, model: Any, images: tuple[Image.Image, ...]) -> tuple[float, float]:
    """How far log-probabilities of text and images are apart, and how far they may be."""
    processing = loaded._input._prepared.model.encoder._processing
    prompt = [300, 17]
    for number, _ in enumerate(images):
        prompt += [processing.mark, 81 + number, 2000]
    request = scored_request(prompt, images, max_new_tokens=3)
    answer = loaded.infer(request)
    tokens = [*loaded._input.process(request, None).state.tokens, *answer.token_ids]
    wanted = reference_logits(model, processing, tokens, list(images))
    own = wanted[: len(tokens) - 1].log_softmax(-1)[range(len(tokens) - 1), tokens[1:]]
    apart = float((torch.tensor(logprobs_of(answer)) - own).abs().max())
    return apart, 1e-4 * max(1.0, float(wanted.std()))


def table(outcomes: Sequence[Outcome]) -> str:
    """What became of each type, in Markdown."""
    equal = [o for o in outcomes if o.kind == "equal"]
    others = [o for o in outcomes if o.kind != "equal"]
    bare = [o.model_type for o in equal if not needs_torchvision(o.model_type)]
    more = [o.model_type for o in equal if needs_torchvision(o.model_type)]
    alone = [o.model_type for o in equal if o.reason]
    rows = [f"| {o.model_type} | {_clause(o)} |" for o in others]
    return "\n".join(
        [
            f"With transformers {transformers.__version__}, by `model_type`: {len(equal)} of "
            f"{len(outcomes)} types see images.",
            "",
            f"**Equal to transformers** ({len(bare)}):",
            "",
            *every_type.by_initial(bare),
            "",
            f"**Equal, where torchvision is installed** ({len(more)}), since their image "
            "processors have no version for Pillow:",
            "",
            *every_type.by_initial(more),
            "",
            f"Of {', '.join(alone) or 'none'} transformers computes other numbers where a prompt "
            "has several images than of each alone; HMT encodes each alone.",
            "",
            f"**Refused, or not tried** ({len(others)}):",
            "",
            "| type | why |",
            "|---|---|",
            *rows,
            "",
        ]
    )


def needs_torchvision(kind: str) -> bool:
    """Whether transformers prepares its images by torchvision alone."""
    names = IMAGE_PROCESSOR_MAPPING_NAMES.get(kind) or {"pil": ""}
    return "pil" not in names


def _clause(outcome: Outcome) -> str:
    if outcome.kind == "unbuilt":
        return "not tried: transformers builds none of random numbers in this size"
    reason = outcome.reason.partition("either: ")[2] or outcome.reason
    for said in ("images are refused: ", "its encoder of images cannot be made "):
        reason = reason.rpartition(said)[2]
    said = " ".join(reason.split()).replace("|", "/")
    if said.startswith("("):
        said = said[1:-1]
    return said.partition("; their names begin")[0]
