"""Rows that lie in another order than models want them."""

from torch import Tensor


def turn_back(rows: Tensor, width: int) -> Tensor:
    """Rows of whole heads [rows, ...] whose halves were published by turns, in order; a copy.

    llama.cpp turns neighbours (0, 1), (2, 3) ... of a head of `width` rows where Hugging Face's
    llama turns i and i + width / 2, and has ordered the rows of queries and keys for it.
    """
    pairs = rows.reshape(-1, width // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
