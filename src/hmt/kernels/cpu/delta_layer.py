"""Delta rules with all that is around them, from hidden states to what they add, in one call.

Results are those of the extension's kernels one by one, to the bit.
"""

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hmt.contracts.encoding import WeightTensor
from hmt.contracts.store import StateRun
from hmt.kernels.cpu.abi import ACTIVATIONS, DTYPES, SIGMOID
from hmt.kernels.cpu.linear import projections
from hmt.kernels.cpu.recurrent import MOST_TAPS, run_numbers, slot_stride
from hmt.kernels.cpu.sublayers import native_norm
from hmt.kernels.reference.sublayers import DeltaChain
from hmt.kernels.weight_cache import WeightCache

Params = Mapping[str, WeightTensor]

_MOST_TOKENS = 64  # the call keeps memory for its tokens; with more, what Python takes is little

# A chain, the extension's own description of its block, and what that refers to besides parameters.
_DELTAS: WeightCache[tuple[DeltaChain, Any, list[Tensor]]] = WeightCache()


def delta_layer(
    native: ModuleType,
    hidden: Tensor,
    params: Params,
    chain: DeltaChain,
    states: Mapping[str, Tensor],
    runs: Sequence[StateRun],
) -> Tensor | None:
    """`reference.delta_layer` by the extension."""
    if len(hidden) > _MOST_TOKENS or hidden.dtype not in DTYPES or not hidden.is_contiguous():
        return None
    known = _DELTAS.get(params["norm"])
    if known is None or known[0] is not chain:
        known = _DELTAS[params["norm"]] = (chain, *describe_delta(native, params, chain))
    made = known[1]
    if made is None:
        return None
    out = torch.empty_like(hidden)
    tokens, width = hidden.shape
    native.delta_layer(
        made,
        native_states(chain, states),
        run_numbers(runs),
        hidden.data_ptr(),
        DTYPES[hidden.dtype],
        tokens,
        width,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def describe_delta(
    native: ModuleType, params: Params, chain: DeltaChain
) -> tuple[Any, list[Tensor]]:
    """The extension's own description, None where it has no kernel; and tensors it refers to.

    It borrows the memory of these and of `params`.
    """
    heads, taps = chain.heads, params["conv"].data.squeeze(1)
    norms = native_norm(params, "norm", chain.norm), native_norm(params, "out_norm", chain.out_norm)
    inputs, row = projections(native, params, chain.inputs)
    output, _ = projections(native, params, (chain.output,))
    names = chain.through_gate, chain.through_decay
    behind = [() if name is None else projections(native, params, (name,))[0] for name in names]
    missing = [name for name, made in zip(names, behind, strict=True) if name and not made]
    if missing or None in norms or not inputs or not output or taps.shape[1] > MOST_TAPS:
        return None, []
    assert taps.shape[0] == heads.width
    assert max(first + count for spans in chain.spans for first, count in spans) <= row
    constants = [
        part.float().flatten().contiguous()
        for part in (taps, params["decay_scale"].data, params["decay_bias"].data)
    ]
    assert len(constants[1]) == heads.heads and len(constants[2]) == heads.decays_width
    sizes = heads.key_heads, heads.heads, heads.key_dim, heads.value_dim
    made = native.DeltaWeights(
        norms[0],
        inputs,
        chain.spans,
        tuple(behind),
        (*sizes, heads.by_channel, heads.bound, heads.most_rate),
        taps.shape[1],
        tuple(part.data_ptr() for part in constants),
        norms[1],
        SIGMOID if chain.activation == "sigmoid" else ACTIVATIONS[chain.activation],
        chain.tiled,
        output,
    )
    return made, constants


def native_states(
    chain: DeltaChain, states: Mapping[str, Tensor]
) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int, int]]:
    """Address, and numbers from a slot to the next, of convolutions' tails and of matrices.

    And address, room for drafts and numbers of the journal.
    """
    heads, tails, matrices = chain.heads, states["conv"], states["matrix"]
    assert tails.shape[2] == heads.width
    assert matrices.shape[1:] == (heads.heads, heads.key_dim, heads.value_dim)
    journal = states.get("journal")
    kept = 0, 0, 0
    if journal is not None:
        assert journal.is_contiguous()
        assert journal.shape[2] == heads.width + heads.decays_width + heads.heads
        kept = journal.data_ptr(), journal.shape[1], journal.shape[2]
    return (
        (tails.data_ptr(), slot_stride(tails)),
        (matrices.data_ptr(), slot_stride(matrices)),
        kept,
    )
