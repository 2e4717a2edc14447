"""DFlash (arXiv 2602.06036): a small decoder that drafts a block of tokens in one pass.

The block is the last token that is known and tokens that stand for what is asked; they see each
other.  Before them stands a KV cache that every layer makes of the same hidden states of the model
that verifies; no token of the text passes through the layers.

Checkpoints are read in the format of the `speculators` library (`speculators_model_type` "dflash")
and as the authors publish them (`DFlashDraftModel`, `dflash_config`).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from typing_extensions import override

from hmt.base.errors import CheckpointError, ConfigError
from hmt.contracts.blocks import BlockId, BlockKind, BlockSpec
from hmt.contracts.model import FusedLayers, ModelSpec
from hmt.contracts.step import Segment, Step
from hmt.contracts.store import KVCache, Weights
from hmt.kernels import ops
from hmt.layers import Attention, Params, ResidualFFN, RMSNorm, linear_params, project
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
DFLASH_ARCHITECTURES: Final = "DFlashDraftModel", "DFlashSpeculator"
_FIRST: Final = BlockId(0, BlockKind.ATTENTION)
_MOST_BLOCK: Final = 256  # tokens; published ones have 8 to 16
_SLIDING: Final = "sliding_attention"


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """The tokens that such a model drafts from.

    tokens   of them: the last one that is known, and those that are asked for
    mask     the token that stands for each of these
    first    row of the first draft token: 1; or 0, where each row tells the token behind it
    """

    tokens: int
    mask: int
    first: int = 1


@dataclass(frozen=True, slots=True)
class _Windows:
    """Layers that do not see all of the text.

    layers   which
    size     positions in front of the block that all of its tokens see there
    causal   whether a token of the block sees no later one there
    """

    layers: frozenset[int] = frozenset()
    size: int = 0
    causal: bool = True


class DFlash(Drafter):
    """Qwen3's layers, whose tokens are those of blocks: the last ones of a segment.

    Tokens in front of a block come as hidden states of the verifier, `Step.inputs` [tokens, layers
    * hidden_size], with any token ids.  Their rows leave the layers as they came, and only rows of
    blocks have logits.

    layers   as many layers of the verifier come before each of the hidden states
    block    what to ask for
    """

    def __init__(
        self,
        base: Decoder,
        layers: tuple[int, ...],
        block: DraftBlock,
        windows: _Windows,
        table_rows: int,
        borrows: Collection[BlockKind],
    ) -> None:
        """`base` is changed; `table_rows`: tokens of the model that verifies."""
        usual = [base.fusable_layer(index) for index in range(base.spec.layers)]
        self._ffn = [one.second for one in usual if one and isinstance(one.second, ResidualFFN)]
        self._attention = [one.mixer for one in usual if one and isinstance(one.mixer, Attention)]
        self._norm: RMSNorm = base.final_norm_layer
        self.layers, self.block, self._windows = layers, block, windows
        joined = len(layers) * base.spec.hidden_size
        blocks = tuple(self._block(one, joined, table_rows) for one in base.spec.blocks)
        width = base.spec.activation_width + 2 * base.spec.hidden_size + joined
        spec = replace(
            base.spec, blocks=blocks, ignored=(r".*",), together=False, activation_width=width,
            uncaptured="tokens of a block see each other",
        )  # fmt: skip
        super().__init__(base, spec, borrows)

    @override
    def embed(self, step: Step, weights: Weights) -> Tensor:
        """Embeddings of blocks, and what KV rows are made of: [tokens, hidden_size]."""
        assert step.inputs is not None, "a step without hidden states"
        asked = _block_rows(step)
        with weights.lease(_FIRST) as params:
            where = params["hidden_norm"].data.device
            states = step.inputs.to(where, self.dtype)
            hidden = self._norm(project(states, params, "fc"), params["hidden_norm"])
        if len(asked):
            tokens = replace(step, token_ids=step.token_ids[asked.to(step.token_ids.device)])
            hidden[asked.to(where)] = self._tokens(tokens, weights, where)
        return hidden

    @override
    def layer(
        self, index: int, hidden: Tensor, step: Step, weights: Weights, kv: KVCache
    ) -> Tensor:
        asked = _block_rows(step).to(hidden.device)
        residual = hidden[asked]
        with weights.lease(BlockId(index, BlockKind.ATTENTION)) as params:
            normed = self._norm(residual, params["norm"])
            x = self._attend(index, hidden.index_copy(0, asked, normed), asked, step, params, kv)
        if not len(asked):
            return hidden
        with weights.lease(BlockId(index, BlockKind.FFN)) as params:
            return hidden.index_copy(0, asked, self._ffn[index](residual, x, params))

    def _attend(
        self, index: int, x: Tensor, asked: Tensor, step: Step, params: Params, kv: KVCache
    ) -> Tensor:
        """Append all of x to the KV cache; attention of the rows that are `asked`."""
        own = self._attention[index]
        assert own.head_norm is not None
        pairs = ops.linear_many(x, params, ("k_proj", "v_proj")).unflatten(1, (-1, own.head_dim))
        key, value = pairs.chunk(2, dim=1)
        query = project(x[asked], params, "q_proj").unflatten(1, (-1, own.head_dim))
        norm = own.head_norm
        ops.rms_norm_inplace(query, params["q_norm"].data, norm.eps, offset=norm.offset)
        ops.rms_norm_inplace(key, params["k_norm"].data, norm.eps, offset=norm.offset)
        cos, sin = own.rotary.cos_sin(step)
        ops.rope_inplace(key, key[:, :0], cos, sin)
        ops.rope_inplace(query, query[:, :0], cos[asked], sin[asked])
        kv.append(index, step, key, value)
        out = torch.empty_like(query)
        done = 0
        for run in step.segments:
            for first, end in run.blocks:
                rows = slice(done, done := done + end - first)
                out[rows] = self._attend_block(index, query[rows], run, first, kv)
        return project(out.flatten(1), params, "o_proj") if len(asked) else out

    def _attend_block(
        self, index: int, query: Tensor, run: Segment, first: int, kv: KVCache
    ) -> Tensor:
        """Attention of a block from position `first` on to itself and what is before it."""
        slides = index in self._windows.layers
        low = max(0, first - self._windows.size) if slides else 0
        positions = torch.arange(low, run.context, device=query.device)
        key, value = kv.gather(index, run, positions)
        scale = self._attention[index].scale
        if slides and self._windows.causal:
            return ops.attention(query, key, value, start=first - low, scale=scale)[0]
        return ops.block_attention(query, key, value, start=first - low, scale=scale)

    @override
    def fused_layers(self, layers: range, weights: Weights, kv: KVCache) -> FusedLayers | None:
        return None  # kernels know no rows that only go into the KV cache

    def _block(self, block: BlockSpec, joined: int, table_rows: int) -> BlockSpec:
        """A block of the family's model as it is here, by the names of drafters' checkpoints."""
        block = drafter_block(block, table_rows)
        if block.id != _FIRST:
            return block
        own = (
            self._norm.param("hidden_norm", "hidden_norm.weight"),
            *linear_params("fc", self._norm.width, joined, "fc"),
        )
        return replace(block, params=(*block.params, *own))


def open_dflash(
    config: Mapping[str, Any],
    path: Path,
    dtype: torch.dtype,
    verifier: ModelSpec,
    borrows: Collection[BlockKind] = (),
) -> DFlash:
    """The drafter of a parsed config.json, for the model that verifies; `borrows` as in Drafter.

    Raises ConfigError where it drafts for another model or has what HMT does not run, and as
    `open_model` does.
    """
    layers = layers_config(config, path)
    family = layers.get("model_type", "qwen3")
    if family != "qwen3":
        raise CheckpointError(
            f"{path}/config.json has layers of type {family!r:.60}; HMT runs DFlash drafters with "
            "layers of qwen3"
        )
    width, vocab = layers.get("hidden_size"), layers.get("vocab_size")
    check_verifier(path, verifier, {"hidden_size": width, "vocab_size": vocab})
    own = config if "speculators_model_type" in config else _as_speculators(config, path)
    one = drafting_config(config, layers, "Qwen3ForCausalLM", verifier)
    one |= {"layer_types": None, "sliding_window": None, "use_sliding_window": False}
    rope = one.get("rope_parameters")
    if isinstance(rope, Mapping) and _SLIDING in rope:
        one["rope_parameters"] = rope[_SLIDING]  # which the library takes for all layers
    base = open_model(one, path, dtype)
    assert isinstance(base, Decoder)
    if one["vocab_size"] != verifier.vocab_size:
        borrows = set(borrows) - {BlockKind.HEAD}
    states = hidden_layers(path, verifier, own.get("aux_hidden_state_layer_ids"))
    windows = _windows(own, layers, path)
    asked = _asked(own, path, verifier)
    return DFlash(base, states, asked, windows, verifier.vocab_size, borrows)


def _as_speculators(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What the authors' config.json says, by the names of the `speculators` library.

    Its layers count from the first one's hidden states, not from the embedding.  Raises
    CheckpointError.
    """
    said = config.get("dflash_config")
    if not isinstance(said, Mapping):
        raise CheckpointError(f"{path}/config.json has no dflash_config")
    if _SLIDING in (config.get("layer_types") or ()):
        raise ConfigError(
            f"{path} has layers of {_SLIDING}, which HMT runs in the format of the speculators "
            "library only: there it is said what tokens of a block see"
        )
    layers = said.get("target_layer_ids")
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise CheckpointError(
            f"{path}/config.json has target_layer_ids {layers!r:.80}; it must name the layers of "
            "the verifier whose hidden states are drafted from"
        )
    return {
        "aux_hidden_state_layer_ids": [layer + 1 for layer in layers],
        "mask_token_id": said.get("mask_token_id"),
        "block_size": config.get("block_size"),
    }


def _asked(config: Mapping[str, Any], path: Path, verifier: ModelSpec) -> DraftBlock:
    """The block of a config.json.  Raises CheckpointError."""
    tokens, mask = config.get("block_size", 8), config.get("mask_token_id")
    first = 0 if config.get("sample_from_anchor") else 1
    if type(tokens) is not int or not first < tokens <= _MOST_BLOCK:
        raise CheckpointError(
            f"{path}/config.json has block_size {tokens!r:.40}; HMT drafts blocks of "
            f"{first + 1} to {_MOST_BLOCK} tokens"
        )
    if type(mask) is not int or not 0 <= mask < verifier.vocab_size:
        raise CheckpointError(
            f"{path}/config.json has mask_token_id {mask!r:.40}; it must be one of the "
            f"{verifier.vocab_size} tokens of the model that verifies"
        )
    return DraftBlock(tokens, mask, first)


def _windows(config: Mapping[str, Any], layers: Mapping[str, Any], path: Path) -> _Windows:
    """What layers see, of a config.json.  Raises CheckpointError."""
    kinds = layers.get("layer_types") or ()
    slides = frozenset(number for number, kind in enumerate(kinds) if kind == _SLIDING)
    size = layers.get("sliding_window")
    if not slides:
        return _Windows()
    if type(size) is not int or size < 1:
        raise CheckpointError(
            f"{path}/config.json has layers of {_SLIDING} and sliding_window {size!r:.40}; it must "
            "be a number of positions"
        )
    return _Windows(slides, size, not config.get("sliding_window_non_causal"))


def _block_rows(step: Step) -> Tensor:
    """Rows of the step's tokens that are in blocks: int64 [rows], in host memory."""
    places = [
        torch.arange(run.offset + first - run.start, run.offset + end - run.start)
        for run in step.segments
        for first, end in run.blocks
    ]
    return torch.cat(places) if places else torch.empty(0, dtype=torch.int64)
