"""On which instruction sets tests of compiled kernels run, and in which build."""

import os
from typing import Any, Final

# The build with sanitizers, which see reads and writes of compiled code: plain torch and sums over
# long contexts, which take most of the time there, are compared in the other build.
SANITIZED: Final = "HMT_EXTENSION" in os.environ


def without_tiles(native: Any) -> list[str]:
    """Those of kernels that use no tiles: with AMX they are the ones of the level below."""
    return [isa for isa in native.isas() if isa != "amx"]
