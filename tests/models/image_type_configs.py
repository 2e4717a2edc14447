"""What a type of images and text needs beside small sizes, to be built and to be asked.

For `every_image_type`: by type, fields of its configuration, of its tower, of its image processor
and of its processor, and its tokens.
"""

from typing import Any

from vision_models import BEGIN, END, IMAGE

SIDE, PATCH = 24, 4
# Tokens that processors know by name, behind those of the tokenizer.
ADDED = (
    "<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>", "<img>", "</img>",
    "<imgpad>", "<|im_start|>", "<|im_end|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>",
    "<|IMG_LINE_BREAK|>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", "<|patch|>",
    "<|tile_x_separator|>", "<|tile_y_separator|>", "[IMG_BREAK]", "[IMG_END]", "[IMG]",
    "<|media_pad|>", "<|IMAGE_PAD|>", "<|imgpad|>", "<im_patch>", "<im_start>", "<im_end>",
    "<patch_newline>", "TILE_GLOBAL", "TILE_1", "TILE_2", "<racm3:break>", "<eoss>", "<video>",
    "<slice>", "</slice>", "<image_id>", "</image_id>", "<frame_start>", "<im_col>",
    "<low_res_im_start>",
    "<IMG_START>", "<IMG_ATOM>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>",
    "<row_1_col_1>", "<row_1_col_2>", "<row_2_col_1>", "<row_2_col_2>", "]<]image[>[",
    "]<]video[>[",
)  # fmt: skip
FIRST = 4096
VOCABULARY = 4160
TOWER = {
    "depth": 2, "num_hidden_layers": 2, "num_layers": 2, "image_size": SIDE, "patch_size": PATCH,
    "hidden_size": 32, "embed_dim": 32, "intermediate_size": 48, "num_heads": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "out_hidden_size": 64,
    "fullatt_block_indexes": [1], "deepstack_visual_indexes": [0], "vision_use_head": False,
    "num_position_embeddings": 16, "window_size": 16,
}  # fmt: skip
NAMED = {"image_token_id": IMAGE, "image_token_index": IMAGE, "vision_start_token_id": BEGIN,
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
MORE: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {"196": 256}},
    "gemma3": {"mm_tokens_per_image": 9},
    "shieldgemma2": {"mm_tokens_per_image": 9},
    "gemma4": {
        "text_config": {"vocab_size_per_layer_input": VOCABULARY},
        "vision_config": {
            "model_type": "gemma4_vision", "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
            "head_dim": 8, "patch_size": 2, "position_embedding_size": 128,
        },
    },
    "cohere_compass": {"text_config": {"rope_parameters": _ROPES}},
    "llava_next": _POINTS, "llava_next_video": _POINTS,
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
    "granite4_vision": _POINTS | {
        "downsample_rate": "1/2", "deepstack_layer_map": [[-1, 0], [0, 2]],
        "spatial_target_layers": [1, 1, 2, 3],
        "qformer_config": {
            "model_type": "blip_2_qformer", "hidden_size": 32, "num_attention_heads": 2,
            "num_hidden_layers": 1, "intermediate_size": 48, "encoder_hidden_size": 32,
        },
    },
    "hunyuan_vl": {
        "text_config": {"head_dim": 16, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2, 2],
        }},
        "im_start_id": BEGIN, "im_end_id": END, "im_newline_id": 3,
    },
    "perception_lm": {
        "vision_config": {
            "model_type": "timm_wrapper", "architecture": "vit_pe_lang_large_patch14_448",
            "model_args": {
                "embed_dim": 32, "depth": 2, "num_heads": 2, "img_size": [24, 24],
                "patch_size": 4, "ref_feat_shape": [6, 6], "global_pool": "",
                "use_post_transformer_norm": False,
            },
        },
        "projector_pooling_ratio": 2,
    },
    "deepseek_ocr2": {
        "text_config": {
            "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_routed_experts": 8,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        },
        "vision_config": {
            "sam_config": {
                "hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2,
                "num_attention_heads": 2, "global_attn_indexes": [1], "mlp_dim": 48,
                "window_size": 4, "downsample_channels": [24, 64],
            },
            "encoder_config": {
                "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": None,
                "vocab_size": 32,
            },
        },
    },
    "chameleon": {
        "vocabulary_map": {"<image>": IMAGE} | {
            "IMGIMG" + "".join(chr(65 + int(digit)) for digit in str(number)) + "Z": 300 + number
            for number in range(16)
        },
        "vq_config": {
            "embed_dim": 8, "num_embeddings": 16, "latent_channels": 8, "resolution": 24,
            "base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1,
        },
        "image_token_id": IMAGE,
    },
    "emu3": {
        "vocabulary_map": {"<image>": IMAGE} | {
            f"<|visual token {number:06}|>": 300 + number for number in range(16)
        },
        "vq_config": {
            "codebook_size": 16, "embed_dim": 4, "latent_channels": 4, "base_channels": 32,
            "channel_multiplier": [1, 1, 1, 1], "num_res_blocks": 1, "attn_resolutions": [3],
            "hidden_size": 32,
        },
        "image_token_id": IMAGE,
    },
    "paligemma": {"text_config": {"num_key_value_heads": 1}},
    "mllama": {"text_config": {"cross_attention_layers": [1, 3]}},
    "step3p7": {"text_config": {"sliding_window": 8}},
    "gemma3n": {"vision_config": {"hidden_size": 2048, "model_args": {"channel_multiplier": 0.25}}},
    "llama4": {"vision_config": {
        "intermediate_size": 128, "projector_input_dim": 32, "projector_output_dim": 32,
        "vision_output_dim": 32,
    }},
    "ovis2": {
        "visual_indicator_token_ids": [
            FIRST + ADDED.index(f"<IMG_{name}>") for name in ("START", "GRID", "COL", "ROW", "END")
        ],
    },
    "qwen2_5_omni_thinker": {"vision_start_token_id": BEGIN},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": BEGIN},
    "granite_docling": {"vision_config": {"scale_factor": 2}},
    "gemma4_unified": {
        "vision_config": {
            "model_type": "gemma4_unified_vision", "patch_size": 2, "pooling_kernel_size": 2,
            "mm_embed_dim": 32, "mm_posemb_size": 64, "output_proj_dims": 32,
        },
        "text_config": {"use_bidirectional_attention": "vision"},
    },
    "fast_vlm": {"vision_config": {
        "model_type": "timm_wrapper", "architecture": "fastvit_mci3",
        "model_args": {
            "inference_mode": True, "embed_dims": [8, 16, 32, 64, 128], "layers": [1, 1, 1, 1, 1],
        },
        "hidden_size": 256,
    }},
}  # fmt: skip
VISION: dict[str, dict[str, Any]] = {
    "aria": {"image_size": 980, "patch_size": 70}, "qwen2_vl": {"hidden_size": 64, "mlp_ratio": 2},
    "janus": {"image_size": 96, "projection_dim": 64},
    "got_ocr2": {"image_size": 1024, "patch_size": 16, "output_channels": 32},
    "pp_chart2table": {"image_size": 1024, "patch_size": 16, "output_channels": 32},
}  # fmt: skip
_GRIDS = {"patch_size": PATCH, "temporal_patch_size": 2, "merge_size": 2,
          "size": {"shortest_edge": 256, "longest_edge": 4096}}  # fmt: skip
_SQUARE = {"height": SIDE, "width": SIDE}
IMAGES: dict[str, dict[str, Any]] = {
    "aria": {"max_image_size": 980, "split_image": False},
    "glm4v_moe": _GRIDS | {"image_processor_type": "Glm4vImageProcessor"},
    "glm_ocr": _GRIDS | {"image_processor_type": "Glm46VImageProcessor"},
    "qwen3_vl_moe": _GRIDS, "qwen2_5_omni_thinker": _GRIDS, "qwen3_omni_moe_thinker": _GRIDS,
    "got_ocr2": {"size": {"height": 1024, "width": 1024}},
    "idefics2": {"size": {"shortest_edge": 16, "longest_edge": 48}, "do_image_splitting": False},
    "idefics3": {"size": {"longest_edge": 48}, "max_image_size": {"longest_edge": 24}},
    "llava_next": _POINTS, "llava_next_video": _POINTS,
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
    "gemma4_unified": {"patch_size": 2, "pooling_kernel_size": 2, "max_soft_tokens": 70},
    "granite_docling": {"size": _SQUARE, "max_patches": 2},
    "deepseek_ocr2": {"size": {"height": 1024, "width": 1024}, "tile_size": 768},
    "granite4_vision": _POINTS | {"image_processor_type": "LlavaNextImageProcessor"},
    "perception_lm": {"tile_size": SIDE, "size": _SQUARE, "max_num_tiles": 4},
    "gemma3n": {"size": {"height": 64, "width": 64}},
    "fast_vlm": {
        "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 128},
        "crop_size": {"height": 128, "width": 128},
    },
    "lighton_ocr": {"size": {"longest_edge": 48}, "patch_size": PATCH},
    "mistral3": {"size": {"longest_edge": 48}, "patch_size": PATCH},
    "internvl": {"max_patches": 3, "crop_to_patches": True},
    "video_llama_3": {"patch_size": PATCH, "min_pixels": 256, "max_pixels": 4096,
                      "size": {"shortest_edge": 256, "longest_edge": 4096}},
}  # fmt: skip
_LLAVA = {"patch_size": PATCH, "vision_feature_select_strategy": "default",
          "num_additional_image_tokens": 1}  # fmt: skip
PROCESSOR: dict[str, dict[str, Any]] = {
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
    "ovis2": {"image_seq_length": 36}, "paligemma": {"image_seq_length": 36},
    "idefics2": {"image_seq_len": 64},
    "fast_vlm": {
        "processor_class": "LlavaProcessor", "patch_size": 64,
        "vision_feature_select_strategy": "full", "num_additional_image_tokens": 0,
    },
    "granite_docling": {"image_seq_len": 9},
    "llama4": {"patch_size": PATCH, "pixel_shuffle_ratio": 0.5},
    "perception_lm": {"patch_size": PATCH, "pooling_ratio": 2},
}  # fmt: skip
# By type: what a row of features is called, where it is not the tokenizer's image_token.
ROW: dict[str, str] = {
    "aya_vision": "<|IMG_PATCH|>", "got_ocr2": "<imgpad>", "ovis2": "<IMG_ATOM>",
    "idefics3": "<image>", "pp_chart2table": "<imgpad>", "cohere_compass": "<|IMAGE_PAD|>",
    "dots3_note": "<|imgpad|>",
    "muse_glimmer": "<|patch|>", "step3p7": "<im_patch>", "minimax_m3_vl": "]<]image[>[",
    "llama4": "<|patch|>",
}  # fmt: skip
# By type: names of tokens that its tokenizer has as attributes, besides those of all.
NAMES: dict[str, dict[str, str]] = {
    "idefics2": {"image_boundary_token": "<fake_token_around_image>"},
    "minicpmv4_6": {
        "slice_start_token": "<slice>", "slice_end_token": "</slice>",
        "image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>",
    },
    "cohere2_vision": {"img_line_break_token": "<|IMG_LINE_BREAK|>"},
    "cohere_compass": {"image_token": "<|IMAGE_PAD|>"},
}  # fmt: skip
NAMES |= {"minicpmv4_7": NAMES["minicpmv4_6"], "minicpm_ocr": NAMES["minicpmv4_6"]}
# Whose processor batches images of one size only.
ALIKE = ("perception_lm",)
# Whose positions are counted from the token that begins an image.
AROUND = ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")
