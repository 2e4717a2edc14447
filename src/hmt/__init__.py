"""HMT, the Hierarchical Memory Transformer: language models that do not fit, on one machine.

    engine = hmt.Engine(quantization="w4a8", host_memory="64GiB")
    model = engine.load_model("path/to/checkpoint")
    print(model.infer(hmt.Request(input="Hello", max_new_tokens=64)).text)

Names are imported when they are first used, so that `import hmt` costs nothing.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hmt.base.errors import HMTError as HMTError
    from hmt.contracts.image import Video as Video
    from hmt.contracts.request import Completion as Completion
    from hmt.contracts.request import FinishReason as FinishReason
    from hmt.contracts.request import Grammar as Grammar
    from hmt.contracts.request import GrammarKind as GrammarKind
    from hmt.contracts.request import Request as Request
    from hmt.contracts.request import Sampling as Sampling
    from hmt.contracts.request import TokenEvent as TokenEvent
    from hmt.engine import Engine as Engine
    from hmt.engine import LoadedModel as LoadedModel
    from hmt.engine import RunSummary as RunSummary

__version__ = "0.1.0"

# Torch's own workers would wait for its next operation in a loop, for milliseconds, on the cores
# that our kernels compute on meanwhile: on two cores a prompt in pieces of 64 tokens took 138 ms
# instead of 88, nearly all of it on one of them, and beside another program 0.7 to 1.3 s instead of
# 0.1 to 0.2.  It is read when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_HOMES = {
    "Completion": "hmt.contracts.request",
    "Engine": "hmt.engine",
    "FinishReason": "hmt.contracts.request",
    "Grammar": "hmt.contracts.request",
    "GrammarKind": "hmt.contracts.request",
    "HMTError": "hmt.base.errors",
    "LoadedModel": "hmt.engine",
    "Request": "hmt.contracts.request",
    "RunSummary": "hmt.engine",
    "Sampling": "hmt.contracts.request",
    "TokenEvent": "hmt.contracts.request",
    "Video": "hmt.contracts.image",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'hmt' has no attribute {name!r}")
