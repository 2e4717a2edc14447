"""What the plan and the loader are told of a model besides its blocks."""

from transformers import PreTrainedModel

from hmt.models.config import Config, max_context

REMARK = "runs through transformers' modules, which is slower than a family of HMT's own"

UNCAPTURED = "modules of transformers compute its layers"

# Buffers that old checkpoints have and that are computed.
_IGNORED = (r"\.inv_freq$", r"\.attn\.(masked_)?bias$", r"\.attention\.(masked_)?bias$")


def longest_context(config: Config) -> int:
    """Positions of a sequence at most."""
    if getattr(config, "max_position_embeddings", None):
        return max_context(config)
    for name in ("seq_length", "max_seq_len", "n_positions"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return 2048


def ignored_names(model: PreTrainedModel) -> tuple[str, ...]:
    """Regexes of a checkpoint's tensors that are known and not needed."""
    found = list(_IGNORED)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            found += getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    return tuple(dict.fromkeys(found))
