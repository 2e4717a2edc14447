"""EAGLE-3 (arXiv 2503.01840): a small decoder that drafts from hidden states of three layers.

Checkpoints are read as their authors publish them (`LlamaForCausalLMEagle3`: `midlayer.*`, `fc`,
`d2t`) and in the format of the `speculators` library (`speculators_model_type` "eagle3").
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from typing_extensions import override

from hmt.base.errors import CheckpointError
from hmt.contracts.blocks import BlockId, BlockKind, BlockSpec
from hmt.contracts.model import FusedLayers, ModelSpec
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache, Weights
from hmt.kernels import ops
from hmt.layers import Attention, ResidualFFN, RMSNorm, linear_params, project
from hmt.models.decoder import Decoder
from hmt.models.drafter import Drafter
from hmt.models.drafter_config import (
    check_verifier,
    drafter_block,
    drafting_config,
    hidden_layers,
    layers_config,
)
from hmt.models.registry import open_model

# What several libraries call a model of this kind.
EAGLE3_ARCHITECTURES: Final = (
    "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3DraftModel", "Eagle3Speculator",
)  # fmt: skip
_FAMILIES: Final = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_LAYER_IDS: Final = "eagle_aux_hidden_state_layer_ids"
_FIRST: Final = BlockId(0, BlockKind.ATTENTION)
_QUERY_KEY_VALUE: Final = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True, slots=True)
class _Options:
    """What such a model has besides the sizes of its layers.

    layers                as many layers of the verifier come before each of its hidden states
    width                 of one of these
    input_norm            of all of them together
    each_norm             of each of them
    norm_before_residual  the normed hidden state is what the first layer adds to
    norm_output           the normed hidden state is what the next draft token is computed from
    """

    layers: tuple[int, ...]
    width: int
    input_norm: bool
    each_norm: bool
    norm_before_residual: bool
    norm_output: bool


class Eagle3(Drafter):
    """Layers over a token's embedding and hidden states of the verifier at the token before it.

    `Step.inputs` is these, [tokens, 3 * width], or the model's own hidden states [tokens,
    hidden_size], which `normed` gives, for tokens behind its draft tokens.

    layers   as many layers of the verifier come before each of the hidden states
    """

    def __init__(
        self, base: Decoder, options: _Options, table_rows: int, borrows: Collection[BlockKind]
    ) -> None:
        """`base` is changed; `table_rows`: tokens of the model that verifies."""
        first = base.fusable_layer(0)
        assert first is not None and isinstance(first.mixer, Attention)
        assert isinstance(first.second, ResidualFFN)
        self._attention, self._ffn = first.mixer, first.second
        self._options = options
        self._norm = base.final_norm_layer
        self._each_norm = RMSNorm(options.width, self._norm.eps)
        self._all_norm = RMSNorm(options.width * len(options.layers), self._norm.eps)
        self.layers = options.layers
        if self._all_norm.width == base.spec.hidden_size:
            raise CheckpointError(
                f"hidden states of {len(options.layers)} layers with {options.width} numbers "
                "cannot be told from the drafter's own: HMT runs drafters of two layers and more"
            )
        blocks = tuple(self._block(block, table_rows) for block in base.spec.blocks)
        width = base.spec.activation_width + 3 * base.spec.hidden_size + self._all_norm.width
        super().__init__(
            base,
            replace(
                base.spec, blocks=blocks, ignored=(r".*",), together=False, activation_width=width
            ),
            borrows,
        )

    @override
    def embed(self, step: Step, weights: Weights) -> Tensor:
        """Embeddings beside hidden states: [tokens, 2 * hidden_size]."""
        assert step.inputs is not None, "a step without hidden states"
        with weights.lease(_FIRST) as params:
            where = params["hidden_norm"].data.device
            tokens = self._tokens(step, weights, where)
            hidden = step.inputs.to(where, tokens.dtype)
            if hidden.shape[1] == self._all_norm.width:
                if self._options.input_norm:
                    hidden = self._all_norm(hidden, params["input_norm"])
                if self._options.each_norm:
                    hidden = torch.cat(
                        [
                            self._each_norm(part.contiguous(), params[f"fc_norm{number}"])
                            for number, part in enumerate(hidden.chunk(len(self.layers), dim=1))
                        ],
                        dim=1,
                    )
                hidden = project(hidden, params, "fc")
        return torch.cat((tokens, hidden), dim=1)

    @override
    def layer(
        self, index: int, hidden: Tensor, step: Step, weights: Weights, kv: KVCache
    ) -> Tensor:
        if index:
            return self._base.layer(index, hidden, step, weights, kv)
        own = self._attention
        tokens, residual = (part.contiguous() for part in hidden.chunk(2, dim=1))
        with weights.lease(_FIRST) as params:
            normed = self._norm(residual, params["hidden_norm"])
            joined = torch.cat((self._norm(tokens, params["norm"]), normed), dim=1)
            if self._options.norm_before_residual:
                residual = normed
            heads = ops.linear_many(joined, params, _QUERY_KEY_VALUE)
            heads = heads.unflatten(1, (-1, own.head_dim))
            query, key = heads[:, : own.heads], heads[:, own.heads : own.heads + own.kv_heads]
            if (norm := own.head_norm) is not None:
                ops.rms_norm_inplace(query, params["q_norm"].data, norm.eps, offset=norm.offset)
                ops.rms_norm_inplace(key, params["k_norm"].data, norm.eps, offset=norm.offset)
            ops.rope_inplace(query, key, *own.rotary.cos_sin(step))
            x = project(kv.append_attend(0, step, heads, scale=own.scale), params, "o_proj")
        with weights.lease(BlockId(0, BlockKind.FFN)) as params:
            return self._ffn(residual, x, params)

    @override
    def fused_layers(self, layers: range, weights: Weights, kv: KVCache) -> FusedLayers | None:
        return None  # the first one is of no kind that kernels know

    @override
    def normed(self, hidden: Tensor, weights: Weights) -> Tensor:
        """What the next draft token is computed from, which mostly is not normed."""
        return self._base.normed(hidden, weights) if self._options.norm_output else hidden.float()

    def _block(self, block: BlockSpec, table_rows: int) -> BlockSpec:
        """A block of the family's model as it is here, by the names of drafters' checkpoints."""
        block = drafter_block(block, table_rows)
        if block.id != _FIRST:
            return block
        width, count = self._norm.width, len(self._options.layers)
        params = tuple(
            replace(param, shape=(param.shape[0], 2 * width))
            if param.name in _QUERY_KEY_VALUE
            else param
            for param in block.params
        )
        names = ("layers.0.hidden_norm.weight", "midlayer.hidden_norm.weight")
        params += (
            replace(self._norm.param("hidden_norm", names[0]), sources=names),
            *linear_params("fc", width, self._all_norm.width, "fc"),
        )
        if self._options.input_norm:
            params += (self._all_norm.param("input_norm", "input_norm.weight"),)
        if self._options.each_norm:
            params += tuple(
                self._each_norm.param(f"fc_norm{n}", f"fc_norm.{n}.weight") for n in range(count)
            )
        return replace(block, params=params)


def open_eagle3(
    config: Mapping[str, Any],
    path: Path,
    dtype: torch.dtype,
    verifier: ModelSpec,
    borrows: Collection[BlockKind] = (),
) -> Eagle3:
    """The drafter of a parsed config.json, for the model that verifies; `borrows` as in Drafter.

    Raises ConfigError where it drafts for another model, and as `open_model` does.
    """
    layer_config = layers_config(config, path)
    family = layer_config.get("model_type", "llama")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise CheckpointError(
            f"{path}/config.json has layers of type {family!r:.60}; HMT runs EAGLE-3 drafters with "
            f"layers of {' or '.join(_FAMILIES)}"
        )
    own_width = layer_config.get("hidden_size")
    width = config.get("target_hidden_size") or own_width
    check_verifier(
        path, verifier, {"hidden_size": width, "vocab_size": layer_config.get("vocab_size")}
    )
    said = config.get("eagle_config")
    places = config, said if isinstance(said, Mapping) else {}
    asked = next((one[_LAYER_IDS] for one in places if one.get(_LAYER_IDS) is not None), None)
    options = _Options(
        layers=hidden_layers(path, verifier, asked),
        width=verifier.hidden_size,
        input_norm=bool(config.get("norm_before_fc")),
        each_norm=bool(config.get("fc_norm")),
        norm_before_residual=bool(config.get("norm_before_residual")),
        norm_output=bool(config.get("norm_output")),
    )
    one = drafting_config(config, layer_config, _FAMILIES[family], verifier)
    base = open_model(one, path, dtype)
    assert isinstance(base, Decoder)
    if own_width != verifier.hidden_size:
        borrows = ()  # or they have another width than its layers
    elif one["vocab_size"] != verifier.vocab_size:
        borrows = set(borrows) - {BlockKind.HEAD}
    return Eagle3(base, options, verifier.vocab_size, borrows)
