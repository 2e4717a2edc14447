"""One prompt in a separate process: `python -m hmt_bench.prefix_process MODEL PROMPT OPTIONS`.

PROMPT is a file with token ids, OPTIONS are those of hmt's engine; both JSON.  Prints another JSON
object: how long the first token took, which it was, and how much of the prompt was computed.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def answer(model: Path, prompt: list[int], options: dict[str, Any]) -> dict[str, Any]:
    """Load, answer with one token, and close, which keeps the prompt for the next process."""
    import hmt

    begin = time.perf_counter()
    with hmt.Engine(**options) as engine:
        loaded = engine.load_model(model)
        loaded_s = time.perf_counter() - begin
        begin = time.perf_counter()
        found = loaded.infer(hmt.Request(prompt, max_new_tokens=1, ignore_eos=True))
        first_token_s = time.perf_counter() - begin
        summary = loaded.summary()
        begin = time.perf_counter()
    return {
        "token": found.token_ids[0],
        "loading_s": loaded_s,
        "first_token_s": first_token_s,
        "closing_s": time.perf_counter() - begin,
        "computed_tokens": summary.prompt.tokens,
        "prefixes": summary.prefixes,
    }


def main() -> None:
    """See the module's text."""
    model, prompt, options = sys.argv[1:]
    ids = json.loads(Path(prompt).read_text())
    print(json.dumps(answer(Path(model), ids, json.loads(options))), flush=True)
    os._exit(0)  # what libraries do when they end is no part of the measurement


if __name__ == "__main__":
    main()
