"""Rows that lie in another order than models want them."""

import torch
from torch import Tensor


def turn_back(rows: Tensor, width: int) -> Tensor:
    """Rows of whole heads [rows, ...] whose halves were published interleaved, in order; a copy.

    llama.cpp turns neighbours (0, 1), (2, 3) ... of a head of `width` rows where Hugging Face's
    llama turns i and i + width / 2, and has ordered the rows of queries and keys for it.
    """
    pairs = rows.reshape(-1, width // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def grouped_by_heads(rows: Tensor, groups: int, width: int) -> Tensor:
    """Rows of all queries, then all keys, then all values, by groups of heads; a copy.

    A group is the queries that share a key, the key, and the value.

    groups   heads of keys
    width    rows of a head
    """
    keys = groups * width
    query, key, value = rows.split([len(rows) - 2 * keys, keys, keys])
    parts = [part.reshape(groups, -1, *rows.shape[1:]) for part in (query, key, value)]
    return torch.cat(parts, dim=1).reshape(rows.shape)


def untiled(rows: Tensor, before: int, groups: int, width: int) -> Tensor:
    """Rows of heads of values, by the heads of keys that they share; a copy.

    Published are the first head of each group, then the second of each, and so on (llama.cpp).

    before   rows that stay where they are: of queries and keys
    groups   heads of keys
    width    rows of a head
    """
    tiles = rows[before:].reshape(-1, groups, width, *rows.shape[1:])
    return torch.cat((rows[:before], tiles.transpose(0, 1).reshape(rows[before:].shape)))
