"""Reading config.json: defaults come from transformers; what HMT does not compute is refused."""

import copy
import sys
from collections.abc import Mapping
from typing import Any

import torch
from transformers import CONFIG_MAPPING
from transformers.utils import import_utils

from hmt.base.errors import CheckpointError
from hmt.contracts.sharding import RankShare
from hmt.layers import (
    Attention,
    GatedFFN,
    LatentAttention,
    ResidualFFN,
    RMSNorm,
    Rotary,
    check_options,
)


def _import_validators() -> None:
    """Import what checks fields of transformers' configurations, without its modelling code.

    The check of an activation function's name imports torch.distributed, torch._dynamo and sympy:
    half of the time that HMT takes to start.  Where torch seems absent, transformers leaves that
    one check out, and `activation` refuses unknown names anyway.
    """
    available = import_utils.is_torch_available
    import_utils.is_torch_available = lambda: False
    try:
        from transformers.utils import type_validators
    finally:
        import_utils.is_torch_available = available
    # What it imports in its turn would go on without torch as well.
    for module in (type_validators, sys.modules.get("transformers.image_transforms")):
        if module is not None:
            vars(module).update(is_torch_available=available, torch=torch)


if "transformers.utils.type_validators" not in sys.modules:
    _import_validators()

Config = Any  # a configuration object of transformers; its fields differ by family

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_COUNTS = (
    "gated_norm_rank",
    "hidden_size",
    "hc_mult",
    "hc_sinkhorn_iters",
    "head_dim",
    "index_head_dim",
    "index_kpool",
    "index_n_heads",
    "index_topk",
    "intermediate_size",
    "kv_lora_rank",
    "linear_head_dim",
    "mamba_d_conv",
    "mamba_d_head",
    "mamba_d_ssm",
    "mamba_d_state",
    "mamba_dt_rank",
    "mamba_expand",
    "mamba_head_dim",
    "mamba_n_groups",
    "mamba_n_heads",
    "mamba_num_heads",
    "linear_key_head_dim",
    "linear_num_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "max_position_embeddings",
    "moe_intermediate_size",
    "moe_latent_size",
    "moe_shared_expert_intermediate_size",
    "n_groups",
    "n_routed_experts",
    "num_attention_heads",
    "num_experts",
    "num_experts_per_tok",
    "num_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_local_experts",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "sliding_window",
    "ssm_state_size",
    "state_size",
    "time_step_rank",
    "v_head_dim",
    "vocab_size",
)
_PARTIAL = (
    "bamba",
    "deepseek_v4",
    "glm4_moe",
    "minimax_m2",
    "phi3",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen4_exp_text",
)  # families that read partial_rotary_factor
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
_MOST = {"num_hidden_layers": 1 << 13, "vocab_size": 1 << 26, "max_position_embeddings": 1 << 40}
_MOST |= {"sliding_window": 1 << 40}
_MOST |= {"hc_mult": 1 << 6, "hc_sinkhorn_iters": 1 << 10}
_MOST_ELSE = 1 << 22
_MOST_BLOCKS = 1 << 20
# As in a Granite without experts, or a MiniMax.
_MAY_BE_NONE = ("num_experts_per_tok", "num_local_experts", "shared_intermediate_size")
# By type: sizes that are 0 where attention knows no positions.
_MAY_BE_0 = {"glm5_next_text": ("head_dim", "qk_rope_head_dim")}
# Of rotary positions; transformers warns where a type that is the text of one that sees has them.
_AXES = frozenset(("mrope_section", "mrope_interleaved"))
_NO_POSITIONS = 1 << 20  # what GGUF files of such models say


def read_config(config: Mapping[str, Any], model_type: str) -> Config:
    """transformers' configuration of `model_type`, filled from a parsed config.json.

    Published files omit fields whose default they use, and write rotary settings in several ways;
    transformers' classes know both.  Raises CheckpointError where they refuse the file.
    """
    known = CONFIG_MAPPING[model_type].ignore_keys_at_rope_validation | _AXES
    read = as_transformers_reads({**config, "ignore_keys_at_rope_validation": known}, model_type)
    check_counts(read)
    heads = getattr(read, "num_attention_heads", 0)  # none: a model without attention
    for layer in _kinds_of_layers(read) if heads else ():
        if heads % layer.num_key_value_heads:
            raise CheckpointError(
                f"{heads} query heads cannot share {layer.num_key_value_heads} key-value heads "
                "evenly"
            )
    return read


def _kinds_of_layers(config: Config) -> list[Config]:
    """The configuration; of one in which layers differ, that of each kind of them."""
    kinds = getattr(config, "per_layer_config", None)
    if kinds is None:
        return [config]
    for index in range(config.num_hidden_layers):
        check_counts(kinds[index])
    return [kinds[index] for index in range(config.num_hidden_layers)]


def as_transformers_reads(config: Mapping[str, Any], model_type: str) -> Config:
    """transformers' object, unless the file states sizes that no object should be made of.

    Some of its classes make a list as long as there are layers, or labels, while they are made: a
    changed digit would take all of the machine's memory.  Raises CheckpointError.
    """
    most = _MOST["num_hidden_layers"]
    for part in (config, *(one for one in config.values() if isinstance(one, Mapping))):
        for name, value in part.items():
            # Not vocab_size_per_layer_input, which is of a table.
            counts = ("layer" in str(name) and "size" not in str(name)) or name == "num_labels"
            if counts and isinstance(value, int | float) and value > most:
                raise CheckpointError(f"{name} is {value}; it must be at most {most}")
    # transformers warns of the old name, also where it says nothing.
    given = {k: value for k, value in config.items() if k != "rope_scaling" or value is not None}
    try:
        return CONFIG_MAPPING[model_type].from_dict(_with_floats(copy.deepcopy(given)))
    except Exception as error:  # transformers validates with errors of many kinds
        raise CheckpointError(
            f"transformers cannot read it as {model_type!r}: {first_line(error)}"
        ) from error


def _with_floats(value: Any) -> Any:
    """A parsed config.json with the numbers that transformers writes as {"__float__": "Infinity"}.

    JSON has no name for them.
    """
    if isinstance(value, list):
        return [_with_floats(one) for one in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(value["__float__"])
    return {name: _with_floats(one) for name, one in value.items()}


def check_counts(config: Config, *, no_window: int | None = None) -> None:
    """Raise CheckpointError for sizes that no model has: blocks are made for what they count.

    `no_window` may be what models without a sliding window have there.  Published models stay
    below a hundredth of these bounds.
    """
    for name in _COUNTS:
        try:
            value = getattr(config, name, None)
        except RuntimeError:  # of configurations in which layers differ
            continue
        if name == "sliding_window" and value == no_window:
            continue
        none = (*_MAY_BE_NONE, *_MAY_BE_0.get(config.model_type, ()))
        least, most = int(name not in none), _MOST.get(name, _MOST_ELSE)
        if isinstance(value, int) and not least <= value <= most:
            raise CheckpointError(f"{name} is {value}; it must be from {least} to {most}")
    layers = getattr(config, "num_hidden_layers", None) or 1
    experts = max(getattr(config, name, None) or 1 for name in _EXPERTS)
    if layers * experts > _MOST_BLOCKS:
        raise CheckpointError(
            f"{layers} layers with {experts} experts are more than {_MOST_BLOCKS} blocks, the most "
            "that HMT keeps account of"
        )


def require(config: Config, name: str, *allowed: Any) -> None:
    """Raise CheckpointError unless field `name` is one of `allowed`, or not there at all."""
    value = getattr(config, name, allowed[0])
    if value not in allowed:
        choices = " or ".join(map(repr, allowed))
        raise CheckpointError(f"{name} is {value!r}; HMT computes this family with {choices} only")


def check_experts(config: Config, experts: int, groups: int = 1, kept_groups: int = 1) -> None:
    """Raise CheckpointError unless num_experts_per_tok experts can be chosen as described."""
    top_k = config.num_experts_per_tok
    if not all(type(count) is int for count in (top_k, experts, groups, kept_groups)):
        raise CheckpointError(
            f"num_experts_per_tok is {top_k!r} of {experts!r} experts, in {kept_groups!r} of "
            f"{groups!r} groups; all of these must be numbers"
        )
    even = groups and kept_groups and experts % groups == 0 and 0 < kept_groups <= groups
    if not even or not 0 < top_k <= experts // groups * kept_groups:
        raise CheckpointError(
            f"{top_k} experts per token cannot be chosen from {kept_groups} of {groups} groups of "
            f"{experts} experts"
        )


def head_dim(config: Config) -> int:
    """Numbers per attention head."""
    given = getattr(config, "head_dim", None)
    return int(given or config.hidden_size // config.num_attention_heads)


def activation(config: Config, name: str = "hidden_act") -> str:
    """The name by which kernels know the activation in field `name`."""
    wanted = getattr(config, name)
    if wanted not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise CheckpointError(f"{name} {wanted!r} is not supported; HMT has {known}")
    return _ACTIVATIONS[wanted]


def rotary(config: Config, layer_type: str | None = None) -> Rotary:
    """Rotary positions, of one layer type where the configuration keeps them apart."""
    parameters = config.rope_parameters
    try:
        if layer_type is not None:
            parameters = parameters[layer_type]
        elif "rope_type" not in parameters:
            raise CheckpointError(
                f"rope_parameters has a dictionary for each of {', '.join(sorted(parameters))}; "
                "layers of this family all turn alike"
            )
        check_options(parameters)
        _check_partial(config, parameters)
        # In some families layers of other types have heads of other widths.
        dim = head_dim(_layer_config(config, layer_type))
        return Rotary(dim, parameters, config.max_position_embeddings)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(
            f"rope_parameters {parameters} cannot be used: {type(error).__name__} {error}"
        ) from error


def _check_partial(config: Config, parameters: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a share of the head where transformers' family has no use for it.

    It leaves the factor aside with some types and cannot run with others.
    """
    share = parameters.get("partial_rotary_factor")
    if share in (None, 1) or parameters.get("rope_type") == "proportional":
        return
    if config.model_type not in _PARTIAL:
        raise CheckpointError(
            f"partial_rotary_factor is {share}; models of type {config.model_type!r} turn whole "
            f"heads, and of HMT's families only {', '.join(_PARTIAL)} turns a part"
        )


def rotaries(config: Config) -> list[Rotary]:
    """Rotary positions of all layer types; none where attention knows no positions."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        return [rotary(config)]
    used = set(getattr(config, "layer_types", None) or parameters)
    return [rotary(config, layer_type) for layer_type in sorted(used & set(parameters))]


def _layer_config(config: Config, layer_type: str | None) -> Config:
    """That of layers of a type, where they may differ from others."""
    kinds, types = getattr(config, "per_layer_config", None), getattr(config, "layer_types", None)
    if kinds is None or not types or layer_type not in types:
        return config
    return kinds[types.index(layer_type)]


def max_context(config: Config) -> int:
    """Positions that the model can tell apart.

    With "dynamic" rotary positions the configuration's number is that of the unscaled model.
    Models of state spaces alone name no number, since they have no positions.
    """
    if not hasattr(config, "max_position_embeddings"):
        return _NO_POSITIONS
    stretch = [
        float(parameters["factor"])
        for parameters in rotary_parameters(config)
        if parameters.get("rope_type") == "dynamic"
    ]
    return int(config.max_position_embeddings * min(stretch, default=1.0))


def rotary_parameters(config: Config) -> list[Mapping[str, Any]]:
    """Rotary parameters of a configuration, of each layer type where they differ; none: none."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        return [parameters]
    return [each for each in parameters.values() if isinstance(each, Mapping)]


def windows(config: Config) -> list[int]:
    """Each layer's sliding window; 0 where a layer sees everything."""
    known = {"full_attention": 0, "sliding_attention": config.sliding_window}
    types = layer_kinds(config, *known)
    if "sliding_attention" in types and config.sliding_window is None:
        raise CheckpointError("layer_types has sliding_attention, but sliding_window is not set")
    return [known[kind] for kind in types]


def layer_kinds(config: Config, *known: str, name: str = "layer_types") -> list[str]:
    """Each layer's entry in field `name`.  Raises CheckpointError unless all are `known`."""
    types = list(getattr(config, name)[: config.num_hidden_layers])
    if len(types) < config.num_hidden_layers or not set(known) >= set(types):
        raise CheckpointError(
            f"{name} {sorted(map(str, set(types)))} for {len(types)} of {config.num_hidden_layers} "
            f"layers; each layer must have one of {', '.join(known)}"
        )
    return types


def norm(config: Config) -> RMSNorm:
    """The norm of hidden states."""
    return RMSNorm(config.hidden_size, config.rms_norm_eps)


def attention(config: Config, turned_by: Rotary, **differences: Any) -> Attention:
    """Attention with the configuration's sizes; `differences` are fields of Attention."""
    dim = head_dim(config)
    fields = {
        "hidden_size": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": dim,
        "rotary": turned_by,
        "norm": norm(config),
        "scale": dim**-0.5,
        "share": divided(config, "heads"),
    }
    return Attention(**(fields | differences))


def latent_attention(
    config: Config, turned_by: Rotary, scale: float, **differences: Any
) -> LatentAttention:
    """Attention over latent vectors as most configurations describe it, but for `differences`."""
    return LatentAttention(
        config.hidden_size,
        config.num_attention_heads,
        config.q_lora_rank,
        config.kv_lora_rank,
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.v_head_dim,
        turned_by,
        scale,
        bias=config.attention_bias,
        **differences,
    )


def gated_ffn(config: Config, width: int | None = None, **differences: Any) -> GatedFFN:
    """A gated feed-forward network, `intermediate_size` wide unless told otherwise."""
    width, function = width or config.intermediate_size, activation(config)
    if getattr(config, "swiglu_limit", None) is not None:
        require(config, "hidden_act", "silu")
        require(config, "swiglu_limit", 10.0)  # to which kernels clamp
        function = "clamped_silu"
    return GatedFFN(config.hidden_size, width, function, **differences)


def expert_ffn(config: Config, width: int | None = None) -> GatedFFN:
    """One routed expert, as wide as said or as a dense network; ranks may have some of them."""
    return gated_ffn(config, width, share=divided(config, "experts"))


def residual_ffn(config: Config, **differences: Any) -> ResidualFFN:
    """The second half of a dense layer; `differences` are fields of GatedFFN."""
    ffn = gated_ffn(config, share=divided(config, "width"), **differences)
    return ResidualFFN(ffn, norm(config))


def divided(config: Config, part: str) -> RankShare | None:
    """The share of the rank that a model is made for, where it divides `part`; else None.

    part   "heads", "width" or "experts"
    """
    share: RankShare | None = getattr(config, "share", None)
    return None if share is None or getattr(share, part) is None else share


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    lines = str(error).strip().splitlines()
    return " ".join(line.strip() for line in lines[:2])
