"""A model that sees as two GGUF files, as llama.cpp's converter writes them.

Names come from the gguf package's own map, where the converter takes them from it.
"""

import json
import re
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf_files import ModelFile
from transformers import PreTrainedModel
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from vision_models import TEMPLATE

ARCHITECTURES = {
    "qwen2_vl": gguf.MODEL_ARCH.QWEN2VL,
    "qwen2_5_vl": gguf.MODEL_ARCH.QWEN2VL,
    "qwen3_vl": gguf.MODEL_ARCH.QWEN3VL,
    "qwen3_vl_moe": gguf.MODEL_ARCH.QWEN3VLMOE,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "mistral3": gguf.MODEL_ARCH.MISTRAL3,
    "internvl": gguf.MODEL_ARCH.QWEN2,
    "llava": gguf.MODEL_ARCH.LLAMA,
    "pixtral": gguf.MODEL_ARCH.LLAMA,
    "idefics3": gguf.MODEL_ARCH.LLAMA,
    "llava_next": gguf.MODEL_ARCH.LLAMA,
}
PROJECTORS = {
    "qwen2_vl": "qwen2vl_merger",
    "qwen2_5_vl": "qwen2.5vl_merger",
    "qwen3_vl": "qwen3vl_merger",
    "qwen3_vl_moe": "qwen3vl_merger",
    "qwen3_5": "qwen3vl_merger",
    "mistral3": "pixtral",
    "llava": "mlp",
    "llava_next": "mlp",
    "pixtral": "pixtral",
}
# Tokens of vision_models.py in Qwen's words.
_WORDS = {4: "<|vision_start|>", 5: "<|vision_end|>", 6: "<|image_pad|>", 7: "<|video_pad|>"}
_OWN_WORDS = {
    "gemma3": {
        4: "<start_of_image>", 5: "<end_of_image>", 6: "<image_soft_token>", 7: "\n\n",
    },
    "mistral3": {4: "[IMG_BREAK]", 5: "[IMG_END]", 6: "[IMG]"},
    "internvl": {4: "<img>", 5: "</img>", 6: "<IMG_CONTEXT>"},
    "llava": {6: "<image>"},
    "idefics3": {4: "<fake_token_around_image>", 5: "<end_of_utterance>", 6: "<image>"},
}  # fmt: skip
_OWN_WORDS["llava_next"] = _OWN_WORDS["llava"]
_OWN_WORDS["pixtral"] = _OWN_WORDS["mistral3"]
_EPSILONS = {"mistral3": 1e-5, "llava": 1e-5, "llava_next": 1e-5, "pixtral": 1e-5}
_LLAVA = ("llava", "llava_next")
_ROWS = ("mistral3", "pixtral")
_MERGER = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}
_SWAPPED = re.compile(r"ffn_(up|down)")
_DEEPSTACK = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}


def kind_of(model: PreTrainedModel) -> str:
    """The model's type; of Pixtral 12B, a LLaVA to transformers, its tower's."""
    kind, tower = model.config.model_type, model.config.vision_config.model_type
    return tower if (kind, tower) == ("llava", "pixtral") else kind


def write_text(model: PreTrainedModel, path: Path, arch: gguf.MODEL_ARCH | None = None) -> Path:
    """The language model, in f32."""
    config = model.config.text_config
    arch = ARCHITECTURES[kind_of(model)] if arch is None else arch
    file = ModelFile(arch, config, lambda name: "F32")
    tensors = model.state_dict()
    seeing = (
        "visual",
        "vision_tower",
        "multi_modal_projector",
        "vision_model",
        "connector",
        "newline",
    )
    own = {
        n.replace("language_model.", "").replace("text_model.", ""): t
        for n, t in tensors.items()
        if not any(part in n for part in seeing)
    }
    for name in [name for name in own if ".experts." in name]:
        own |= _experts(name, own.pop(name))
    if config.tie_word_embeddings:
        own.pop("lm_head.weight", None)
    file.add(own)

    def more(writer: GGUFWriter) -> None:
        _vocabulary(writer, _OWN_WORDS.get(kind_of(model), _WORDS))
        if kind_of(model) in _OWN_WORDS:
            return
        sections = config.rope_parameters["mrope_section"]
        writer.add_rope_dimension_sections([*sections, 0])
        layers = getattr(model.config.vision_config, "deepstack_visual_indexes", None)
        if layers is not None:
            writer.add_num_deepstack_layers(len(layers))

    return file.write(path, more)


def _experts(name: str, stacked: torch.Tensor) -> dict[str, torch.Tensor]:
    """Matrices [out, in] of each expert."""
    stem, _, last = name.rpartition(".")
    found = {}
    for number, matrix in enumerate(stacked):
        kinds = ("gate", "up") if last == "gate_up_proj" else ("down",)
        for kind, part in zip(kinds, matrix.chunk(len(kinds)), strict=True):
            found[f"{stem}.{number}.{kind}_proj.weight"] = part
    return found


def _vocabulary(writer: GGUFWriter, words: dict[int, str]) -> None:
    known = json.loads((files("hmt") / "embedded" / "mini-dense" / "tokenizer.json").read_text())
    special = {one["content"]: one["id"] for one in known["added_tokens"]}
    ids = known["model"]["vocab"] | special
    tokens = [words.get(ids[token], token) for token in sorted(ids, key=lambda token: ids[token])]
    merges = known["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if n in special.values() else 1 for n in range(len(tokens))])
    writer.add_token_merges([" ".join(one) if isinstance(one, list) else one for one in merges])
    writer.add_chat_template(TEMPLATE.replace("<|image|>", words[4 if "soft" in words[6] else 6]))


def write_mmproj(
    model: PreTrainedModel,
    path: Path,
    kinds: Callable[[str], str] = lambda name: "F32",
    **changed: Any,
) -> Path:
    """The encoder.  The model's own numbers are rounded to those of the file.

    kinds     type of a matrix, where its rows have whole blocks of it; F16 where they have not
    changed   keys that say something else than the model
    """
    writer = GGUFWriter(path, "clip")
    own = kind_of(model) in _OWN_WORDS
    (_add_square_keys if own else _add_keys)(writer, model, changed)
    with torch.no_grad():
        for parts in (_square_tensors if own else _tensors)(model):
            for target, numbers in parts:
                content, kind, held = _rounded(target, numbers, kinds)
                writer.add_tensor(
                    _SWAPPED.sub(_other, target) if changed.get("swapped") else target,
                    content,
                    raw_dtype=kind,
                )
                shift = float("soft_emb_norm" in target)
                numbers.copy_(torch.from_numpy(held) - shift)
    for name in changed.get("more", ()):
        writer.add_tensor(name, np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _other(match: re.Match[str]) -> str:
    return "ffn_down" if match[1] == "up" else "ffn_up"


def _add_keys(writer: GGUFWriter, model: PreTrainedModel, changed: dict[str, Any]) -> None:
    vision, kind = model.config.vision_config, kind_of(model)
    old = kind == "qwen2_vl"
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(changed.get("projector", PROJECTORS[kind]))
    writer.add_vision_projection_dim(model.config.text_config.hidden_size)
    writer.add_vision_image_size(560)
    writer.add_vision_patch_size(changed.get("patch_size", vision.patch_size))
    writer.add_vision_embedding_length(vision.embed_dim if old else vision.hidden_size)
    writer.add_vision_feed_forward_length(vision.hidden_size if old else vision.intermediate_size)
    writer.add_vision_block_count(vision.depth)
    writer.add_vision_head_count(vision.num_heads)
    writer.add_vision_image_mean(OPENAI_CLIP_MEAN)
    writer.add_vision_image_std(OPENAI_CLIP_STD)
    writer.add_vision_attention_layernorm_eps(1e-6)
    writer.add_vision_min_pixels(16 * 16)
    writer.add_vision_max_pixels(64 * 64)
    if kind == "qwen2_5_vl":
        writer.add_vision_use_silu(True)
        full = vision.fullatt_block_indexes
        writer.add_vision_n_wa_pattern(full[0] + 1 if full else vision.depth + 1)
        writer.add_uint32("clip.vision.window_size", vision.window_size)
    if kind.startswith("qwen3"):
        writer.add_vision_use_gelu(True)
        writer.add_vision_spatial_merge_size(vision.spatial_merge_size)
        deep = getattr(vision, "deepstack_visual_indexes", ())
        writer.add_vision_is_deepstack_layers([n in deep for n in range(vision.depth)])


def _tensors(model: PreTrainedModel) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """What the file has of each parameter: names, and views of it."""
    kind, vision = kind_of(model), model.config.vision_config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, max(vision.depth, 3))
    for whole, tensor in model.state_dict().items():
        if not whole.startswith("model.visual."):
            continue
        name = whole.removeprefix("model.")
        stem, _, last = name.rpartition(".")
        parts = name.split(".")
        if name == "visual.patch_embed.proj.weight":
            yield [(f"v.patch_embd.weight{s}", tensor[:, :, n]) for n, s in ((0, ""), (1, ".1"))]
        elif parts[1] == "deepstack_merger_list":
            layer = vision.deepstack_visual_indexes[int(parts[2])]
            yield [(f"v.deepstack.{layer}.{_DEEPSTACK[parts[3]]}.{last}", tensor)]
        elif kind.startswith("qwen3") and parts[1] == "merger":
            yield [(f"{_MERGER[parts[2]]}.{last}", tensor)]
        elif ".qkv." in name and not kind.startswith("qwen3"):
            own = [
                (names.get_name(stem.replace("qkv", head)), rows)
                for head, rows in zip("qkv", tensor.chunk(3), strict=True)
            ]
            yield [(f"{target}.{last}", rows) for target, rows in own]
        else:
            target = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert target is not None, name
            yield [(target, tensor)]


def _add_square_keys(writer: GGUFWriter, model: PreTrainedModel, changed: dict[str, Any]) -> None:
    """Of others than Qwen's."""
    vision, kind = model.config.vision_config, kind_of(model)
    side, patch = (
        n if isinstance(n, int) else n[0] for n in (vision.image_size, vision.patch_size)
    )
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(PROJECTORS.get(kind, kind))
    writer.add_vision_projection_dim(model.config.text_config.hidden_size)
    writer.add_vision_image_size(changed.get("image_size", side))
    writer.add_vision_patch_size(patch)
    writer.add_vision_embedding_length(vision.hidden_size)
    writer.add_vision_feed_forward_length(vision.intermediate_size)
    writer.add_vision_block_count(vision.num_hidden_layers - (kind in _LLAVA))
    writer.add_vision_head_count(vision.num_attention_heads)
    means = (
        ([0.5] * 3,) * 2 if kind in ("gemma3", "idefics3") else (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD)
    )
    writer.add_vision_image_mean(means[0])
    writer.add_vision_image_std(means[1])
    writer.add_vision_attention_layernorm_eps(changed.get("epsilon", _EPSILONS.get(kind, 1e-6)))
    if kind in _ROWS:
        (writer.add_vision_use_silu if vision.hidden_act == "silu" else writer.add_vision_use_gelu)(
            True
        )
        merge = changed.get("merge", getattr(model.config, "spatial_merge_size", None))
        if merge is not None:
            writer.add_vision_spatial_merge_size(merge)
        return
    if kind in _LLAVA:
        writer.add_bool("clip.use_gelu", False)
        if kind == "llava_next":
            points = changed.get("points", model.config.image_grid_pinpoints)
            writer.add_array(
                "clip.vision.image_grid_pinpoints", [n for p in points for n in p[::-1]]
            )
            writer.add_string(
                "clip.vision.mm_patch_merge_type", changed.get("merge", "spatial_unpad")
            )
            return
        for key in ("feature_layer", "mm_patch_merge_type"):
            if key in changed:
                writer.add_key_value(f"clip.vision.{key}", *changed[key])
        return
    writer.add_vision_use_gelu(True)
    if kind == "idefics3":
        writer.add_vision_preproc_image_size(changed.get("longest", 2 * side))
        scale = model.config.scale_factor
    elif kind == "internvl":
        writer.add_uint32("clip.vision.preproc_min_tiles", 1)
        writer.add_uint32("clip.vision.preproc_max_tiles", changed.get("tiles", 3))
        scale = round(1 / model.config.downsample_ratio)
    else:
        scale = side // patch // round(model.config.mm_tokens_per_image**0.5)
    writer.add_vision_projector_scale_factor(changed.get("scale", scale))


def _square_tensors(model: PreTrainedModel) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """As `_tensors`, of others than Qwen's."""
    kind, vision = kind_of(model), model.config.vision_config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, max(vision.num_hidden_layers, 4))
    for whole, tensor in model.state_dict().items():
        name = whole.removeprefix("model.").replace("_weight", ".weight")
        if kind == "internvl" and "language_model" not in name and name != "lm_head.weight":
            yield [(_intern_name(names, whole), tensor)]
            continue
        if name.startswith(("vision_model.", "connector.")):
            target = names.get_name(whole, try_suffixes=(".weight", ".bias"))
            assert target is not None, whole
            yield [(target, tensor)]
        elif name.startswith(("vision_tower.", "multi_modal_projector.")):
            if kind in _LLAVA and (
                f".layers.{vision.num_hidden_layers - 1}." in name or "post_layernorm" in name
            ):
                continue  # features are those of the layer before
            if kind in ("gemma3", *_LLAVA):
                name = name.replace("vision_tower.", "vision_tower.vision_model.")
            target = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert target is not None, name
            if kind in _LLAVA:  # whose converter begins at 0
                target = target.replace("mm.1.", "mm.0.")
            if kind in _ROWS and (".attn_q." in target or ".attn_k." in target):
                pairs = tensor.unflatten(0, (vision.num_attention_heads, 2, -1)).transpose(1, 2)
                yield [(target, pairs)]
            else:
                yield [(target, tensor)]
        elif name == "image_newline":
            yield [("model.image_newline", tensor)]
        elif kind in _ROWS and name.endswith("embed_tokens.weight"):
            yield [("v.token_embd.img_break", tensor[4])]


def _intern_name(names: gguf.TensorNameMap, whole: str) -> str:
    """Of InternVL, whose converter knows names of OpenGVLab's, and of Intern-S1."""
    for number, part in ((0, "layer_norm"), (1, "linear_1"), (3, "linear_2")):
        whole = whole.replace(f"model.multi_modal_projector.{part}.", f"mlp1.{number}.")
    if ".lambda_" in whole or "position_embedding" in whole:
        whole += ".weight"
    target = names.get_name(whole, try_suffixes=(".weight", ".bias"))
    assert target is not None, whole
    return target


def _rounded(
    name: str, numbers: torch.Tensor, kinds: Callable[[str], str]
) -> tuple[np.ndarray, GGMLQuantizationType, np.ndarray]:
    array = np.ascontiguousarray(numbers.numpy() + np.float32("soft_emb_norm" in name))
    if array.ndim == 4 and ".attn_" in name:  # rows of heads in another order
        array = array.reshape(-1, array.shape[-1])
    kind = GGMLQuantizationType[kinds(name)]
    if array.ndim < 2 or "position_embd" in name:
        kind = GGMLQuantizationType.F32
    elif array.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
        kind = GGMLQuantizationType.F16
    content = gguf.quants.quantize(array, kind)
    held = gguf.quants.dequantize(content, kind).reshape(numbers.shape).astype(np.float32)
    return content, kind, held
