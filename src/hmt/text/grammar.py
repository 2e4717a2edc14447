"""Grammars: which tokens may come next, so that an answer has a given form.

Through llguidance (https://github.com/guidance-ai/llguidance), which computes each mask when it is
asked for: a grammar needs milliseconds before its first token, not seconds.
"""

import json
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from hmt.base.errors import MachineError, RequestError
from hmt.contracts.request import Grammar, GrammarKind
from hmt.text.json_schema import prepared

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_CACHED: Final = 64  # grammars
# A small model may write white space for ever: so much of it is enough for any layout.
_JSON: Final[Any] = {"whitespace_pattern": r"[ \n]{1,32}"}


class Constraint:
    """What one answer may still become.  Not for use by several threads at once."""

    def __init__(self, matcher: "LLMatcher", vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    @property
    def complete(self) -> bool:
        """True once nothing may follow."""
        return self._matcher.is_stopped()

    def allowed(self) -> torch.Tensor:
        """Tokens that may come next, an end token where the text may end: int64 [n], ascending."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        ids = np.unpackbits(mask, bitorder="little")[: self._vocab_size].nonzero()[0]
        if len(ids) == 0:
            raise RequestError(f"the grammar allows no token here: {self._reason()}")
        return torch.from_numpy(ids)

    def push(self, token_id: int) -> None:
        """The next token, which must be an allowed one.  Raises RequestError where it is not."""
        if not self._matcher.consume_token(token_id):
            raise RequestError(f"the grammar does not allow token {token_id}: {self._reason()}")

    def _reason(self) -> str:
        return self._matcher.get_error().partition("\n")[0] or "it is too complex"


class Grammars:
    """Compiles grammars for one tokenizer, and keeps the latest.  Thread-safe."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    def open(self, grammar: Grammar) -> Constraint:
        """For a new answer.  Raises RequestError for a grammar that is none, MachineError."""
        with self._lock:
            matcher = self._compiled.get(grammar)
            if matcher is None:
                matcher = self._compile(grammar)
                self._compiled[grammar] = matcher
                if len(self._compiled) > _CACHED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            return Constraint(matcher.deep_copy(), self._vocab_size)

    def _compile(self, grammar: Grammar) -> "LLMatcher":
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ImportError as error:
            raise MachineError(
                "answers with a form need llguidance: pip install 'hmt[serve]'"
            ) from error
        if self._tokenizer is None:
            self._tokenizer = LLTokenizer(
                self._json, n_vocab=self._vocab_size, eos_token=self._eos_ids
            )
        try:
            source = _source(grammar, LLMatcher)
        except ValueError as error:
            raise _wrong(grammar, str(error)) from error
        problem = LLMatcher.validate_grammar(source, self._tokenizer)
        if problem and not problem.startswith("WARNING"):
            raise _wrong(grammar, problem)
        matcher = LLMatcher(self._tokenizer, source, log_level=0)
        if matcher.is_error():
            raise _wrong(grammar, matcher.get_error())
        return matcher


def _source(grammar: Grammar, matcher: "type[LLMatcher]") -> str:
    """In llguidance's own form.  Raises ValueError."""
    kind, text = grammar.kind, grammar.source
    if kind is GrammarKind.JSON_SCHEMA:
        return matcher.grammar_from_json_schema(prepared(text, _JSON))
    if kind is GrammarKind.REGEX:
        return matcher.grammar_from_regex(text)
    if kind is GrammarKind.CHOICE:
        choices = json.loads(text)
        return matcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices)))
    from llguidance import grammar_from

    return grammar_from("grammar", text)  # Lark's, or llama.cpp's GBNF


def _wrong(grammar: Grammar, problem: str) -> RequestError:
    said = " ".join(problem.split())[:300]
    return RequestError(f"the {grammar.kind} cannot be used as a grammar: {said}")
