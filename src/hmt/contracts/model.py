"""What a model is to everyone who does not compute it: sizes, blocks, KV per layer."""

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, prod
from typing import Protocol

import torch

from hmt.contracts.adapter import StepAdapters
from hmt.contracts.blocks import BlockId, BlockSpec
from hmt.contracts.image import ImageEncoder
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache, Weights

PAGE_TOKENS = 16  # positions of KV in one page
CHUNK_TOKENS = 256  # that layers take at once where they would need much memory for each
# What a device may take for activations between the matrices of experts; more tokens come in parts.
# Parts of half as many make tiles of 128 half empty where an expert has few: 4096 tokens of a
# DeepSeek-V3 come in one.
EXPERT_WORKSPACE_BYTES = 640 << 20
# And for numbers made of experts that tensor cores cannot take as they lie, some at a time.
EXPERT_UNPACKED_BYTES = 256 << 20
# The same of a CPU, which takes experts in batches of that much: kBatchBytes of csrc/experts.
EXPERT_BATCH_BYTES = 16 << 20


class KVKind(enum.StrEnum):
    """Layers of one kind share pages."""

    FULL = "full"
    SLIDING = "sliding"  # only the last `window` positions are attended to
    LATENT = "latent"  # MLA: one compressed row per token, keys and values in one
    INDEX = "index"  # of an indexer: one key per token, which selects what is attended to


MOST_DRAFTS = 16  # tokens of a step that verifies draft tokens, these included


@dataclass(frozen=True, slots=True)
class KVLayer:
    """The KV that one layer keeps per token: `heads` rows of `key_dim`, and of `value_dim`.

    For LATENT the value is the first `value_dim` numbers of the key and is not stored twice; for
    INDEX there is none, and `value_dim` is `key_dim`.

    expanded_dim   numbers of a query head's own key and value, which prompts make of a latent; 0:
                   they do not
    selected       positions that a token attends to at most, which an indexer selects; 0: all
    query_heads    of an indexer, each of which scores every key of INDEX
    grouped        positions whose rows are written together, once the last of them is there: a
                   divisor of PAGE_TOKENS.  What stands for several positions is divided among
                   these rows.
    relative       scores count relative to each other alone, with neither sinks nor a softcap: a
                   number that is added to all of them changes nothing
    """

    kind: KVKind
    heads: int
    key_dim: int
    value_dim: int
    window: int = 0
    expanded_dim: int = 0
    selected: int = 0
    query_heads: int = 0
    grouped: int = 1
    relative: bool = False

    @property
    def has_values(self) -> bool:
        """Whether values are stored beside keys."""
        return self.kind not in (KVKind.LATENT, KVKind.INDEX)

    @property
    def row_width(self) -> int:
        """Numbers stored per token."""
        return self.heads * (self.key_dim + (self.value_dim if self.has_values else 0))

    @property
    def made_dim(self) -> int:
        """Of `expanded_dim`, what is made for each head; the rest of a key all of them share."""
        return self.expanded_dim - (self.key_dim - self.value_dim)

    @property
    def longest_absorbed(self) -> float:
        """Runs of at most this many tokens are multiplied with latents as they are.

        These need fewer products so, or are a few tokens that may be drafts, whose sums have to be
        those of single steps.
        """
        if not self.expanded_dim:
            return inf
        saved = self.key_dim + self.value_dim - self.expanded_dim
        return max(self.value_dim * self.made_dim / saved, MOST_DRAFTS) if saved > 0 else inf


@dataclass(frozen=True, slots=True)
class StateTensor:
    """Numbers that one layer keeps of a sequence, as many for any length of it; f32.

    They are zero before the first token.

    inputs   numbers of a token that advance the layer's state, which are journaled while the token
             may be taken back; each counts with one of the layer's tensors.  A layer of which none
             has any cannot take tokens back.
    """

    name: str
    shape: tuple[int, ...]
    inputs: int = 0

    @property
    def nbytes(self) -> int:
        """Of one sequence."""
        return 4 * prod(self.shape)


# What a layer keeps of a sequence besides KV pages: recurrent state.  Empty: nothing.
LayerState = tuple[StateTensor, ...]


@dataclass(frozen=True, slots=True)
class RotaryBorder:
    """Rotary frequencies of sequences longer than `positions` differ from those of shorter ones.

    gradual   They differ with every length (dynamic NTK).  Keys stay as they were rotated, as in
              transformers: a sequence that grows has each key by the length at its time.
              Otherwise there are two sets (LongRoPE).  Keys of both kinds do not agree on how far
              apart tokens are, so the keys of a sequence that crosses the border are computed
              again, as transformers does for Phi-3: logits are those of a whole forward pass.
    """

    positions: int
    gradual: bool


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model's sizes.  Pure data, derived from the configuration alone.

    activation_width    numbers that are alive per token at the widest point of a layer
    piece_width         and besides for each of CHUNK_TOKENS tokens, or of a shorter step
    attention_heads     query heads of a layer, each with scores for every position
    experts_per_token   routed experts that one token reads in each layer that has experts
    together            whether a step of few tokens computes all layers in one call, where all
                        their blocks stay in host memory
    uncaptured          why a device's steps cannot be recorded once and replayed; "": they can
    gathered_width      numbers of KV rows, and copies of them, that a layer gathers at once
    kv                  by layer; None: it keeps no KV
    kv_sources          by layer without KV of its own that attends: the layer whose KV it uses
    index_keys          by layer: keys of its indexer, which lie beside its KV; () where no layer
                        has any
    compressed          by layer: rows that stand for several positions, beside its KV; () where no
                        layer has any
    state               by layer: recurrent state; () where no layer has any
    second_state        by layer: what another part of it advances by itself; () where none does
    token_window        tokens before a run that layers look at: see `Segment.preceding`
    exact_runs          whether compiled kernels give a token's logits the same bits however many
                        tokens of its sequence are in its step
    row_lookups         rows that a token reads of tables besides that of tokens, by block
    has_head            whether it computes logits; of several ranks one does
    """

    architecture: str
    layers: int
    hidden_size: int
    vocab_size: int
    max_context: int
    blocks: tuple[BlockSpec, ...]
    kv: tuple[KVLayer | None, ...]
    activation_width: int
    attention_heads: int = 1
    piece_width: int = 0
    experts_per_token: int = 0
    uncaptured: str = ""
    gathered_width: int = 0
    together: bool = True
    remarks: tuple[str, ...] = ()  # what the user should know of how it runs
    ignored: tuple[str, ...] = ()  # regexes of checkpoint tensors that are known and not needed
    rotary_border: RotaryBorder | None = None
    state: tuple[LayerState, ...] = ()
    index_keys: tuple[KVLayer | None, ...] = ()
    compressed: tuple[KVLayer | None, ...] = ()
    kv_sources: Mapping[int, int] = field(default_factory=dict)
    second_state: tuple[LayerState, ...] = ()
    token_window: int = 0
    exact_runs: bool = True
    row_lookups: Mapping[BlockId, int] = field(default_factory=dict)
    has_head: bool = True

    @property
    def kv_layers(self) -> dict[int, KVLayer]:
        """What those layers keep per token that keep KV, by index.

        Index keys by `index_layer`, compressed rows by `compressed_layer`.
        """
        kinds = self.kv, self.index_keys, self.compressed
        kept: dict[int, KVLayer] = {}
        for number, layers in enumerate(kinds):
            members = enumerate(layers, number * self.layers)
            kept |= {index: layer for index, layer in members if layer is not None}
        return kept

    def index_layer(self, layer: int) -> int:
        """The number by which a KV cache knows index keys and second state of `layer`."""
        return self.layers + layer

    def compressed_layer(self, layer: int) -> int:
        """The number by which a KV cache knows compressed rows of `layer`."""
        return 2 * self.layers + layer

    def by_kv_layer(self, known: Mapping[int, int]) -> dict[int, int]:
        """What is `known` by layer, also of what else these layers keep.  Not of other stages."""
        own = {layer: value for layer, value in known.items() if layer < self.layers}
        return {
            first + layer: value
            for first in range(0, 3 * self.layers, self.layers)
            for layer, value in own.items()
        }

    def kv_layers_of(self, members: Collection[int]) -> dict[int, KVLayer]:
        """`kv_layers` of some of the model's layers."""
        return {i: layer for i, layer in self.kv_layers.items() if i % self.layers in members}

    @property
    def state_layers(self) -> dict[int, LayerState]:
        """What those layers keep of a sequence that have recurrent state, by index.

        `second_state` by `index_layer`.
        """
        kept = [*enumerate(self.state), *enumerate(self.second_state, self.layers)]
        return {index: state for index, state in kept if state}

    def state_layers_of(self, members: Collection[int]) -> dict[int, LayerState]:
        """`state_layers` of some of the model's layers."""
        return {i: state for i, state in self.state_layers.items() if i % self.layers in members}

    @property
    def state_inputs(self) -> dict[int, int]:
        """Numbers of a token that advance the states of layers, by index; {} if one has none."""
        counts = {i: sum(one.inputs for one in state) for i, state in self.state_layers.items()}
        return counts if all(counts.values()) else {}

    def journal_bytes(self, layers: Iterable[int], drafts: int) -> int:
        """What `layers` keep of a sequence so that it can go back by up to `drafts` tokens."""
        members, counts = set(layers), self.state_inputs
        mine = (count for index, count in counts.items() if index % self.layers in members)
        return 4 * drafts * sum(mine)

    @property
    def state_bytes(self) -> int:
        """Recurrent state of one sequence, over all layers."""
        return sum(tensor.nbytes for state in self.state_layers.values() for tensor in state)


class FusedLayers(Protocol):
    """Consecutive layers whose blocks stay in memory, computed in one call."""

    @property
    def expert_uses(self) -> Mapping[int, Sequence[int]]:
        """Of each layer with experts: how many calls have used each of them.  They lease none."""
        ...

    def __call__(
        self, hidden: torch.Tensor, step: Step, adapters: StepAdapters | None = None
    ) -> bool:
        """Change hidden [tokens, hidden_size] as the layers do, and append to the KV.

        False, and nothing done, where the step has too many tokens, or adapters that change what
        the call adds none to.
        """
        ...


class Model(Protocol):
    """A model family's forward pass, cut where an executor may act between the parts.

    The parts take weights by lease and keep nothing: all state is in `step` and `kv`.
    """

    spec: ModelSpec
    dtype: torch.dtype  # of activations
    encoder: ImageEncoder | None = None  # of images, where it has one

    def notes(self) -> tuple[str, ...]:
        """What there is to tell people of the steps by now."""
        return ()

    def embed(self, step: Step, weights: Weights) -> torch.Tensor:
        """Hidden states of the step's tokens: [tokens, hidden_size]."""
        ...

    def layer(
        self, index: int, hidden: torch.Tensor, step: Step, weights: Weights, kv: KVCache
    ) -> torch.Tensor:
        """Hidden states after layer `index`: [tokens, hidden_size].  Appends to `kv`.

        May change `hidden`, and return it.
        """
        ...

    def fused_layers(self, layers: range, weights: Weights, kv: KVCache) -> FusedLayers | None:
        """Some layers as one call with the same results; None where that cannot be."""
        ...

    def normed(self, hidden: torch.Tensor, weights: Weights) -> torch.Tensor:
        """The given rows behind the final norm, as the head multiplies them: f32, same shape."""
        ...

    def head(self, hidden: torch.Tensor, weights: Weights) -> torch.Tensor:
        """Logits of the given rows, final norm included: f32 [rows, vocab_size]."""
        ...

    def angles(self, step: Step) -> tuple[int, ...]:
        """What rotary angles of the step's runs depend on besides positions.

        What was captured for one step computes no other in which this differs.
        """
        ...

    def expected_experts(self, index: int, hidden: torch.Tensor, weights: Weights) -> torch.Tensor:
        """What the router of layer `index` would choose for the residual stream of another layer.

        A guess at what it will choose: int64 [tokens, top_k], best first.  hidden [tokens,
        hidden_size] does not change.  Only for layers with experts; leases their ROUTER block.
        """
        ...

    def layer_blocks(self, index: int) -> tuple[BlockId, ...]:
        """Blocks that every token needs in layer `index`, in order of use (no routed experts)."""
        ...
