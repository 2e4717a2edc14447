"""A small model in a process of its own: `python -m hmt.engine.own_memory FOLDER OPTIONS TOKENS`.

OPTIONS are an engine's, as JSON; prompts have so many TOKENS.  Prints by how many bytes the process
grew behind its plan, less the weights and what they pass through; and less the rest of the plan,
which long prompts have all touched.
"""

import json
import os
import sys
from pathlib import Path

_PROMPTS = 3
_TOKENS = 24  # of an answer


def main() -> None:
    """See the module's text."""
    from hmt.contracts.request import Request
    from hmt.engine.engine import Engine
    from hmt.engine.loading import prepare
    from hmt.memory import forget_peak, peak_resident_bytes, resident_bytes

    folder, options, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with Engine(**json.loads(options)) as engine:
        prepare(Path(folder), engine.config, None, engine._device, engine._device_left())
        # What its configuration imports is there.  Measuring the link took 860 MiB for a moment.
        forget_peak()
        before = resident_bytes()
        model = engine.load_model(folder)
        for first in range(_PROMPTS):
            numbers = [20 + (first + at) % 500 for at in range(tokens)]
            model.infer(Request(input=numbers, max_new_tokens=_TOKENS, ignore_eos=True))
        grown, reserved = peak_resident_bytes() - before, model.plan.reserved
        weights = sum(reserved[name] for name in ("resident", "slots", "staging"))
        print(grown - weights, grown - sum(reserved.values()), flush=True)
        os._exit(0)  # nothing is left to be done


if __name__ == "__main__":
    main()
