"""What a user asks for: a method, a form, and what differs from it."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from hmt.base.errors import ConfigError
from hmt.quant.methods.interface import Target

KINDS: Final = ("int", "nvfp4", "mxfp4")
_GROUPS: Final = {"nvfp4": 16, "mxfp4": 32}
WIDTHS: Final = (2, 3, 4, 5, 6, 8)
# What suffers most from few bits for the bytes that it has: values and what attention adds to the
# hidden states (of linear attention too), and experts that every token passes.  Routers stay as
# they are.
_SENSITIVE: Final = (
    r"(^|\.)(v_proj|qkv_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj|out_proj)$|shared_expert"
)
RECIPES: Final[Mapping[str, tuple[tuple[str, int], ...]]] = {
    "uniform": (),
    "mixed": ((_SENSITIVE, 8),),
}
_SMALLER: Final = (128, 64, 32, 16)  # groups, where the one that was asked for divides no row


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """How a model is quantised.

    method        such as "rtn", "gptq" or "rotate,awq,gptq": see `methods.py`
    target        the form of weights that nothing else is said of
    bits_of       (regular expression, bits) of modules' names; the last that is found in one counts
    keep          regular expressions of modules that stay as published, besides the output layer
    calibration   "builtin", or a file of text
    sequences     of calibration
    length        tokens of each
    host_memory_bytes   for weights, statistics and activations
    gpu           number of the GPU that computes; "fake" to try it without one; None: the CPU does
    gpu_memory_bytes    that may be taken of it, the driver's share included; None: 90% of what is
                  free
    sensitivity   measure each weight, and leave those as published that suffer most
    target_bytes  of all tensors' files: bits of integers are chosen by measured loss; None: they
                  are the target's
    widths        bits that are chosen from
    """

    method: str = "rtn"
    target: Target = field(default_factory=Target)
    bits_of: tuple[tuple[str, int], ...] = ()
    keep: tuple[str, ...] = ()
    calibration: str = "builtin"
    sequences: int = 128
    length: int = 512
    host_memory_bytes: int = 4 << 30
    gpu: str | None = None
    gpu_memory_bytes: int | None = None
    sensitivity: bool = False
    target_bytes: int | None = None
    widths: tuple[int, ...] = WIDTHS

    def __post_init__(self) -> None:
        check_target(self.target)
        for pattern, bits in self.bits_of:
            _check_pattern(pattern)
            if self.target.kind != "int" and bits != 4:
                raise ConfigError(
                    f"{pattern}={bits}: {self.target.kind} has 4 bits; mix integers of several "
                    "widths, or keep modules as they are (--keep)"
                )
            check_target(replace(self.target, bits=bits))
        for pattern in self.keep:
            _check_pattern(pattern)
        self._check_widths()
        if self.sequences < 1 or self.length < 32:
            raise ConfigError(
                f"{self.sequences} sequences of {self.length} tokens: calibration takes at least "
                "one sequence, of 32 tokens or more"
            )

    def _check_widths(self) -> None:
        if self.target_bytes is None:
            if self.widths != WIDTHS:
                raise ConfigError(
                    f"--widths {','.join(map(str, self.widths))} are what bits are chosen from: "
                    "give --target-size too"
                )
            return
        if self.target.kind != "int":
            raise ConfigError(
                f"--target-size chooses bits of integers, and {self.target.kind} has 4: leave one "
                "of them out"
            )
        if not self.widths:
            raise ConfigError("--widths names none: give some from 2 to 8, such as 3,4,8")
        for bits in self.widths:
            check_target(replace(self.target, bits=bits))

    @property
    def measures(self) -> bool:
        """Whether weights are measured before the first is quantised."""
        return self.sensitivity or self.target_bytes is not None

    def target_of(self, module: str, columns: int) -> Target | None:
        """The form of a module's weight with `columns` inputs; None: it stays as published.

        Where a group divides no row, the largest smaller group that does takes its place, and one
        scale for each row where none does.
        """
        if any(re.search(pattern, module) for pattern in self.keep):
            return None
        target = self.target
        for pattern, bits in self.bits_of:
            if re.search(pattern, module):
                target = replace(target, bits=bits)
        if target.kind != "int":
            return target if columns % target.group_size == 0 else None
        if target.group_size and columns % target.group_size:
            smaller = (s for s in _SMALLER if s < target.group_size and columns % s == 0)
            target = replace(target, group_size=next(smaller, 0))
        return target

    def identity(self) -> Mapping[str, Any]:
        """All of it as JSON, to be compared with that of another run."""
        return asdict(self)


def bits_by_recipe(name: str) -> tuple[tuple[str, int], ...]:
    """`bits_of` of the recipe called so.  Raises ConfigError."""
    if name not in RECIPES:
        raise ConfigError(f"the recipe {name!r} is unknown; choose {' or '.join(RECIPES)}")
    return RECIPES[name]


def target_named(kind: str, bits: int | None, group_size: int | None, symmetric: bool) -> Target:
    """The form that a user describes; None is the kind's own.  Raises ConfigError."""
    if kind not in KINDS:
        raise ConfigError(f"the form {kind!r} is unknown; choose {', '.join(KINDS)}")
    if kind != "int" and (bits not in (None, 4) or group_size not in (None, _GROUPS[kind])):
        raise ConfigError(
            f"{kind} has 4 bits and groups of {_GROUPS[kind]}, not {bits} and {group_size}: leave "
            "--bits and --group-size out"
        )
    group = _GROUPS.get(kind, 32) if group_size is None else group_size
    return Target(kind, bits or 4, group, symmetric)


def check_target(target: Target) -> None:
    """Raise ConfigError unless weights can have that form."""
    if target.kind == "int" and not 2 <= target.bits <= 8:
        raise ConfigError(f"integers can have 2 to 8 bits, not {target.bits}")
    if target.group_size < 0 or target.group_size % 16:
        raise ConfigError(
            f"a group of {target.group_size} inputs is no multiple of 16: give 32, 64 or 128, or 0 "
            "for one scale per row"
        )
    if target.kind != "int" and not target.symmetric:
        raise ConfigError(f"{target.kind} has no zero points: leave --asymmetric out")


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{pattern!r} is no regular expression: {error}") from error
