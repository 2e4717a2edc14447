"""Checkpoints of recurrent state on the disk, in pieces beside the pages that they belong to."""

import hashlib
from collections.abc import Sequence

import torch

from hmt.base.units import MIB
from hmt.kvcache.prefix.segments import KEY_BYTES
from hmt.kvcache.prefix.store import PrefixStore
from hmt.kvcache.recurrent_state import StateStore

_PIECE_BYTES = 4 * MIB  # at most: four times as much host memory is what a store's buffers take


def state_piece_bytes(state_bytes: int) -> int:
    """Bytes of the pieces, all alike, in which a state of so many bytes is kept."""
    pieces = -(-state_bytes // _PIECE_BYTES)
    return -(-state_bytes // max(1, pieces))


class SavedStates:
    """States by the names of the pages behind which they are those of a sequence.

    A name is a hash of all tokens up to the page's end, so it says which state it is.  What is
    damaged counts as never kept.  Only for the engine's thread.
    """

    def __init__(self, states: StateStore, store: PrefixStore) -> None:
        """`store` has pages of `state_piece_bytes`, and is closed by its owner."""
        self._states = states
        self._store = store
        self._nbytes = states.row(0).numel()
        self._piece = state_piece_bytes(self._nbytes)

    def longest(self, keys: Sequence[bytes], least: int) -> int:
        """How many of a sequence's first pages, called `keys`, end with a state that is here.

        `least` where that is not more.
        """
        self._store.held(())  # learn of files that came
        for count in range(len(keys), least, -1):
            if self._store.known(self._pieces(keys[count - 1])):
                return count
        return least

    def save(self, key: bytes, slot: int, owner: str) -> int:
        """Write some of the state in `slot`; 0 where all of it is there, or cannot be kept."""
        row = self._states.row(slot)

        def export(first: int, memory: torch.Tensor) -> None:
            for number, piece in enumerate(memory, first):
                part = row[number * self._piece : (number + 1) * self._piece]
                piece.zero_()
                piece[: len(part)] = part.to(memory.device)

        return self._store.save(self._pieces(key), export, owner)

    def load(self, key: bytes, slot: int) -> bool:
        """Fill `slot`; False where not all was there, and the slot holds nothing of use."""
        row, at = self._states.row(slot), 0

        def put(rows: torch.Tensor) -> None:
            nonlocal at
            for piece in rows:
                part = row[at : at + self._piece]
                part.copy_(piece[: len(part)])
                at += len(part)

        pieces = self._pieces(key)
        return self._store.load(pieces, 0, put) == len(pieces)

    def _pieces(self, key: bytes) -> list[bytes]:
        count = -(-self._nbytes // self._piece)
        return [
            hashlib.blake2b(key + number.to_bytes(4, "little"), digest_size=KEY_BYTES).digest()
            for number in range(count)
        ]
