"""One engine that decodes in a separate process: `python -m hmt_bench.decoder_process ...`.

    ENGINE MODEL TOKENS SEQUENCES OPTIONS

ENGINE is hmt, llama.cpp or accelerate; OPTIONS a JSON object: of hmt's engine, or empty.  Writes
"ready" once the model is there and "token N" after every step; a JSON object at the end, of hmt.
"""

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from hmt_bench.routed_model import FIRST_TOKEN

_PROMPT_TOKENS = 8
_APART = 61  # tokens, between the prompts of two sequences
_ACCOUNT = (
    *("steps", "seconds", "waited_s", "disk_s", "kernel_s"),
    *("disk_bytes", "useful_bytes", "host_bytes", "hits", "pending", "misses"),
    *(
        "overlap",
        "useful_share",
        "expert_prefetches",
        "expert_prefetch_hits",
        "expert_prefetch_saved_s",
    ),
)


def prompts(sequences: int) -> list[list[int]]:
    """A prompt each.  They lie apart, so that they do not all choose the same experts."""
    begins = [FIRST_TOKEN + _APART * number for number in range(sequences)]
    return [list(range(begin, begin + _PROMPT_TOKENS)) for begin in begins]


def decode_hmt(model: Path, tokens: int, sequences: int, options: dict[str, Any]) -> None:
    """`sequences` requests in common steps, and what they cost."""
    import hmt

    tables = time_tables()
    with hmt.Engine(**options, max_batch=sequences) as engine, ExitStack() as stack:
        loaded = engine.load_model(model)
        _say("ready")
        requests = [
            hmt.Request(
                input=prompt,
                max_new_tokens=tokens + 1,
                ignore_eos=True,
            )
            for prompt in prompts(sequences)
        ]
        streams = [stack.enter_context(closing(s)) for s in loaded.stream_batch(requests)]
        for stream in streams:
            next(stream)
        loaded.reset_summary()
        tables[0] = 0.0
        _say("token 0")
        for number in range(1, tokens + 1):
            for stream in streams:
                next(stream)
            _say(f"token {number}")
        summary = loaded.summary()
        phase = summary.generation
        _say(
            json.dumps(
                {name: getattr(phase, name) for name in _ACCOUNT}
                | {
                    "table_s": tables[0],
                    "used_bytes": sum(summary.used_bytes.values()),
                    "peak_rss_bytes": summary.peak_rss_bytes,
                }
            )
        )


def time_tables() -> list[float]:
    """Seconds that steps spend on rows of tables, added up from now on: one number.

    From hashing n-grams to having their rows, waiting included; the thread that reads ahead is not.
    """
    from hmt.layers.gated.ngram_memory import NGramHash
    from hmt.weights.store.block_store import WeightStore

    spent = [0.0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[0] += time.perf_counter() - begin

        return call

    for kind, names in ((NGramHash, ("row_ids",)), (WeightStore, ("rows", "request_rows"))):
        for name in names:
            setattr(kind, name, timed(getattr(kind, name)))
    return spent


def decode_llama_cpp(model: Path, tokens: int, sequences: int, options: dict[str, Any]) -> None:
    """llama.cpp with its default, a memory map."""
    import torch

    from hmt_bench.llama_cpp import LlamaCpp

    engine = LlamaCpp(model, int(options.get("threads", torch.get_num_threads())))
    _say("ready")
    engine.decode_greedily(prompts(sequences), tokens, lambda step: _say(f"token {step}"))
    engine.close()


def decode_accelerate(model: Path, tokens: int, sequences: int, options: dict[str, Any]) -> None:
    """transformers with accelerate's offloading to disk, in the checkpoint's own dtype."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(
        model,
        dtype=torch.bfloat16,
        device_map="auto",
        max_memory={"cpu": int(options["cpu_bytes"])},
        offload_folder=options["offload_folder"],
    )
    _say("ready")
    ids, cache = torch.tensor(prompts(sequences)), None
    with torch.inference_mode():
        for step in range(tokens + 1):
            out = loaded(ids, cache=cache, use_cache=True, logits_to_keep=1)
            ids, cache = out.logits[:, -1:].argmax(-1), out.cache
            _say(f"token {step}")


_DECODERS: dict[str, Callable[[Path, int, int, dict[str, Any]], None]] = {
    "hmt": decode_hmt,
    "llama.cpp": decode_llama_cpp,
    "accelerate": decode_accelerate,
}


def _say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    """See the module's text."""
    engine, model, tokens, sequences, options = sys.argv[1:]
    _DECODERS[engine](Path(model), int(tokens), int(sequences), json.loads(options))
    sys.stdout.flush()
    os._exit(0)  # what libraries do when they end is no part of the measurement


if __name__ == "__main__":
    main()
