"""Which linear layers have the same input, and which operation makes it.

By the names that HMT's families give parameters inside of blocks.  What a family is not known to
have is missing here: its layers are quantised each by itself, with nothing folded.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from hmt.contracts.blocks import BlockId, BlockKind, BlockSpec

# Parameters of one block that are multiplied with the same activations; the first that a block has
# stands for them.  Recorded inputs that differ end the quantisation: see `observed.py`.
_TOGETHER: Final = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("shared_gate_proj", "shared_up_proj"),
    ("q_a_proj", "kv_a_proj"),
)
# (block that has the norm, its name) -> names that it feeds, in blocks of these kinds.
_BEHIND_ATTENTION_NORM: Final = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj")
_BEHIND_FFN_NORM: Final = ("gate_proj", "up_proj")
_BEHIND_ROUTER_NORM: Final = ("router", "shared_gate_proj", "shared_up_proj")
# Families whose layers are: norm, attention, sum, norm, FFN or experts, sum; and whose norms
# multiply with their weight alone, so that a factor can be taken from it.
FOLDABLE: Final = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
    }
)


@dataclass(frozen=True, slots=True)
class ParamId:
    """A parameter of a block."""

    block: BlockId
    name: str


@dataclass(frozen=True, slots=True)
class Folding:
    """A factor of each channel that can move: divide what `before` makes, multiply `behind`.

    before   a norm's weight, or the rows of a linear layer
    behind   all layers that multiply with it, by their columns
    """

    before: ParamId
    behind: tuple[ParamId, ...]


def leaders(names: Sequence[str]) -> dict[str, str]:
    """Of each parameter of a block, the one whose input stands for its own."""
    found: dict[str, str] = {}
    for group in _TOGETHER:
        there = [name for name in group if name in names]
        found |= {name: there[0] for name in there}
    return {name: found.get(name, name) for name in names}


def foldings(architecture: str, blocks: Iterable[BlockSpec]) -> tuple[Folding, ...]:
    """What can be folded in a layer of `blocks`; none where the family is not known."""
    if architecture not in FOLDABLE:
        return ()
    names = {block.id: [param.name for param in block.params] for block in blocks}
    found: list[Folding] = []
    experts = [block for block in names if block.kind is BlockKind.EXPERT]
    for block, own in names.items():
        if block.kind is BlockKind.ATTENTION:
            found += _behind_norm(block, own, _BEHIND_ATTENTION_NORM)
            heads = _same_heads(block, blocks)
            if "v_proj" in own and "o_proj" in own and heads:
                found.append(Folding(ParamId(block, "v_proj"), (ParamId(block, "o_proj"),)))
        elif block.kind is BlockKind.ROUTER:
            found += _behind_norm(block, own, _BEHIND_ROUTER_NORM, experts)
        elif block.kind is BlockKind.FFN:
            found += _behind_norm(block, own, _BEHIND_FFN_NORM)
        for prefix in ("", "shared_"):
            if f"{prefix}up_proj" in own:
                up, down = f"{prefix}up_proj", f"{prefix}down_proj"
                found.append(Folding(ParamId(block, up), (ParamId(block, down),)))
    return tuple(found)


def _behind_norm(
    block: BlockId, own: Sequence[str], fed: Sequence[str], experts: Sequence[BlockId] = ()
) -> list[Folding]:
    behind = [ParamId(block, name) for name in fed if name in own]
    behind += [ParamId(expert, name) for expert in experts for name in _BEHIND_FFN_NORM]
    return [Folding(ParamId(block, "norm"), tuple(behind))] if "norm" in own and behind else []


def _same_heads(block: BlockId, blocks: Iterable[BlockSpec]) -> bool:
    """Whether o_proj's columns are v_proj's rows: there are as many value heads as query heads."""
    shapes = {p.name: p.shape for spec in blocks if spec.id == block for p in spec.params}
    return "v_proj" in shapes and shapes["v_proj"][0] == shapes["o_proj"][1]
