"""A small model in a process of its own: `python -m hmt.engine.own_memory FOLDER OPTIONS`.

OPTIONS are an engine's, as JSON.  Prints by how many bytes the process grew behind its
plan, less the weights and what they pass through.
"""

import json
import os
import sys
from pathlib import Path

_TOKENS = 24


def main() -> None:
    """See the module's text."""
    from hmt.contracts.request import Request
    from hmt.engine.engine import Engine
    from hmt.engine.loading import prepare
    from hmt.memory import peak_resident_bytes, resident_bytes

    folder, options = sys.argv[1:]
    with Engine(**json.loads(options)) as engine:
        prepare(Path(folder), engine.config)
        before = resident_bytes()  # what its configuration imports is there
        model = engine.load_model(folder)
        model.infer(Request(input=[20] * _TOKENS, max_new_tokens=_TOKENS, ignore_eos=True))
        weights = sum(model.plan.reserved[name] for name in ("resident", "slots", "staging"))
        print(peak_resident_bytes() - before - weights, flush=True)
        os._exit(0)  # nothing is left to be done


if __name__ == "__main__":
    main()
