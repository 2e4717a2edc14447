"""Text to token ids: without the GIL, long texts in pieces, within limits."""

from functools import cached_property
from typing import Final

import tokenizers

from hmt.base.errors import ContextLengthError, RequestError
from hmt.text.pieces import PIECE_CHARACTERS, Coverage, Divider
from hmt.text.tokenizer_file import ConfinedEncoder, is_panic

# Bytes of a text that cannot be divided: tokenizing them takes 150 to 250 MB.
_MOST_UNDIVIDED: Final = 1 << 20


class Encoder:
    """Encodes with one tokenizer of the `tokenizers` package.  Safe for use by several threads."""

    def __init__(
        self, backend: tokenizers.Tokenizer, confined: ConfinedEncoder | None = None
    ) -> None:
        """`confined` encodes in a child process, where the tokenizer has parts of unknown cost."""
        self._backend = backend
        self._confined = confined

    def ids(self, text: str, *, add_special_tokens: bool, most: int | None = None) -> list[int]:
        """Token ids of `text`.

        add_special_tokens   whether those that the tokenizer puts around a text are added
        most                 tokens that there is room for: longer texts may be refused before all
                             of their tokens are known

        Raises RequestError for text that is not valid Unicode, has a megabyte without a place where
        it can be divided, or makes the tokenizer fail; ContextLengthError for what `most` cannot
        hold.
        """
        try:
            nbytes = len(text.encode())
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text is not valid Unicode: character {error.start} of {len(text)} is the "
                f"lone surrogate U+{ord(text[error.start]):04X}; remove it"
            ) from None
        # Each token stands for a byte at least: shorter texts are not looked at for this.
        if most is not None and nbytes > most and self._coverage is not None:
            least = self._coverage.least_tokens(text)
            if least > most:
                raise ContextLengthError(
                    f"the text has {nbytes} bytes, which are {least} tokens or more (this "
                    f"tokenizer's stand for {self._coverage.token_bytes} bytes at most); the "
                    f"context has room for {most}: shorten it"
                )
        if self._confined is not None:
            return self._confined.encode(text, add_special_tokens=add_special_tokens)
        around = self._around if len(text) > PIECE_CHARACTERS and self._divider else None
        if around is None:
            return self._at_once(text, add_special_tokens=add_special_tokens)
        before, after = around if add_special_tokens else ([], [])
        return [*before, *self._divided(text, most), *after]

    def _at_once(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a whole text.  `encode` would hold the GIL: 12 s for 2 MB of digits."""
        try:
            batch = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except BaseException as error:
            if isinstance(error, Exception) or is_panic(error):
                raise RequestError(
                    f"the checkpoint's tokenizer cannot encode this text of {len(text)} "
                    f"characters: {error}"
                ) from error
            raise
        return batch[0].ids

    def _divided(self, text: str, most: int | None) -> list[int]:
        """The same ids, a piece at a time."""
        ids: list[int] = []
        for piece in [] if self._divider is None else self._divider.pieces(text):
            nbytes = len(piece.encode())
            if nbytes > _MOST_UNDIVIDED:
                raise RequestError(
                    f"the text has {nbytes} bytes without a place where it can be divided, and "
                    f"{_MOST_UNDIVIDED} are tokenized at most: give it spaces or line breaks "
                    "between words"
                )
            ids += self._at_once(piece, add_special_tokens=False)
            if most is not None and len(ids) > most:
                raise ContextLengthError(
                    f"the text has more than {len(ids)} tokens; the context has room for {most}: "
                    "shorten it"
                )
        return ids

    @cached_property
    def _coverage(self) -> Coverage | None:
        return Coverage.of(self._backend)

    @cached_property
    def _divider(self) -> Divider | None:
        return Divider.of(self._backend)

    @cached_property
    def _around(self) -> tuple[list[int], list[int]] | None:
        """The special tokens before and behind every text; None where they cannot be told."""
        bare = self._at_once("a", add_special_tokens=False)
        whole = self._at_once("a", add_special_tokens=True)
        for begin in range(len(whole) - len(bare) + 1):
            if whole[begin : begin + len(bare)] == bare:
                return whole[:begin], whole[begin + len(bare) :]
        return None
