"""Compiling grammars and following answers with them, in a child process.

Through llguidance (https://github.com/guidance-ai/llguidance), which computes each mask when it is
asked for: a grammar needs milliseconds before its first token, not seconds.  It recurses over
whatever it is given, and some grammars overflow its stack, while they are compiled or later.
"""

import json
from typing import TYPE_CHECKING, Any

from hmt.sandbox.refusal import Refusal

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Matchers:
    """A role: a worker compiles one grammar, and follows any number of answers with it."""

    def __init__(self, settings: dict[str, Any], blob: bytes) -> None:
        """`blob` is a tokenizer.json; `settings` has "vocab_size" and "eos_ids"."""
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise Refusal("missing", str(error)) from None
        self._tokenizer = LLTokenizer(
            blob.decode(), n_vocab=settings["vocab_size"], eos_token=settings["eos_ids"]
        )
        self._compiled: LLMatcher | None = None
        self._answers: dict[int, LLMatcher] = {}

    def handle(self, message: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
        """{"kind", "source"}: compile; {"open", "tokens"}: begin an answer, with these tokens.

        {"push", "token"}: the next token of an answer.  All but the first answer {"complete"}, and
        with the mask of tokens that may come next, a bit for each, from the lowest bit of the first
        byte on; end tokens once complete.  "closed" in any of them are answers that have ended.
        Raises Refusal of kinds "grammar" and "token".
        """
        for number in message.get("closed", ()):
            self._answers.pop(number, None)
        if "kind" in message:
            self._compiled = self._compile(message["kind"], message["source"])
            return {}, b""
        if "open" in message:
            assert self._compiled is not None
            matcher = self._answers[message["open"]] = self._compiled.deep_copy()
            tokens = message["tokens"]
        else:
            matcher, tokens = self._answers[message["push"]], [message["token"]]
        if tokens and not matcher.consume_tokens(tokens):
            raise Refusal("token", _reason(matcher))
        mask = matcher.compute_bitmask()
        if matcher.is_error() or not any(mask):
            raise Refusal("token", _reason(matcher))
        return {"complete": matcher.is_stopped()}, mask

    def _compile(self, kind: str, text: str) -> "LLMatcher":
        from llguidance import LLMatcher

        try:
            source = _source(kind, text)
        except ValueError as error:
            raise Refusal("grammar", str(error)) from None
        problem = LLMatcher.validate_grammar(source, self._tokenizer)
        if problem and not problem.startswith("WARNING"):
            raise Refusal("grammar", problem)
        matcher = LLMatcher(self._tokenizer, source, log_level=0)
        if matcher.is_error():
            raise Refusal("grammar", matcher.get_error())
        return matcher


def _source(kind: str, text: str) -> str:
    """In llguidance's own form.  Raises ValueError."""
    from llguidance import LLMatcher, grammar_from

    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(text)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        choices = json.loads(text)
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices)))
    return grammar_from("grammar", text)  # Lark's, or llama.cpp's GBNF


def _reason(matcher: "LLMatcher") -> str:
    return matcher.get_error().partition("\n")[0] or "it is too complex"
