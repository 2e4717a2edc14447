"""Types of encoders of images in GGUF files: names of tensors, and transformers' names.

What they mean: llama.cpp's tools/mtmd/clip.cpp, and the vision models of its converter.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from hmt.contracts.checkpoint import TensorRecord
from hmt.formats.gguf import projector_fields as fields
from hmt.formats.gguf.keys import Keys

Prepared = Callable[
    [Keys, Mapping[str, Any], Mapping[str, TensorRecord]], tuple[dict[str, Any], dict[str, Any]]
]


@dataclass(frozen=True)
class Projector:
    """One of llama.cpp's types of projectors.

    models      type and class of transformers' model, by the language model's architecture
    tokens      tokens that config.json numbers, by its fields
    vision      fields of vision_config besides those that all have
    layer       names of tensors in a layer, trunk of those outside, deepstack of those for layers
    processor   what its image processor does that files do not say, and in "video" that of videos,
                where it is another: as published with the models
    at, blocks  how names of parameters begin, and those of a layer behind that
    out         the tensor, and which of its sizes features have
    prepared    of types whose images are no grids of two frames: fields of config.json, and of
                the image processor, by keys, vision_config and the file's tensors
    plain       parameters without `weight` in their names, and how many sizes they have; in names
                of tensors, too, {} is a layer's number
    around      names of tokens in front of an image's and behind them; without any in front, of
                those behind each row and behind the last; without any, features alone, unless
                `prepared` gives fields of transformers' processor, which then writes text
    mark        the token that stands for an image in a prompt; empty: that of its features
    turned      rows of queries and keys lie in llama.cpp's order
    also_blind  such language models are also published without an encoder, by the same type
    unused      tensors that say what the language model's file says
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
    prepared: Prepared | None = None
    plain: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    around: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    mark: str = ""
    turned: bool = False
    also_blind: bool = False
    unused: frozenset[str] = frozenset()


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
_CLIP_LAYER: Final = {
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_QWEN_PIXELS: Final = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 3136, "longest_edge": 12845056},
}
PROJECTORS: Final[Mapping[str, Projector]] = {
    "qwen2vl_merger": Projector(
        {"qwen2vl": ("qwen2_vl", "Qwen2VLForConditionalGeneration")},
        _QWEN_TOKENS,
        fields.quick_gelu,
        {**_QWEN_LAYER, "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        _QWEN_TRUNK,
        _QWEN_PIXELS,
    ),
    "qwen2.5vl_merger": Projector(
        {"qwen2vl": ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration")},
        _QWEN_TOKENS,
        fields.silu_windows,
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
        fields.deepstack,
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
            "video": {"size": {"shortest_edge": 4096, "longest_edge": 25165824}},
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
        fields.siglip,
        _CLIP_LAYER,
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
        prepared=fields.squares,
        plain={
            "mm.input_projection.weight": (
                "multi_modal_projector.mm_input_projection_weight",
                2,
            ),
        },
        around=(("\n\n", "<start_of_image>"), ("<end_of_image>", "\n\n")),
        mark="<start_of_image>",
    ),
    "internvl": Projector(
        dict.fromkeys(
            ("llama", "qwen2", "qwen3", "qwen3moe"),
            ("internvl", "InternVLForConditionalGeneration"),
        ),
        {"image_token_id": "<IMG_CONTEXT>"},
        fields.intern,
        {
            "ln1": "layernorm_before",
            "ln2": "layernorm_after",
            "attn_q": "attention.q_proj",
            "attn_k": "attention.k_proj",
            "attn_v": "attention.v_proj",
            "attn_q_norm": "attention.q_norm",
            "attn_k_norm": "attention.k_norm",
            "attn_out": "attention.projection_layer",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
        {
            "v.patch_embd": "vision_tower.embeddings.patch_embeddings.projection",
            "mm.model.mlp.0": "multi_modal_projector.layer_norm",
            "mm.model.mlp.1": "multi_modal_projector.linear_1",
            "mm.model.mlp.3": "multi_modal_projector.linear_2",
        },
        {"image_processor_type": "GotOcr2ImageProcessor"},
        at="model.",
        blocks="vision_tower.encoder.layer.{}.",
        out=("mm.model.mlp.3.weight", 0),
        prepared=fields.tiles,
        plain={
            "v.class_embd": ("vision_tower.embeddings.cls_token", 3),
            "v.position_embd.weight": ("vision_tower.embeddings.position_embeddings", 3),
            "v.blk.{}.ls1.weight": ("vision_tower.encoder.layer.{}.lambda_1", 1),
            "v.blk.{}.ls2.weight": ("vision_tower.encoder.layer.{}.lambda_2", 1),
        },
        around=(("<img>",), ("</img>",)),
        also_blind=True,
    ),
    "idefics3": Projector(
        {"llama": ("idefics3", "Idefics3ForConditionalGeneration")},
        {"image_token_id": "<image>"},
        fields.idefics,
        _CLIP_LAYER,
        {
            "v.patch_embd": "vision_model.embeddings.patch_embedding",
            "v.position_embd": "vision_model.embeddings.position_embedding",
            "v.post_ln": "vision_model.post_layernorm",
            "mm.model.fc": "connector.modality_projection.proj",
        },
        {"image_processor_type": "Idefics3ImageProcessor"},
        at="model.",
        blocks="vision_model.encoder.layers.{}.",
        out=("mm.model.fc.weight", 0),
        prepared=fields.written_tiles,
        also_blind=True,
    ),
    "mlp": Projector(
        dict.fromkeys(("llama", "qwen2"), ("llava", "LlavaForConditionalGeneration")),
        {"image_token_index": "<image>"},
        fields.clip,
        _CLIP_LAYER,
        {
            "v.patch_embd": "vision_tower.embeddings.patch_embedding",
            "v.position_embd": "vision_tower.embeddings.position_embedding",
            "v.pre_ln": "vision_tower.pre_layrnorm",
            "mm.0": "multi_modal_projector.linear_1",
            "mm.2": "multi_modal_projector.linear_2",
        },
        {"image_processor_type": "CLIPImageProcessor"},
        at="model.",
        blocks="vision_tower.encoder.layers.{}.",
        prepared=fields.patches_of_clip,
        plain={
            "v.class_embd": ("vision_tower.embeddings.class_embedding", 1),
            "model.image_newline": ("image_newline", 1),
            "v.image_newline": ("image_newline", 1),
        },
        also_blind=True,
    ),
    "pixtral": Projector(
        dict.fromkeys(("llama", "mistral3"), ("mistral3", "Mistral3ForConditionalGeneration")),
        {"image_token_index": "[IMG]"},
        fields.axial,
        {
            "ln1": "attention_norm",
            "ln2": "ffn_norm",
            "attn_q": "attention.q_proj",
            "attn_k": "attention.k_proj",
            "attn_v": "attention.v_proj",
            "attn_out": "attention.o_proj",
            "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
        },
        {
            "v.patch_embd": "vision_tower.patch_conv",
            "v.pre_ln": "vision_tower.ln_pre",
            "mm.input_norm": "multi_modal_projector.norm",
            "mm.patch_merger": "multi_modal_projector.patch_merger.merging_layer",
            "mm.1": "multi_modal_projector.linear_1",
            "mm.2": "multi_modal_projector.linear_2",
        },
        {"image_processor_type": "PixtralImageProcessor"},
        at="model.",
        blocks="vision_tower.transformer.layers.{}.",
        prepared=fields.rows_of_tokens,
        around=((), ("[IMG_BREAK]", "[IMG_END]")),
        turned=True,
        also_blind=True,
        unused=frozenset({"v.token_embd.img_break"}),
    ),
}
