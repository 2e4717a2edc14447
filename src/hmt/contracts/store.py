"""The two things that models compute from without knowing where they lie: weights and KV."""

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hmt.contracts.blocks import BlockId
from hmt.contracts.encoding import WeightTensor
from hmt.contracts.step import Segment, Step


class Priority(enum.IntEnum):
    """Order in which reads are served; a lower value goes first."""

    DEMAND = 0  # a computation waits, or will as soon as it gets there this layer
    PREFETCH = 1  # certain to be needed: the next dense layers
    SPECULATIVE = 2  # predicted; may be dropped


class Presence(enum.Enum):
    """What a lookup finds."""

    HIT = "hit"  # can be leased without waiting
    PENDING = "pending"  # on its way
    MISS = "miss"  # only on disk


class Verify(enum.StrEnum):
    """When the checksum of a pack's block is compared with what was read."""

    FIRST = "first"  # when the block is first read
    ALWAYS = "always"
    NEVER = "never"


# Blocks that are leased together, each with its parameters by local name.
LeasedGroup = list[tuple[BlockId, Mapping[str, WeightTensor]]]


@dataclass(frozen=True, slots=True)
class ResidentBlock:
    """A block that does not move: its parameters by local name, and its size."""

    params: Mapping[str, WeightTensor]
    nbytes: int


class HostFeedForward(dict[str, WeightTensor]):
    """Parameters of a feed-forward network that the CPU computes in the middle of a device's step.

    A lease gives them where a step is captured.  The layer then calls `compute` instead of a
    kernel.

    compute   takes hidden, x and layer as `ops.feed_forward` does, on the device; changes hidden
    """

    def __init__(
        self, params: Mapping[str, WeightTensor], compute: Callable[[Any, Any, Any], None]
    ) -> None:
        super().__init__(params)
        self.compute = compute


class MoeBackend(Protocol):
    """Computes a layer's routed experts wherever they are, in several places at once."""

    def begin(
        self, x: torch.Tensor, chosen: torch.Tensor, scales: torch.Tensor, activation: str
    ) -> Callable[..., torch.Tensor]:
        """Begin with the chosen experts; what is returned ends it, and may be called later.

        x [tokens, hidden]; chosen int64 and scales f32 [tokens, top_k].  The result is the scaled
        outputs, added up in f32: [tokens, hidden] in x.dtype.  Called with (hidden, shared), both
        of that shape and dtype, it is hidden + (that + shared).
        """
        ...


class Weights(Protocol):
    """A model's parameters by block, wherever they lie."""

    def lease(self, block: BlockId) -> AbstractContextManager[Mapping[str, WeightTensor]]:
        """Parameters of `block` by local name, readable and unmoved until the context ends.

        Waits for the block where it has to be read.  Raises DiskReadError when that fails.
        """
        ...

    def lease_each(
        self, blocks: Sequence[BlockId]
    ) -> AbstractContextManager[Iterator[LeasedGroup]]:
        """Lease all of `blocks`, in this order, in groups of as many as are there.

            with weights.lease_each(blocks) as groups:
                for group in groups: ...

        A group's lease ends when the next one is asked for, at the latest with the context.  Groups
        are never empty; how large they are depends on what is read already, so no result may
        depend on it.  Raises DiskReadError when a block cannot be read.
        """
        ...

    def resident(self, blocks: Sequence[BlockId]) -> Sequence[ResidentBlock] | None:
        """All of `blocks`, if they are in memory and stay there unmoved until the store is closed.

        None where one of them may move.  Not counted as leases: see `count`.
        """
        ...

    def count(self, nbytes: int) -> None:
        """Say that a step has read so many bytes of standing blocks."""
        ...

    def request(self, blocks: Sequence[BlockId], priority: Priority) -> None:
        """Say that `blocks` will be leased soon.  Never waits, never fails, may be ignored."""
        ...

    def moe_backend(self, layer: int) -> MoeBackend | None:
        """Who computes the layer's experts in this step; None: whoever leases them."""
        ...

    def routed(
        self, layer: int, hidden: torch.Tensor, experts: torch.Tensor, scales: torch.Tensor
    ) -> None:
        """Hear which experts a layer's router chose.  Changes no result; may be ignored.

        hidden [tokens, hidden_size] is what the router saw, before its norm; experts int64 and
        scales f32 [tokens, top_k].  All are valid during the call only.
        """
        ...

    def rows(self, block: BlockId, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` (int64 [n]) of table `name`: [n, width] in the table's own float dtype."""
        ...

    def request_rows(self, block: BlockId, name: str, ids: torch.Tensor) -> None:
        """Say that `rows` will be asked for the same, once, before it is for others of the table.

        Never waits, never fails, may be ignored.  `ids` must not change until then.
        """
        ...


@dataclass(frozen=True, slots=True)
class StateRun:
    """A run of a step, and where its sequence's recurrent state is.

    slot      index of the state in the tensors of all sequences
    offset    index of the run's first token in the step's flat arrays
    begins    The run begins with the sequence's first token: its state counts as zero, whatever
              the slot holds.
    drafts    last tokens by which the slot does not advance; results are the same
    pending   tokens before the run that the slot lacks, whose inputs the layer's journal has
    """

    slot: int
    offset: int
    length: int
    begins: bool
    drafts: int = 0
    pending: int = 0

    @property
    def tokens(self) -> slice:
        """This run's part of the step's flat arrays."""
        return slice(self.offset, self.offset + self.length)

    @property
    def stays(self) -> int:
        """Tokens by which the slot advances."""
        return self.length - self.drafts


# Advances a layer's state by the tokens of some runs: from their inputs to their results.
StateUpdate = Callable[[Sequence[torch.Tensor], Sequence[StateRun]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """One layer's recurrent state, as a step reads and writes it.

    tensors   by the names of `LayerState`: f32 [slots, *shape], changed in place.  And `journal`,
              f32 [slots, drafts, numbers]: inputs of the last drafts, as `advance` has them
    runs      of the step, in the order of its flat arrays
    replay    what `advance` does where some tokens are pending or drafts; None: none is
    copies    Behind some pending tokens the state is copied, which only `replay` does.
    """

    tensors: Mapping[str, torch.Tensor]
    runs: Sequence[StateRun]
    replay: Callable[[Sequence[torch.Tensor], StateUpdate], torch.Tensor] | None = None
    copies: bool = False

    def advance(self, inputs: Sequence[torch.Tensor], compute: StateUpdate) -> torch.Tensor:
        """What `compute` returns for a step's `inputs`, each [tokens, numbers]: [tokens, ...].

        compute   is called with inputs of the same shapes but for the number of tokens, and runs
                  over these, one or several times; it changes `tensors` for runs that advance.
                  Each token's result and state must depend on its own inputs and the state before.
        """
        return compute(inputs, self.runs) if self.replay is None else self.replay(inputs, compute)


class KVCache(Protocol):
    """Keys and values of all sequences, and recurrent state.

    Attention is asked for here, so that it can run where the pages lie.
    """

    def state(self, layer: int, step: Step) -> RecurrentState:
        """The recurrent state of a layer that has one, for the runs of `step`.

        The layer advances it by the step's tokens, once.  Valid until the next step.
        """
        ...

    def append(self, layer: int, step: Step, key: torch.Tensor, value: torch.Tensor | None) -> None:
        """Write the step's tokens: key [tokens, heads, key_dim], value [tokens, heads, value_dim].

        `value` is None for LATENT layers.  Call once per layer and step, before `attend`.
        Of a layer whose rows are `grouped`, each run has rows from the first of the group in which
        it begins: those that another step wrote are written again.
        """
        ...

    def attend(
        self,
        layer: int,
        step: Step,
        query: torch.Tensor,
        *,
        scale: float,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of query [tokens, q_heads, key_dim] over each run's own context.

        The layer's window applies.  sinks: f32 [q_heads], contiguous; one more score for each row
        of a head, which has no value.  Returns [tokens, q_heads, value_dim] in the query's dtype.
        """
        ...

    def append_attend(
        self,
        layer: int,
        step: Step,
        heads: torch.Tensor,
        *,
        scale: float,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`append` and `attend` of a step's queries, keys and values; not for LATENT layers.

        heads [tokens, q_heads + 2 * kv_heads, dim], so ordered.  Returns [tokens, q_heads * dim].
        """
        ...

    def kernel_pages(self, layer: int) -> tuple[Any, int, int] | None:
        """A layer's pages (`ops.Pages`), its place among them, and its window.

        None where they do not all lie in memory.  Valid as long as the cache.
        """
        ...

    def kernel_state(self, layer: int) -> Mapping[str, torch.Tensor] | None:
        """The tensors of a layer's recurrent state, as in `RecurrentState`.

        None where the cache's pages do not all lie in memory.  Valid as long as the cache.
        """
        ...

    def kernel_place(self, layer: int, step: Step) -> tuple[Any, int, Any] | None:
        """A layer's pages, its place among them, and the step's runs, for a layer without window.

        None where the pages do not all lie in one memory.
        """
        ...

    def kernel_metadata(self, step: Step) -> Any:
        """The step's runs (`ops.AttentionMetadata`), for kernels that work on `kernel_pages`."""
        ...

    def read(self, layer: int, run: Segment) -> tuple[torch.Tensor, torch.Tensor]:
        """A run's whole context in this layer: (key, value) [context, heads, dim].

        May be copies; valid until the next append.  For LATENT, value is a slice of key.
        """
        ...

    def gather(
        self, layer: int, run: Segment, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(key, value) of some of a run's positions, from where they lie: [positions, heads, dim].

        positions   int64 [positions], ascending, where layers compute; all before `run.context`
        Copies, in the dtype of `read`.  For LATENT and INDEX, value is a slice of key.
        """
        ...
