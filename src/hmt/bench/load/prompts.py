"""Prompts of text, as long as the endpoint's own count says.

Token ids would be other texts on other engines, and random ones never share a word with training.
"""

import random

from hmt.bench.load.client import Client

_PROBE_CHARACTERS = 400
_PIECES, _PIECES_TOKENS = 8, 2048  # short pieces of a text differ more, and cost less
_USUAL_CHARACTERS = 4.0  # per token of English, where an endpoint does not count


class Prompts:
    """Pieces of a text that begin at words of it, each at another one."""

    def __init__(self, text: str, seed: int) -> None:
        self._text, self._seed = text, seed
        self._words = [0, *(i + 1 for i, letter in enumerate(text[:-1]) if letter.isspace())]
        self._characters: dict[int, int] = {}

    def piece(self, characters: int, *number: int) -> str:
        """So many characters; the same ones for the same number.  The text repeats."""
        chosen = random.Random(f"{self._seed} {number}").choice(self._words)
        repeats = (chosen + characters) // len(self._text) + 1
        return (self._text * repeats)[chosen : chosen + characters]

    def of(self, tokens: int, *number: int) -> str:
        """About so many tokens; `measure` must have been told this length."""
        return self.piece(self._characters[tokens], tokens, *number)

    async def measure(self, client: Client, tokens: int) -> None:
        """Learn from the endpoint's count how much text so many tokens are.

        Raises HMTError where it refuses a prompt of this length.
        """
        rate = await self._rate(client, _PROBE_CHARACTERS, 1)
        characters = max(1, round(tokens * rate))
        rate = await self._rate(client, characters, max(1, min(_PIECES, _PIECES_TOKENS // tokens)))
        self._characters[tokens] = max(1, round(tokens * rate))

    async def _rate(self, client: Client, characters: int, pieces: int) -> float:
        """Characters per token of some pieces of this length."""
        counts = [await client.count(self.piece(characters, number)) for number in range(pieces)]
        counted = sum(count or 0 for count in counts)
        return pieces * characters / counted if all(counts) else _USUAL_CHARACTERS
