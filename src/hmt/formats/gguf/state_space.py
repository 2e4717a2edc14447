"""Architectures with state spaces in all layers, or in some.

What llama.cpp's converter does to them, beside what it does to others (conversion/mamba.py):

- `A_log` is stored as -exp(A_log), and convolutions without their dimension of one.
- Of Mamba-2, `A_log` and `D` are columns, and the norm of results has a row for each group.
- Falcon-H1's factors are multiplied into its weights.
- Files of models without attention say that they have 0 heads, and networks of no width.
"""

from collections.abc import Sequence
from typing import Any, Final

from hmt.formats.gguf.architecture import GRANITE, Architecture
from hmt.formats.gguf.fields import Config, count, flag, number, tensor
from hmt.formats.gguf.hybrid import heads_by_layer, heads_of_keys
from hmt.formats.gguf.keys import Keys

_RMS: Final = "attention.layer_norm_rms_epsilon"
_BACKBONE: Final = {
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
    "output": "lm_head",
}
_LATE_TRUNK: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.final_layernorm",
    "output": "lm_head",
}
_AT_BACKBONE: Final = "backbone.layers.{}."


def _tensors(at: str) -> dict[str, str]:
    """Names of what all state spaces have; those without an ending have ".bias" here."""
    return {
        "ssm_in": f"{at}in_proj",
        "ssm_conv1d": f"{at}conv1d",
        "ssm_a.bias": f"{at}A_log",
        "ssm_d.bias": f"{at}D",
        "ssm_out": f"{at}out_proj",
    }


def _mamba2(at: str) -> dict[str, str]:
    return _tensors(at) | {"ssm_dt.bias": f"{at}dt_bias", "ssm_norm": f"{at}norm"}


def _mamba1(at: str) -> dict[str, str]:
    return _tensors(at) | {"ssm_x": f"{at}x_proj", "ssm_dt": f"{at}dt_proj"}


def _kinds(keys: Keys, config: Config) -> list[str]:
    """Layers attend where they have heads of keys."""
    heads = heads_by_layer(keys, config)
    return ["full_attention" if own else "linear_attention" for own in heads]


def _wide(keys: Keys, config: Config) -> int:
    """How many times the hidden size a layer is wide."""
    inner, hidden = keys.count("ssm.inner_size"), config["hidden_size"]
    if inner % hidden:
        raise keys.unread("ssm.inner_size", f"which is no multiple of {hidden}")
    return int(inner // hidden)


def _head_dim(keys: Keys, config: Config) -> int:
    inner, heads = keys.count("ssm.inner_size"), keys.count("ssm.time_step_rank")
    if inner % heads:
        raise keys.unread("ssm.inner_size", f"which {heads} heads cannot share evenly")
    return int(inner // heads)


def _in_any_layer(name: str) -> Any:
    """Whether a layer has such a tensor."""
    return lambda keys, config: any(
        keys.has_tensor(f"blk.{layer}.{name}") for layer in range(config["num_hidden_layers"])
    )


# Fields that all hybrids of transformers call alike.
_HYBRID: Final[dict[str, Any]] = {
    "mamba_d_conv": count("ssm.conv_kernel"),
    "mamba_d_state": count("ssm.state_size"),
    "mamba_conv_bias": _in_any_layer("ssm_conv1d.bias"),
    "mamba_proj_bias": False,
}
_HYBRID2: Final[dict[str, Any]] = {
    **_HYBRID,
    "mamba_n_heads": count("ssm.time_step_rank"),
    "mamba_d_head": _head_dim,
    "mamba_n_groups": count("ssm.group_count"),
}
_ALONE: Final[dict[str, Any]] = {
    "state_size": count("ssm.state_size"),
    "conv_kernel": count("ssm.conv_kernel"),
    "expand": _wide,
    "use_bias": False,
    "use_conv_bias": _in_any_layer("ssm_conv1d.bias"),
}

MAMBA2: Final = Architecture(
    "Mamba2ForCausalLM",
    "mamba2",
    {
        **_ALONE,
        "num_heads": count("ssm.time_step_rank"),
        "head_dim": _head_dim,
        "n_groups": count("ssm.group_count"),
    },
    _mamba2("mixer.") | {"attn_norm": "norm"},
    _BACKBONE,
    at=_AT_BACKBONE,
    epsilon=(_RMS, "layer_norm_epsilon"),
    rotary=False,
    attends=False,
)


def mamba(keys: Keys) -> Architecture:
    """Mamba; with norms of what steps, keys and queries are made of, Falcon-Mamba."""
    normed = keys.flag("ssm.dt_b_c_rms", False)
    return Architecture(
        "FalconMambaForCausalLM" if normed else "MambaForCausalLM",
        "falcon_mamba" if normed else "mamba",
        {
            **_ALONE,
            "intermediate_size": count("ssm.inner_size"),
            "time_step_rank": count("ssm.time_step_rank"),
        },
        _mamba1("mixer.") | {"attn_norm": "norm"},
        _BACKBONE,
        at=_AT_BACKBONE,
        epsilon=(_RMS, "layer_norm_epsilon"),
        rotary=False,
        attends=False,
    )


def _period(keys: Keys, key: str, chosen: Sequence[int], layers: int) -> tuple[int, int]:
    """(period, offset) of the chosen layers; none: beyond the last."""
    offset = chosen[0] if chosen else layers
    period = chosen[1] - offset if len(chosen) > 1 else max(layers, offset + 1)
    if list(chosen) != [layer for layer in range(layers) if layer % period == offset]:
        raise keys.unread(key, f"and layers {list(chosen)} are no period")
    return period, offset


def _attention_period(keys: Keys, config: Config) -> tuple[int, int]:
    heads, layers = heads_by_layer(keys, config), config["num_hidden_layers"]
    chosen = [layer for layer, own in enumerate(heads) if own]
    return _period(keys, "attention.head_count_kv", chosen, layers)


def _expert_period(keys: Keys, config: Config) -> tuple[int, int]:
    layers = config["num_hidden_layers"]
    chosen = [
        layer for layer in range(layers) if keys.has_tensor(f"blk.{layer}.ffn_gate_inp.weight")
    ]
    return _period(keys, "expert_count", chosen, layers)


JAMBA: Final = Architecture(
    "JambaForCausalLM",
    "jamba",
    {
        **_HYBRID,
        "num_key_value_heads": heads_of_keys,
        "mamba_expand": _wide,
        "mamba_dt_rank": count("ssm.time_step_rank"),
        "num_experts": lambda keys, config: keys.number("expert_count", 0) or 1,
        "num_experts_per_tok": lambda keys, config: keys.number("expert_used_count", 0) or 1,
        "attn_layer_period": lambda keys, config: _attention_period(keys, config)[0],
        "attn_layer_offset": lambda keys, config: _attention_period(keys, config)[1],
        "expert_layer_period": lambda keys, config: _expert_period(keys, config)[0],
        "expert_layer_offset": lambda keys, config: _expert_period(keys, config)[1],
    },
    _mamba1("mamba.")
    | {
        "ssm_dt_norm": "mamba.dt_layernorm",
        "ssm_b_norm": "mamba.b_layernorm",
        "ssm_c_norm": "mamba.c_layernorm",
        "ffn_norm": "pre_ff_layernorm",
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
        "ffn_gate_inp": "feed_forward.router",
        "ffn_gate_exps": "feed_forward.experts.{}.gate_proj",
        "ffn_up_exps": "feed_forward.experts.{}.up_proj",
        "ffn_down_exps": "feed_forward.experts.{}.down_proj",
    },
    _LATE_TRUNK,
    rotary=False,
)


def _without_positions(keys: Keys, config: Config) -> None:
    """Bamba's files are of the same architecture, and turn heads, by way of an unused key."""
    if keys.flag("rope.scaling.finetuned", False):
        raise keys.unread(
            "rope.scaling.finetuned", "as Bamba's files have, which HMT does not read"
        )


def granitehybrid(keys: Keys) -> Architecture:
    """Granite 4 with Mamba-2; with experts, beside a network for all tokens."""
    names = _mamba2("mamba.") | {"ffn_down": "shared_mlp.output_linear"}
    joined = {"shared_mlp.input_linear.weight": ("ffn_gate", "ffn_up")}
    if keys.has_tensor("blk.0.ffn_gate_inp.weight"):
        names |= {
            "ffn_gate_inp": "block_sparse_moe.router.layer",
            "ffn_down_exps": "block_sparse_moe.output_linear",
            "ffn_down_shexp": "shared_mlp.output_linear",
        }
        joined = {
            "shared_mlp.input_linear.weight": ("ffn_gate_shexp", "ffn_up_shexp"),
            "block_sparse_moe.input_linear.weight": ("ffn_gate_exps", "ffn_up_exps"),
        }
    return Architecture(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        {
            **GRANITE,
            **_HYBRID2,
            "num_key_value_heads": heads_of_keys,
            "layer_types": _kinds,
            "mamba_expand": _wide,
            "num_local_experts": number("expert_count", 0),
            "num_experts_per_tok": number("expert_used_count", 0),
            "shared_intermediate_size": count("expert_shared_feed_forward_length"),
            "position_embedding_type": _without_positions,
        },
        names,
        rotary=False,
        turned=True,
        joined=joined,
    )


def _parts(keys: Keys, config: Config) -> list[str]:
    """What each layer of a Nemotron-H is."""
    layers = config["num_hidden_layers"]
    kinds = []
    for layer, heads in enumerate(heads_by_layer(keys, config)):
        if keys.has_tensor(f"blk.{layer}.ffn_gate_inp.weight"):
            kinds.append("moe")
        elif keys.has_tensor(f"blk.{layer}.ffn_up.weight"):
            kinds.append("mlp")
        else:
            kinds.append("full_attention" if heads else "linear_attention")
    return kinds[:layers]


def _width(keys: Keys, config: Config) -> int:
    """Of networks, which not all layers have."""
    widths = {w for w in keys.by_layer("feed_forward_length", config["num_hidden_layers"]) if w}
    if len(widths) > 1:
        raise keys.unread("feed_forward_length", "and networks must all be as wide")
    return int(max(widths, default=1))


_NEMOTRON: Final[dict[str, Any]] = {
    "num_key_value_heads": heads_of_keys,
    "intermediate_size": _width,
    "layers_block_type": _parts,
    "ssm_state_size": count("ssm.state_size"),
    "conv_kernel": count("ssm.conv_kernel"),
    "n_groups": count("ssm.group_count"),
    "mamba_num_heads": count("ssm.time_step_rank"),
    "mamba_head_dim": _head_dim,
    "use_conv_bias": _in_any_layer("ssm_conv1d.bias"),
    "mlp_bias": _in_any_layer("ffn_up.bias"),
    "time_step_min": 0.0,  # llama.cpp knows none
    "position_embedding_type": _without_positions,
    "n_group": count("expert_group_count", 1),
    "topk_group": count("expert_group_used_count", 1),
    "n_routed_experts": count("expert_count", 8),
}
_NEMOTRON_NAMES: Final = _mamba2("mixer.") | {
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mixer.experts.{}.up_proj",
    "ffn_down_exps": "mixer.experts.{}.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
}


def nemotron_h(keys: Keys) -> Architecture:
    """Nemotron-H; with experts Nemotron 3."""
    sparse: dict[str, Any] = {}
    if "expert_feed_forward_length" in keys:
        sparse = {
            "num_experts_per_tok": count("expert_used_count"),
            "moe_intermediate_size": count("expert_feed_forward_length"),
            "moe_shared_expert_intermediate_size": count("expert_shared_feed_forward_length"),
            "n_shared_experts": count("expert_shared_count", 1),
            "norm_topk_prob": flag("expert_weights_norm", False),
            "moe_latent_size": count("moe_latent_size", None),
            "routed_scaling_factor": number("expert_weights_scale", 1.0),
        }
    key = _RMS if _RMS in keys else "attention.layer_norm_epsilon"
    return Architecture(
        "NemotronHForCausalLM",
        "nemotron_h",
        _NEMOTRON | sparse,
        _NEMOTRON_NAMES,
        _BACKBONE,
        at=_AT_BACKBONE,
        epsilon=(key, "layer_norm_epsilon"),
        rotary=False,
        turned=True,
        widths=True,
        dropped=("position_embedding_type",),
    )


FALCON_H1: Final = Architecture(
    "FalconH1ForCausalLM",
    "falcon_h1",
    {
        **_HYBRID2,
        "mamba_d_ssm": count("ssm.inner_size"),
        "mamba_rms_norm": tensor("blk.0.ssm_norm.weight"),
        "mamba_norm_before_gate": False,  # as llama.cpp computes it
        "mlp_bias": False,
    },
    _mamba2("mamba.")
    | {
        "ffn_norm": "pre_ff_layernorm",
        "ffn_norm.bias": "pre_ff_layernorm.weight",  # its name has no ending
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
    },
    _LATE_TRUNK,
)
