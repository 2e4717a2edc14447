"""Which limit of a request's length rules, and what a user can do about it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from hmt.base.errors import ContextLengthError, RequestError

DEFAULT_NEW_TOKENS = 256


@dataclass(frozen=True, slots=True)
class LengthLimit:
    """The most positions that prompt and answer may take together.

    tokens   of them
    reason   whose limit it is, and what to do about it
    """

    tokens: int
    reason: str

    @classmethod
    def of(cls, longest: int, loaded: int, asked: int | None = None) -> Self:
        """The smallest of what the model was made for, what it was loaded with and what is asked.

        Raises ContextLengthError where `asked` (a request's context_size) is none of the model's.
        """
        if asked is not None and not 0 < asked <= longest:
            raise ContextLengthError(
                f"context_size {asked} was asked for; this model was made for 1 to {longest}"
            )
        shorter = "shorten the prompt, or lower max_new_tokens"
        limits = [
            (longest, f"is all that this model was made for: {shorter}"),
            (loaded, f"is what it was loaded with: {shorter}, or load it with a larger context "
             f"(--context, {longest} at most)"),
        ]  # fmt: skip
        if asked is not None:
            limits.append((asked, f"is the request's context_size: {shorter}, or raise it"))
        return cls(*min(limits, key=lambda limit: limit[0]))

    def new_tokens(self, prompt: int, asked: int | None, fewest: int = 1) -> int:
        """How many tokens may follow `prompt` tokens, where `asked` are wanted.

        Raises RequestError below `fewest`, ContextLengthError for more than there is room for.
        """
        if asked is not None and (type(asked) is not int or asked < fewest):
            raise RequestError(f"max_new_tokens is {asked!r}; it must be at least {fewest}")
        least = 1 if asked is None else asked
        if prompt + least > self.tokens:
            raise ContextLengthError(
                f"{prompt} prompt tokens and {least} new ones need {prompt + least} positions; "
                f"the context of {self.tokens} {self.reason}"
            )
        return min(DEFAULT_NEW_TOKENS, self.tokens - prompt) if asked is None else asked


def check_tokens(tokens: Sequence[int], vocab_size: int) -> None:
    """Raise RequestError unless all are ids of the vocabulary."""
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise RequestError(f"token id {token!r} is not in 0..{vocab_size - 1}")
