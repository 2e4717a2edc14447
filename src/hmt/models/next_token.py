"""Multi-token prediction: the layer behind a checkpoint's last one, which drafts one token more.

It computes from a token and the hidden state of the one before it (DeepSeek-V3's technical report,
arXiv 2412.19437, section 2.2).  Here it is a separate model with one layer, made of the family's,
which shares the embedding and the output layer of the model that verifies.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from typing_extensions import override

from hmt.contracts.blocks import TRUNK, BlockId, BlockKind, BlockSpec, ParamSpec
from hmt.contracts.step import Step
from hmt.contracts.store import Weights
from hmt.layers import RMSNorm, linear_params, project
from hmt.models.decoder import Decoder
from hmt.models.drafter import Drafter
from hmt.models.registry import open_model, text_part

_LAYER: Final = "model.layers.0."
_FIRST: Final = BlockId(0, BlockKind.ATTENTION)


@dataclass(frozen=True, slots=True)
class _Names:
    """What checkpoints call the parts; `layer` is what its other tensors' names begin with."""

    layer: str
    token_norm: str
    hidden_norm: str
    joined: str
    norm: str
    head: tuple[str, ...] = ()
    table: tuple[str, ...] = ()


def _deepseek_names(config: Mapping[str, Any]) -> _Names | None:
    if not config.get("num_nextn_predict_layers"):
        return None
    at = f"model.layers.{config['num_hidden_layers']}."
    return _Names(
        at, f"{at}enorm.weight", f"{at}hnorm.weight", f"{at}eh_proj",
        f"{at}shared_head.norm.weight", (f"{at}shared_head.head.weight",),
        (f"{at}embed_tokens.weight",),
    )  # fmt: skip


def _qwen_names(config: Mapping[str, Any]) -> _Names | None:
    if "num_nextn_predict_layers" in config:  # of a GGUF file, where all are called alike
        return _deepseek_names(config)
    if not config.get("mtp_num_hidden_layers", 1):
        return None
    return _Names(
        "mtp.layers.0.", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight",
        "mtp.fc", "mtp.norm.weight",
    )  # fmt: skip


# Architectures whose files may have such layers, and how these are called.
_FAMILIES: Final[dict[str, Callable[[Mapping[str, Any]], _Names | None]]] = {
    "DeepseekV3ForCausalLM": _deepseek_names,
    "Glm4MoeForCausalLM": _deepseek_names,
    "Qwen3NextForCausalLM": _qwen_names,
    "Qwen3_5ForCausalLM": _qwen_names,
    "Qwen3_5MoeForCausalLM": _qwen_names,
}


class NextTokenModel(Drafter):
    """A model of one layer, whose embedding joins a token with a hidden state."""

    def __init__(self, base: Decoder, names: _Names, borrows: Collection[BlockKind]) -> None:
        """`base` has one layer, and is changed; `borrows` as in Drafter."""
        self._norm: RMSNorm = base.final_norm_layer
        width = base.spec.hidden_size
        joining = (
            self._norm.param("token_norm", names.token_norm),
            self._norm.param("hidden_norm", names.hidden_norm),
            *linear_params("joined", width, 2 * width, names.joined),
        )
        blocks = (
            replace(_renamed(block, names), params=(*_renamed(block, names).params, *joining))
            if block.id == _FIRST
            else _renamed(block, names)
            for block in base.spec.blocks
        )
        spec = replace(base.spec, blocks=tuple(blocks), ignored=(r".*",), together=False)
        super().__init__(base, spec, borrows)

    @override
    def embed(self, step: Step, weights: Weights) -> Tensor:
        assert step.inputs is not None, "a step without hidden states"
        with weights.lease(_FIRST) as params:
            where = params["token_norm"].data.device
            tokens = self._tokens(step, weights, where)
            hidden = step.inputs.to(where, tokens.dtype)
            parts = (
                self._norm(tokens, params["token_norm"]),
                self._norm(hidden, params["hidden_norm"]),
            )
            return project(torch.cat(parts, dim=1), params, "joined")


def open_predictor(
    config: Mapping[str, Any],
    path: Path,
    dtype: torch.dtype,
    borrows: Collection[BlockKind] = (),
) -> NextTokenModel | None:
    """What drafts one token more than the model of a parsed config.json; None: nothing does.

    `borrows` as in Drafter: these layers share the model's embedding and output layer, whether or
    not there are copies in the checkpoint.

    Whether the checkpoint has these layers, its tensors tell.  Raises as `open_model` does.
    """
    config = text_part(config) or config
    [architecture] = config.get("architectures") or [""]
    names = _FAMILIES.get(architecture, lambda config: None)(config)
    if names is None:
        return None
    one = {**config, "num_hidden_layers": 1, "num_nextn_predict_layers": 0}
    for key, last in (("layer_types", "full_attention"), ("mlp_layer_types", "sparse")):
        if isinstance(config.get(key), list):
            one[key] = [last]
    if "first_k_dense_replace" in one:
        one["first_k_dense_replace"] = 0
    base = open_model(one, path, dtype)
    return NextTokenModel(base, names, borrows) if isinstance(base, Decoder) else None


def _renamed(block: BlockSpec, names: _Names) -> BlockSpec:
    """A block of a model of one layer as the checkpoint calls its tensors."""

    def sources(param: ParamSpec) -> tuple[str, ...]:
        if block.id.layer != TRUNK:
            return tuple(name.replace(_LAYER, names.layer) for name in param.sources)
        if block.id.kind is BlockKind.EMBEDDING:
            return (*names.table, *param.sources)
        return (*names.head, *param.sources) if param.name == "weight" else (names.norm,)

    params = (replace(param, sources=sources(param)) for param in block.params)
    return replace(block, params=tuple(params))
