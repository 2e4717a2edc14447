"""How a budget of host memory is shared between weights, adapters and activations."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from hmt.base.errors import BudgetError
from hmt.base.units import format_bytes
from hmt.contracts.blocks import BlockId, Role
from hmt.contracts.model import ModelSpec
from hmt.contracts.plan import Tier
from hmt.finetuning.adapters import Module
from hmt.finetuning.differentiable import chunk_bytes
from hmt.memory import Ledger
from hmt.weights import BlockLayout, row_span_bytes

# Of one number: itself, its gradient, and AdamW's two means.
_ADAPTER_BYTES = 16
# Kept for the backward pass of one layer, or alive in it, for each number of a token that a layer
# has at its widest point, of its hidden state, and for each score of attention.  (A llama takes
# 2.0 and 4.0, and no scores: torch's kernel of attention keeps none.)
_WIDEST_COPIES = 2.25
_HIDDEN_COPIES = 5
_SCORE_COPIES = 2
# Of one row of logits: raw, in f32, their softmax, and the gradients of these; 4.2 were measured.
_LOGIT_COPIES = 5
_CHUNK_COPIES = 2  # of a part of a weight: codes, numbers


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Shares of a budget.

    slots         for blocks
    staging, rows   for what is converted on its way, and for rows of tables
    adapters      with their gradients and the optimizer's state
    inputs        of every layer, for a step's tokens
    activations   of one layer for `tokens` tokens at once, and of the output layer
    tokens        that are computed together: some of a step's examples
    logit_rows    of the output layer that are
    """

    slots: int
    staging: int
    rows: int
    adapters: int
    inputs: int
    activations: int
    tokens: int
    logit_rows: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum((self.slots, self.staging, self.rows, self.adapters, self.inputs)) + (
            self.activations
        )

    @contextmanager
    def charged(self, ledger: Ledger) -> Iterator[None]:
        """In the body, what torch allocates is charged; the store charges its own."""
        with ExitStack() as stack:
            for purpose in ("adapters", "inputs", "activations"):
                stack.callback(ledger.open(Tier.HOST, purpose, getattr(self, purpose)).close)
            yield


def plan_memory(
    budget: int,
    spec: ModelSpec,
    layouts: Mapping[BlockId, BlockLayout],
    modules: Sequence[Module],
    rank: int,
    lengths: Sequence[int],
    batch: int,
) -> MemoryPlan:
    """Shares for training adapters of `modules` with examples of these lengths.

    As many tokens at once as a fourth of what is left holds, of one example at least; all that is
    left then is for blocks.  Raises BudgetError where the budget holds too little.
    """
    tables = [table for layout in layouts.values() for table in layout.tables.values()]
    step_tokens = sum(sorted(lengths, reverse=True)[:batch])
    longest = max(lengths)
    chunks = _CHUNK_COPIES * max(map(chunk_bytes, _matrices(spec)))
    one_row = 4 * _LOGIT_COPIES * spec.vocab_size

    def activations(tokens: int) -> int:
        return max(_layer_bytes(spec, tokens, longest), one_row) + chunks

    least = MemoryPlan(
        slots=_leased_bytes(layouts),
        staging=max(layout.staging_bytes for layout in layouts.values()),
        rows=4 * max(map(row_span_bytes, tables), default=0),
        adapters=_ADAPTER_BYTES * sum(module.numbers(rank) for module in modules),
        inputs=4 * (spec.layers + 3) * spec.hidden_size * step_tokens,
        activations=activations(longest),
        tokens=longest,
        logit_rows=1,
    )
    if least.total > budget:
        raise BudgetError(
            f"{format_bytes(budget)} of host memory were given, and training these adapters takes "
            f"{format_bytes(least.total)} ({format_bytes(least.slots)} for blocks, "
            f"{format_bytes(least.adapters)} for adapters and optimizer, "
            f"{format_bytes(least.inputs + least.activations)} for activations): give "
            f"--host-memory {least.total} or more, or less --length, --batch, --rank or --targets"
        )
    free = budget - least.total + least.activations
    count = 1
    while count < batch and activations((count + 1) * longest) <= free // 4:
        count += 1
    room = activations(count * longest)
    return replace(
        least,
        slots=min(least.slots + free - room, sum(layout.slot_bytes for layout in layouts.values())),
        activations=room,
        tokens=count * longest,
        logit_rows=(room - chunks) // one_row,
    )


def _layer_bytes(spec: ModelSpec, tokens: int, longest: int) -> int:
    """Of one layer forward and backward, in f32."""
    scores = _SCORE_COPIES * spec.attention_heads * longest
    token = _WIDEST_COPIES * spec.activation_width + _HIDDEN_COPIES * spec.hidden_size + scores
    return int(4 * token * tokens)


def _matrices(spec: ModelSpec) -> Iterator[tuple[int, int]]:
    for block in spec.blocks:
        for param in block.params:
            if param.role is Role.LINEAR and len(param.shape) == 2:
                yield param.shape[0], param.shape[1]


def _leased_bytes(layouts: Mapping[BlockId, BlockLayout]) -> int:
    """The most that is leased at a time: some families lease two blocks of a layer."""
    by_layer = dict[int, list[int]]()
    for block, layout in layouts.items():
        by_layer.setdefault(block.layer, []).append(layout.slot_bytes)
    return max(sum(sorted(sizes)[-2:]) for sizes in by_layer.values())
