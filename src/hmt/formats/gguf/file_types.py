"""Which type llama.cpp's quantiser gives each tensor of a file that is called Q4_K_M and so on.

The rules of `llama_tensor_get_type` (src/llama-quant.cpp) for models of which at least four heads
of queries share one of keys, or with experts other than eight.  IQ types are those made with an
importance matrix, without which llama.cpp refuses most of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

_BLOCK, _SMALL_BLOCK = 256, 32
_SMALLER_BLOCKS: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"), "IQ4_NL"
    ),
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}

_Where = Callable[[int, int], bool]  # a layer, of how many


def _everywhere(layer: int, layers: int) -> bool:
    return True


def _first_two(layer: int, layers: int) -> bool:
    return layer < 2


def _first_eighth(layer: int, layers: int) -> bool:
    return layer < layers // 8


def _first_sixteenth(layer: int, layers: int) -> bool:
    return layer < layers // 16


def _more_bits(layer: int, layers: int) -> bool:
    """The first and the last eighth, and every third between them."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2


@dataclass(frozen=True, slots=True)
class _Rule:
    """`kind` for tensors whose names behind "blk.N." are among `names`, in some layers."""

    names: tuple[str, ...]
    kind: str
    where: _Where = _everywhere


@dataclass(frozen=True, slots=True)
class FileType:
    """The first rule that fits counts; `base` is the type where none does."""

    base: str
    rules: tuple[_Rule, ...] = ()

    def type_of(self, name: str, layer: int, layers: int, columns: int) -> str:
        """The type of a matrix, by its name's part behind "blk.N." and before ".weight".

        Stacks of experts, and shared experts, count as the network's matrix of that name.  Rows of
        `columns` that blocks of 256 do not divide have a type of smaller blocks, or F16.
        """
        kind = self._wanted(name, layer, layers)
        if columns % _BLOCK and kind in _SMALLER_BLOCKS:
            kind = _SMALLER_BLOCKS[kind]
        return "F16" if columns % _SMALL_BLOCK else kind

    def _wanted(self, name: str, layer: int, layers: int) -> str:
        what = name.removesuffix("_exps").removesuffix("_shexp")
        for rule in self.rules:
            if what in rule.names and rule.where(layer, layers):
                return rule.kind
        return self.base


_VALUES, _DOWN, _OUTPUT = ("attn_v",), ("ffn_down",), ("attn_output",)
_HEAD, _TOKENS, _JOINED = ("output",), ("token_embd",), ("attn_qkv",)
_SIX_BITS_HEAD: Final = _Rule(_HEAD, "Q6_K")


def _medium(base: str, joined: str) -> FileType:
    return FileType(
        base,
        (
            _SIX_BITS_HEAD,
            _Rule((*_VALUES, *_DOWN), "Q6_K", _more_bits),
            _Rule(_JOINED, joined),
        ),
    )


def _few_bits(base: str, more: str, output: str | None = None) -> FileType:
    rules = [
        _Rule(_HEAD, "Q5_K"),
        _Rule(_TOKENS, more),
        _Rule((*_VALUES, *_JOINED), "Q4_K"),
        _Rule(_DOWN, more, _first_eighth),
    ]
    if output is not None:
        rules.append(_Rule(_OUTPUT, output))
    return FileType(base, tuple(rules))


FILE_TYPES: Final[Mapping[str, FileType]] = {
    "Q2_K": FileType(
        "Q2_K",
        (_SIX_BITS_HEAD, _Rule(_VALUES, "Q4_K"), _Rule((*_DOWN, *_OUTPUT), "Q3_K")),
    ),
    "Q3_K_M": FileType(
        "Q3_K",
        (
            _SIX_BITS_HEAD,
            _Rule(_VALUES, "Q5_K", _first_two),
            _Rule(_DOWN, "Q5_K", _first_sixteenth),
            _Rule((*_VALUES, *_DOWN, *_OUTPUT, *_JOINED), "Q4_K"),
        ),
    ),
    "Q4_0": FileType("Q4_0", (_SIX_BITS_HEAD,)),
    "Q4_K_M": _medium("Q4_K", "Q5_K"),
    "Q5_K_M": _medium("Q5_K", "Q6_K"),
    "Q6_K": FileType("Q6_K"),
    "Q8_0": FileType("Q8_0"),
    "IQ4_XS": FileType("IQ4_XS", (_SIX_BITS_HEAD, _Rule(_VALUES, "Q5_K"))),
    "IQ3_XXS": FileType(
        "IQ3_XXS",
        (
            _Rule(_HEAD, "Q5_K"),
            _Rule((*_TOKENS, *_OUTPUT), "IQ3_S"),
            _Rule(_VALUES, "Q4_K"),
            _Rule(("attn_q", "attn_k"), "IQ2_S"),
        ),
    ),
    "IQ3_M": FileType(
        "IQ3_S",
        (
            _SIX_BITS_HEAD,
            _Rule((*_VALUES, *_OUTPUT, *_JOINED), "Q4_K"),
            _Rule(_DOWN, "Q4_K", _first_eighth),
        ),
    ),
    "IQ2_M": _few_bits("IQ2_S", "IQ3_S", "IQ3_S"),
    "IQ2_S": _few_bits("IQ2_XS", "IQ3_S", "IQ3_S"),
    "IQ2_XS": _few_bits("IQ2_XS", "Q2_K"),
    "IQ2_XXS": _few_bits("IQ2_XXS", "Q2_K"),
    "IQ1_M": _few_bits("IQ1_M", "Q2_K", "IQ2_XXS"),
    "IQ1_S": _few_bits("IQ1_S", "Q2_K", "IQ2_XXS"),
}
