"""How a field of config.json is read from a GGUF file's metadata: one function for each kind."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from hmt.formats.gguf.keys import REQUIRED, Keys

Config = Mapping[str, Any]
Reader = Callable[[Keys, Config], Any]

SIGMOID: Final = 2  # of expert_gating_func
_SLIDING, _FULL = "sliding_attention", "full_attention"


def number(key: str, default: Any = REQUIRED) -> Reader:
    """A number."""
    return lambda keys, config: keys.number(key, default)


def count(key: str, default: Any = REQUIRED) -> Reader:
    """A whole number above 0."""
    return lambda keys, config: keys.count(key, default)


def flag(key: str, default: bool) -> Reader:
    """Whether something is so."""
    return lambda keys, config: keys.flag(key, default)


def tensor(name: str) -> Reader:
    """Whether the file has a tensor."""
    return lambda keys, config: keys.has_tensor(name)


def query_bias(keys: Keys, config: Config) -> bool:
    """Whether queries have a bias, by themselves or in one tensor with keys and values."""
    return keys.has_tensor("blk.0.attn_q.bias") or keys.has_tensor("blk.0.attn_qkv.bias")


def same(field: str) -> Reader:
    """What another field has."""
    return lambda keys, config: config[field]


def only(key: str, value: float) -> Reader:
    """`value`, which the file must have where it has the key: nothing else is computed."""

    def read(keys: Keys, config: Config) -> float:
        if abs(keys.number(key, value) - value) > 1e-6 * abs(value):
            raise keys.unread(key, f"and HMT computes this architecture with {value} only")
        return value

    return read


def must(key: str, value: bool, default: bool) -> Reader:
    """`value`: nothing else is computed; `default` is what a file without the key asks for."""

    def read(keys: Keys, config: Config) -> bool:
        if keys.flag(key, default) is not value:
            raise keys.unread(key, f"and HMT computes this architecture with {value} only")
        return value

    return read


def window(default: int | None = None) -> Reader:
    """Tokens of a sliding window; None without one, which is also what 0 says."""
    return lambda keys, config: keys.number("attention.sliding_window", default) or None


def layer_types(every: int, *, full_first: bool = False) -> Reader:
    """Which layers see a window: the file says it by layer, or all but every so manieth.

    full_first   the first of each group sees everything, not the last
    """
    return lambda keys, config: [
        _SLIDING if slides else _FULL
        for slides in keys.windows(every, config["num_hidden_layers"], full_first)
    ]


def sigmoid_only(field: Any = True) -> Reader:
    """`field`, for models whose routers are sigmoids; another function is refused."""

    def read(keys: Keys, config: Config) -> Any:
        if keys.number("expert_gating_func", 0) not in (0, SIGMOID):
            raise keys.unread("expert_gating_func")
        return field

    return read


def sparse_after(key: str) -> Reader:
    """mlp_layer_types: so many dense layers, then experts."""

    def read(keys: Keys, config: Config) -> list[str]:
        dense, layers = keys.number(key, 0), config["num_hidden_layers"]
        return ["dense" if index < dense else "sparse" for index in range(layers)]

    return read
