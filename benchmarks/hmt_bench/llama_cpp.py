"""llama.cpp, driven at the level of its C API: no sampling and no text between its steps."""

import ctypes
import importlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from hmt.base.errors import MachineError

_STEP_TOKENS = 512  # llama.cpp's own default for n_ubatch
_CACHE_STEP = 256  # llama.cpp pads its KV cache to multiples of this

Tokens = Sequence[int]


def load_llama_cpp() -> ModuleType:
    """The package llama-cpp-python.  Raises MachineError, with the command that installs it."""
    try:
        return importlib.import_module("llama_cpp")
    except (ImportError, OSError, RuntimeError) as error:  # the last two: its library is broken
        raise MachineError(
            f"llama.cpp does not load ({error}): install it for this processor with "
            'CMAKE_ARGS="-DGGML_NATIVE=ON" pip install --no-binary llama-cpp-python '
            "'llama-cpp-python==0.3.36' 'gguf>=0.10'"
        ) from error


@dataclass(frozen=True, slots=True)
class _Entry:
    """One token of a batch."""

    token: int
    position: int
    sequence: int
    wanted: bool  # its logits


class LlamaCpp:
    """A GGUF model on `threads` threads, loaded once, with one context for each way to use it."""

    def __init__(self, path: Path, threads: int) -> None:
        """Raises MachineError where llama.cpp is missing or refuses the file."""
        self._lib = load_llama_cpp()
        self._threads = threads
        self._said: deque[str] = deque(maxlen=5)
        self._buffers: list[str] = []
        self._log = self._lib.llama_log_callback(self._hear)
        self._lib.llama_log_set(self._log, ctypes.c_void_p(0))
        self._lib.llama_backend_init()
        self._model = self._lib.llama_model_load_from_file(
            str(path).encode(), self._lib.llama_model_default_params()
        )
        if not self._model:
            raise MachineError(f"llama.cpp cannot load {path}: {''.join(self._said)}")
        vocab = self._lib.llama_model_get_vocab(self._model)
        self._vocab_size = self._lib.llama_vocab_n_tokens(vocab)
        self._contexts: dict[tuple[int, int, bool], Any] = {}
        self._batch = self._lib.llama_batch_init(_STEP_TOKENS, 0, 1)

    def close(self) -> None:
        """Free all memory."""
        for context in self._contexts.values():
            self._lib.llama_free(context)
        self._contexts.clear()
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_model_free(self._model)

    def describe(self) -> dict[str, Any]:
        """Version, processor features, buffers and settings, for the file of results."""
        return {
            "name": "llama.cpp",
            "package": f"llama-cpp-python {self._lib.__version__}",
            "system": self._lib.llama_print_system_info().decode().strip(),
            "buffers": self._buffers,
            "n_threads": self._threads,
            "n_threads_batch": self._threads,
            "n_batch": _STEP_TOKENS,
            "n_ubatch": _STEP_TOKENS,
            "kv": "f16",
        }

    def prompt(self, tokens: Tokens, *, flash: bool) -> float:
        """Seconds from an empty context to the logits of the last token."""
        context = self._context(1, len(tokens), flash)
        self._clear(context)
        begin = time.perf_counter()
        self._decode(context, _prompts([tokens]))
        return time.perf_counter() - begin

    def generate(
        self, prompts: Sequence[Tokens], continuations: Sequence[Tokens], *, flash: bool
    ) -> float:
        """Seconds in which given tokens are decoded, one per sequence and step, after `prompts`.

        All continuations are equally long, and all prompts together fit one step.  The tokens are
        given, so nothing but decoding is timed.
        """
        longest = max(len(prompt) for prompt in prompts)
        context = self._context(len(prompts), longest + len(continuations[0]), flash)
        self._clear(context)
        self._decode(context, _prompts(prompts))
        begin = time.perf_counter()
        for step, tokens in enumerate(zip(*continuations, strict=True)):
            entries = [
                _Entry(token, len(prompt) + step, sequence, True)
                for sequence, (token, prompt) in enumerate(zip(tokens, prompts, strict=True))
            ]
            self._decode(context, entries)
        return time.perf_counter() - begin

    def decode_greedily(
        self, prompts: Sequence[Tokens], steps: int, done: Callable[[int], None]
    ) -> None:
        """Decode the likeliest tokens after `prompts`; `done(step)` from 0, the prompts, on."""
        longest = max(len(prompt) for prompt in prompts)
        context = self._context(len(prompts), longest + steps, False)
        self._clear(context)
        entries = _prompts(prompts)
        self._decode(context, entries)
        done(0)
        for step in range(1, steps + 1):
            wanted = [index for index, entry in enumerate(entries) if entry.wanted]
            tokens = [int(self._logits_of(context, index).argmax()) for index in wanted]
            entries = [
                _Entry(token, len(prompt) + step - 1, sequence, True)
                for sequence, (token, prompt) in enumerate(zip(tokens, prompts, strict=True))
            ]
            self._decode(context, entries)
            done(step)

    def logits(self, tokens: Tokens) -> torch.Tensor:
        """Logits f32 [vocab] that follow `tokens`."""
        context = self._context(1, len(tokens), False)
        self._clear(context)
        self._decode(context, _prompts([tokens]))
        return torch.from_numpy(self._logits_of(context, len(tokens) - 1).copy())

    def _logits_of(self, context: Any, index: int) -> np.ndarray[Any, Any]:
        """Logits f32 [vocab] of entry `index` of the last step; valid until the next one."""
        found = self._lib.llama_get_logits_ith(context, index)
        return np.ctypeslib.as_array(found, (self._vocab_size,))

    def _context(self, sequences: int, positions: int, flash: bool) -> Any:
        """A context for so many sequences of up to so many positions each."""
        positions = -(-positions // _CACHE_STEP) * _CACHE_STEP
        key = (sequences, positions, flash)
        if key not in self._contexts:
            params = self._lib.llama_context_default_params()
            params.n_ctx = sequences * positions
            params.n_seq_max = sequences
            params.n_batch = params.n_ubatch = _STEP_TOKENS
            params.n_threads = params.n_threads_batch = self._threads
            params.flash_attn_type = int(flash)
            params.no_perf = True
            context = self._lib.llama_init_from_model(self._model, params)
            if not context:
                raise MachineError(f"llama.cpp makes no context: {''.join(self._said)}")
            self._contexts[key] = context
        return self._contexts[key]

    def _clear(self, context: Any) -> None:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(context), False)

    def _decode(self, context: Any, entries: Sequence[_Entry]) -> None:
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, entry in enumerate(entries):
            batch.token[i] = entry.token
            batch.pos[i] = entry.position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = entry.sequence
            batch.logits[i] = entry.wanted
        status = self._lib.llama_decode(context, batch)
        if status:
            raise MachineError(f"llama_decode failed with {status}: {''.join(self._said)}")
        self._lib.llama_synchronize(context)

    def _hear(self, level: int, text: bytes, data: object) -> None:
        line = text.decode(errors="replace")
        self._said.append(line)
        if "model buffer size" in line:
            self._buffers.append(" ".join(line.split(": ", 1)[-1].split()))


def _prompts(prompts: Sequence[Tokens]) -> list[_Entry]:
    """Whole prompts, with the logits of the last token of each."""
    return [
        _Entry(token, position, sequence, position == len(tokens) - 1)
        for sequence, tokens in enumerate(prompts)
        for position, token in enumerate(tokens)
    ]
