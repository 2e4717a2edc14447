"""What a model needs, in bytes, apart from where its blocks live."""

from collections.abc import Collection, Sequence

from hmt.base.units import round_down, round_up
from hmt.contracts.blocks import BlockKind, BlockSize
from hmt.contracts.model import (
    CHUNK_TOKENS,
    EXPERT_BATCH_BYTES,
    EXPERT_WORKSPACE_BYTES,
    PAGE_TOKENS,
)
from hmt.planner.cost.demand import Demand

_CHUNK_LIMITS = (16, 512)
_MEMORY_PAGE_BYTES = 4096
_ACTIVATION_SHARE = 16  # a prefill chunk's activations take about this fraction of the weights


def default_chunk(demand: Demand) -> int:
    """Prompt tokens per step: a function of the model alone.

    Not of the budget, because the chunk is the shape that kernels see, and equal shapes are what
    makes logits bit-identical at every budget; nor of padding, which differs between a checkpoint
    and a pack.
    """
    token_bytes = demand.spec.activation_width * 4
    weight_bytes = demand.parameter_bytes
    if weight_bytes is None:
        weight_bytes = demand.weight_bytes
    chunk = round_down(weight_bytes // _ACTIVATION_SHARE // token_bytes, PAGE_TOKENS)
    return max(_CHUNK_LIMITS[0], min(_CHUNK_LIMITS[1], chunk))


def activation_bytes(demand: Demand, chunk: int, context: int) -> int:
    """What one step of `chunk` tokens takes beside weights and KV, in fp32.

    The activations of a prompt chunk and of a batch that decodes beside it, the batch's logits and
    their sorted copy, and for one layer at a time the scores and the rows of KV that were gathered
    from their pages; and what moves them between levels.
    """
    spec, batch = demand.spec, demand.batch
    tokens = chunk + batch - 1
    numbers = tokens * spec.activation_width + min(tokens, CHUNK_TOKENS) * spec.piece_width
    numbers += 2 * batch * spec.vocab_size + spec.gathered_width
    scores = min(demand.score_bytes, 4 * spec.attention_heads * chunk * context)
    return 4 * numbers + scores + context * demand.kv_layer_bytes + demand.kv_work_bytes


def host_activation_bytes(demand: Demand, chunk: int, context: int) -> int:
    """The same on a CPU, with what its experts' kernel keeps of a batch of tokens and experts.

    Each token that an expert takes is there as it came and as it is multiplied with, and so is what
    is between its matrices.
    """
    batch = min(EXPERT_BATCH_BYTES, 2 * chunk * demand.expert_token_bytes)
    return activation_bytes(demand, chunk, context) + batch


def scored_rows(demand: Demand, chunk: int) -> int:
    """Rows of logits that may be looked at together behind the layers of a step.

    They take the room of the layers' activations, of which the hidden states are left, and of the
    batch's logits and their sorted copy; twice each, as the head may write them in another dtype.
    """
    spec, batch = demand.spec, demand.batch
    free = (chunk + batch - 1) * (spec.activation_width - spec.hidden_size)
    return max(1, free // (2 * spec.vocab_size) + batch)


def device_activation_bytes(demand: Demand, chunk: int, context: int) -> int:
    """The same on a device, with a matrix unpacked and results of experts.

    Most activations take half of that there, in 16 bits; but products of int8 codes pass through
    sums in f32, and torch keeps pieces of sizes that do not come again.  Counted in 16 bits, a
    prompt of 2048 tokens of a 70B model did not fit.
    """
    between = min(EXPERT_WORKSPACE_BYTES, chunk * demand.expert_token_bytes)
    return activation_bytes(demand, chunk, context) + demand.matrix_bytes + between


def kv_bytes(demand: Demand, tokens: int) -> int:
    """KV of `tokens` positions in whole pages."""
    return round_up(tokens, PAGE_TOKENS) * demand.kv_token_bytes


def state_bytes(demand: Demand) -> int:
    """Recurrent states that there is room for, in whole pages of memory."""
    return round_up(demand.state_slots * demand.sequence_bytes, _MEMORY_PAGE_BYTES)


def working_set_bytes(blocks: Sequence[BlockSize]) -> int:
    """Slots that a step cannot do without: the largest dense block and one expert beside it."""
    experts = [b.slot_bytes for b in blocks if b.id.kind is BlockKind.EXPERT]
    dense = [b.slot_bytes for b in blocks if b.id.kind is not BlockKind.EXPERT]
    return max(dense, default=0) + max(experts, default=0)


def kv_token_bytes(demand: Demand, layers: Collection[int]) -> int:
    """KV bytes of one position in some `layers`."""
    kept = layer_kv_bytes(demand)
    return sum(nbytes for index in layers for nbytes in kept[index].values())


def sequence_bytes(demand: Demand, layers: Collection[int]) -> int:
    """Recurrent state of one sequence in some `layers`, with its journal."""
    states = demand.spec.state_layers_of(layers).values()
    journal = demand.spec.journal_bytes(layers, demand.draft_tokens)
    return sum(tensor.nbytes for state in states for tensor in state) + journal


def layer_kv_bytes(demand: Demand) -> list[dict[int, int]]:
    """KV bytes of one position, by layer and in it by window; of what sees everything by 0."""
    spec = demand.spec
    total = sum(layer.row_width for layer in spec.kv_layers.values())
    found = []
    for index in range(spec.layers):
        widths: dict[int, int] = {}
        for layer in spec.kv_layers_of([index]).values():
            widths[layer.window] = widths.get(layer.window, 0) + layer.row_width
        by_window = ((w, demand.kv_token_bytes * n // total) for w, n in widths.items())
        found.append(dict(by_window))
    return found
