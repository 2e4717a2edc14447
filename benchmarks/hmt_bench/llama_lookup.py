"""llama.cpp with its Python package's own speculation, in a process of its own.

    python -m hmt_bench.llama_lookup FILE THREADS CONTEXT DRAFTS REPACKS

It reads a JSON object with `tokens` and `count` from each line, decodes greedily, and writes one
with `tokens` and `seconds` of those behind the first.  DRAFTS is the number of tokens that
LlamaPromptLookupDecoding drafts; 0: none.  REPACKS says whether weights may be copied into the
processor's own layouts, which is llama.cpp's default.
"""

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from hmt.base.errors import MachineError
from hmt_bench.llama_cpp import load_llama_cpp
from hmt_bench.peer_environment import peer_environment


class LlamaLookup:
    """A process that holds a GGUF file in llama.cpp.

    repacks   whether it has the weights in the processor's own layouts: on a virtual machine that
              does not let it use AMX it ends with an illegal instruction there (0.3.36)
    """

    def __init__(self, path: Path, threads: int, context: int, drafts: int) -> None:
        """Raises MachineError where llama.cpp is missing or does not decode."""
        load_llama_cpp()
        arguments = [str(path), str(threads), str(context), str(drafts)]
        try:
            self._begin(arguments, repacks=True)
        except MachineError:
            self.close()
            self._begin(arguments, repacks=False)

    def _begin(self, arguments: list[str], *, repacks: bool) -> None:
        """Start the process, and let it decode a few tokens."""
        self.repacks = repacks
        command = [sys.executable, "-m", "hmt_bench.llama_lookup", *arguments, str(int(repacks))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=peer_environment(),
        )  # fmt: skip
        self.decode(range(3, 8), 8)

    def decode(self, tokens: Sequence[int], count: int) -> tuple[tuple[int, ...], float]:
        """`count` greedy tokens behind a prompt, and the seconds of all but the first.

        Raises MachineError where the process has ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"tokens": list(tokens), "count": count}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise MachineError("llama.cpp has ended; what it said stands above")
        answer = json.loads(line)
        return tuple(answer["tokens"]), float(answer["seconds"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def main() -> None:
    """See the module's text."""
    path, *numbers = sys.argv[1:]
    threads, context, drafts, repacks = map(int, numbers)
    llama_cpp: Any = load_llama_cpp()
    defaults = llama_cpp.llama_model_default_params

    def params() -> Any:
        own = defaults()
        own.use_extra_bufts = bool(repacks)
        return own

    llama_cpp.llama_cpp.llama_model_default_params = params
    lookup: Any = importlib.import_module("llama_cpp.llama_speculative")
    draft = lookup.LlamaPromptLookupDecoding(num_pred_tokens=drafts) if drafts else None
    model = llama_cpp.Llama(
        path, n_ctx=context, n_threads=threads, n_threads_batch=threads, draft_model=draft,
        verbose=False,
    )  # fmt: skip
    for line in sys.stdin:
        asked = json.loads(line)
        model.reset()  # or it goes on from what the last prompt shares with this one
        answer = model.generate(asked["tokens"], top_k=1, temp=0.0)
        first = next(answer)
        begin = time.perf_counter()
        tokens = [first, *islice(answer, asked["count"] - 1)]
        seconds = time.perf_counter() - begin
        print(json.dumps({"tokens": tokens, "seconds": seconds}), flush=True)
        answer.close()


if __name__ == "__main__":
    main()
