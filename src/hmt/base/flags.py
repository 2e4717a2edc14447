"""Every environment variable that HMT reads, declared in one place."""

import os
from dataclasses import dataclass

from hmt.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Flag:
    """One environment variable.  `choices` are the values it may have; empty means any text."""

    name: str
    default: str
    choices: tuple[str, ...]
    doc: str


KERNELS = Flag(
    "HMT_KERNELS",
    "auto",
    ("auto", "reference", "native"),
    "Which kernels compute on the CPU: plain torch (reference), the compiled extension (native), "
    "or the extension where it was built and plain torch otherwise (auto).",
)

EXTENSION = Flag(
    "HMT_EXTENSION",
    "",
    (),
    "File of compiled kernels to load instead of the installed ones, such as one with sanitizers.",
)

ISA = Flag(
    "HMT_ISA",
    "auto",
    ("auto", "portable", "avx2", "avx512", "avx512-bf16", "amx"),
    "Instruction set of the compiled kernels; auto takes the last of these that this machine runs.",
)

POISON = Flag(
    "HMT_POISON",
    "off",
    ("on", "off"),
    "Fill weight slots with NaN when they are given up, so that a use after release shows.",
)

CACHE = Flag(
    "HMT_CACHE",
    "",
    (),
    "Folder for what HMT remembers between runs (rates of this machine); "
    "when empty, hmt in XDG_CACHE_HOME or in ~/.cache.",
)

MODELS = Flag(
    "HMT_MODELS",
    "",
    (),
    "Folder for the real models that scripts/real-models fetches for tests, benchmarks and "
    "scripts/run; when empty, models in the folder of HMT_CACHE.",
)

FLAGS = (KERNELS, EXTENSION, ISA, POISON, CACHE, MODELS)


def read(flag: Flag) -> str:
    """The value of `flag` in the environment, or its default.

    Raises ConfigError when the value is none of the flag's choices.
    """
    value = os.environ.get(flag.name, flag.default)
    if flag.choices and value not in flag.choices:
        raise ConfigError(f"{flag.name}={value!r} is not one of {', '.join(flag.choices)}")
    return value
