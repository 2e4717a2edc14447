"""Settings for a purpose, which options that are given count before."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import psutil

from hmt.base.errors import ConfigError

_LAPTOP_SHARE: Final = 0.5  # of the memory that is available: the other half is for other programs


def _laptop() -> dict[str, Any]:
    cores = psutil.cpu_count(logical=False) or 2
    return {
        "host_memory": str(int(psutil.virtual_memory().available * _LAPTOP_SHARE)),
        "threads": max(1, cores // 2),
    }


PRESETS: Final[Mapping[str, Callable[[], dict[str, Any]]]] = {
    # Agents send long prompts that begin alike, and repeat what they were given.
    "coding": lambda: {"context": 32768, "prefix_cache": True, "speculate": "auto"},
    "long-context": lambda: {"context": 131072, "kv_quant": "fp8"},
    "many-users": lambda: {"context": 65536, "prefix_cache": True, "goal": "throughput"},
    "laptop": _laptop,
}


def preset_settings(name: str) -> dict[str, Any]:
    """Values of options by name.  Raises ConfigError for a preset that there is not."""
    if name not in PRESETS:
        raise ConfigError(f"there is no preset {name!r:.40}: choose {', '.join(PRESETS)}")
    return PRESETS[name]()
