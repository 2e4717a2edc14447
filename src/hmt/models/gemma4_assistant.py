"""Gemma 4's assistant: a few layers that attend to the KV cache of the model they draft for.

They have none of their own.  Each draft token is computed from the token before it and a hidden
state: the verifier's behind its final norm, then the assistant's own.  All of them stand at the
place of the last token that is known, and see what is before it.  Read as transformers publishes it
(`Gemma4AssistantForCausalLM`), whose module it follows; but layers with a window see as many
positions as the verifier's.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from typing_extensions import override

from hmt.base.errors import CheckpointError, ConfigError
from hmt.contracts.blocks import TRUNK, BlockId, BlockKind, BlockSpec, ParamSpec
from hmt.contracts.model import FusedLayers, ModelSpec
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache, Weights
from hmt.layers import linear_params, project
from hmt.models.config import read_config
from hmt.models.drafter import Drafter
from hmt.models.drafter_config import check_verifier
from hmt.models.gemma4 import Gemma4
from hmt.models.registry import errors_of

ASSISTANTS: Final = "gemma4_assistant", "gemma4_unified_assistant"  # in config.json, model_type
TOKEN_ORDER: Final = "masked_embedding.token_ordering"  # the tensor that `set_order` takes
_TABLE: Final = BlockId(TRUNK, BlockKind.EMBEDDING)
_FIRST: Final = BlockId(0, BlockKind.ATTENTION)


class Gemma4Assistant(Drafter):
    """Layers of Gemma 4 without a KV cache; `Step.inputs` [tokens, width of the verifier].

    A step has one token of each sequence, whose handle is that of the verifier's KV cache, at the
    place of the last token that is known.

    clusters   of tokens, of which a few get logits; 0: all tokens do
    """

    layers: tuple[int, ...] = ()

    def __init__(self, base: Gemma4, width: int, clusters: int, chosen: int) -> None:
        """`base` is changed.

        width    of the verifier
        chosen   of the clusters, those whose tokens get logits
        """
        self.clusters, self._chosen = clusters, chosen
        self._cluster_of: Tensor | None = None  # int64 [vocab]
        self._factor = float(torch.tensor(width**0.5, dtype=base.dtype))
        self._kv: KVCache | None = None
        self._step: tuple[Step, Step] | None = None  # the last one, and as the cache sees it
        self._last = BlockId(base.spec.layers - 1, BlockKind.FFN)
        self._width, self._hidden = width, base.spec.hidden_size
        blocks = tuple(self._block(block) for block in base.spec.blocks)
        spec = replace(
            base.spec, blocks=blocks, together=False, ignored=(r".*",),
            activation_width=base.spec.activation_width + 3 * width,
            uncaptured="layers attend to the KV cache of another model",
        )  # fmt: skip
        super().__init__(base, spec, (BlockKind.EMBEDDING,))

    def lend_kv(self, kv: KVCache) -> None:
        """Attend to `kv`, the verifier's, which must stay open as long as this model computes."""
        self._kv = kv

    def set_order(self, tokens: Tensor) -> None:
        """Which tokens each cluster has: int64 [vocab], cluster by cluster."""
        numbers = torch.arange(self.clusters).repeat_interleave(len(tokens) // self.clusters)
        self._cluster_of = torch.empty_like(tokens).index_copy_(0, tokens, numbers)

    @override
    def embed(self, step: Step, weights: Weights) -> Tensor:
        assert step.inputs is not None, "a step without hidden states"
        assert self._lender is not None
        with weights.lease(_FIRST) as params:
            where = params["norm"].data.device
            tokens = self._lender.rows(_TABLE, "weight", step.token_ids)
            tokens = tokens.to(where, self.dtype) * self._factor
            joined = torch.cat((tokens, step.inputs.to(where, self.dtype)), dim=1)
            return project(joined, params, "pre_projection")

    @override
    def layer(
        self, index: int, hidden: Tensor, step: Step, weights: Weights, kv: KVCache
    ) -> Tensor:
        assert self._kv is not None
        return self._base.layer(index, hidden, self._seen(step), weights, self._kv)

    def _seen(self, step: Step) -> Step:
        """The step with runs that see what is before them, and not themselves."""
        if self._step is None or self._step[0] is not step:
            runs = tuple(replace(run, start=run.start - 1) for run in step.segments)
            if any(run.length != 1 or run.start < 0 for run in runs):
                raise AssertionError("one token of each sequence, behind others")
            self._step = step, replace(step, segments=runs)
        return self._step[1]

    @override
    def fused_layers(self, layers: range, weights: Weights, kv: KVCache) -> FusedLayers | None:
        return None  # they append nothing

    @override
    def normed(self, hidden: Tensor, weights: Weights) -> Tensor:
        """What the next draft token is computed from: [rows, width of the verifier]."""
        normed = super().normed(hidden, weights).to(self.dtype)
        with weights.lease(self._last) as params:
            return project(normed.to(params["norm"].data.device), params, "post_projection").float()

    @override
    def head(self, hidden: Tensor, weights: Weights) -> Tensor:
        """Logits; of tokens of other clusters than the chosen ones, one less than the least."""
        logits = super().head(hidden, weights)
        if not self.clusters:
            return logits
        assert self._cluster_of is not None
        normed = super().normed(hidden, weights).to(self.dtype)
        with weights.lease(self._last) as params:
            scores = project(normed.to(params["norm"].data.device), params, "centroids")
        best = scores.float().topk(self._chosen, dim=1).indices.to(logits.device)
        chosen = torch.zeros(scores.shape, dtype=torch.bool, device=logits.device)
        there = chosen.scatter_(1, best, value=True)[:, self._cluster_of.to(logits.device)]
        least = logits.masked_fill(~there, torch.inf).amin(1, keepdim=True) - 1
        return torch.where(there, logits, least)

    def _block(self, block: BlockSpec) -> BlockSpec:
        """A block of a Gemma 4 as it is here."""
        width, hidden = self._width, self._hidden
        own: tuple[ParamSpec, ...] = ()
        if block.id == _FIRST:
            own = linear_params("pre_projection", hidden, 2 * width, "pre_projection")
        elif block.id == self._last:
            own = linear_params("post_projection", width, hidden, "post_projection")
            if self.clusters:
                name = "masked_embedding.centroids"
                own += linear_params("centroids", self.clusters, hidden, name)
        return replace(block, params=(*block.params, *own))


def open_gemma4_assistant(
    config: Mapping[str, Any],
    path: Path,
    dtype: torch.dtype,
    verifier: ModelSpec,
    borrows: Collection[BlockKind] = (),
) -> Gemma4Assistant:
    """The assistant of a parsed config.json, for the model that verifies, whose embedding it uses.

    borrows   is not asked: it has an output layer, and no embedding

    Raises ConfigError where it drafts for another model, and as `open_model` does.
    """
    text, width = config.get("text_config"), config.get("backbone_hidden_size")
    if not isinstance(text, Mapping):
        raise CheckpointError(f"{path}/config.json has no text_config")
    check_verifier(path, verifier, {"hidden_size": width, "vocab_size": text.get("vocab_size")})
    vocab = verifier.vocab_size
    lent = {
        "sliding_attention" if layer.window else "full_attention": index
        for index, layer in enumerate(verifier.kv)
        if layer is not None
    }
    clusters = chosen = 0
    with errors_of(path):
        tied = config.get("tie_word_embeddings", True)
        said = {**text, "tie_word_embeddings": tied, "final_logit_softcapping": None}
        said |= {"architectures": ["Gemma4ForCausalLM"]}
        said["num_kv_shared_layers"] = text.get("num_hidden_layers")
        base = Gemma4(read_config(said, "gemma4_text"), dtype, lent)
        if base.inputs is not None or base.router is not None:
            raise CheckpointError("assistants with experts, or with embeddings of each layer")
        if config.get("use_ordered_embeddings"):
            clusters = int(config.get("num_centroids", 2048))
            chosen = int(config.get("centroid_intermediate_top_k", 32))
            if not 0 < chosen <= clusters or vocab % clusters:
                raise CheckpointError(
                    f"{chosen} of {clusters} clusters of {vocab} tokens: they must be alike in size"
                )
    for index, layer in enumerate(base.attention):
        assert layer.source is not None
        own, theirs = layer.attention.kv, verifier.kv[layer.source]
        if own != theirs:
            raise ConfigError(
                f"{path} attends in layer {index} to a KV cache like {own}; the model that "
                f"verifies has {theirs}: choose the assistant that was trained for it"
            )
    return Gemma4Assistant(base, verifier.hidden_size, clusters, chosen)
