"""Memory of n-grams: rows of a table, found by hashes of the last tokens, gated into the streams.

The table is made for a disk: it is larger than everything else of a model, and a token reads a few
rows of it, which are known as soon as the token is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import isqrt

import torch
from torch import Tensor

from hmt.contracts.blocks import ParamSpec, Role
from hmt.contracts.model import LayerState, StateTensor
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache, StateRun
from hmt.kernels import ops
from hmt.layers.gated.gated_residual import StreamNorm
from hmt.layers.linear import Params, linear_params, project

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_SEED_STEP = 10007  # between the seeds of two layers
_SMALLEST_GATE = 1e-6


@dataclass(frozen=True, slots=True)
class NGramHash:
    """Which rows of a table stand for the n-grams that end with a token (Qwen4-Exp).

    Each n from 2 to `longest` has `heads` hashes, each with a range of rows of its own, as many as
    the next prime.  What stands before a sequence, or before an end-of-text token, counts as that
    token.

    number       of the table among the model's, from 0: its primes and factors differ from others'
    least_rows   of a range
    eos          the end-of-text token
    """

    longest: int
    heads: int
    vocab_size: int
    number: int
    least_rows: int
    seed: int
    eos: int
    ranges: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        count = (self.longest - 1) * self.heads
        object.__setattr__(
            self, "ranges", _primes_from(self.least_rows, count * (self.number + 1))[-count:]
        )

    @property
    def rows_per_token(self) -> int:
        """Rows that a token reads."""
        return len(self.ranges)

    @property
    def rows(self) -> int:
        """Rows of all ranges."""
        return sum(self.ranges)

    @property
    def factors(self) -> list[int]:
        """What the tokens of an n-gram are multiplied with, the last token's first; all odd."""
        half = max(1, ((1 << 63) - 1) // max(self.vocab_size, 1) // 2)
        base = self.seed + _SEED_STEP * self.number
        return [2 * (_mixed(base + _GAMMA * n) % half) + 1 for n in range(1, self.longest + 1)]

    def row_ids(self, step: Step) -> Tensor:
        """Rows of the table, in host memory: int64 [tokens, rows_per_token], shorter n-grams first.

        The step's runs know the tokens before them: `Segment.preceding`.
        """
        tokens = step.token_ids.cpu()
        return torch.cat(
            [self._of_run(tokens[r.tokens], r.start, r.preceding) for r in step.segments]
        )

    def _of_run(self, tokens: Tensor, start: int, preceding: Sequence[int]) -> Tensor:
        before = self.longest - 1
        if len(preceding) < min(start, before):
            raise AssertionError(
                f"a run begins at position {start} and knows {len(preceding)} tokens before it; "
                f"n-grams need {min(start, before)}"
            )
        known = list(preceding[-before:])
        known = [self.eos] * (before - len(known)) + known
        text = torch.cat((torch.tensor(known, dtype=torch.int64), tokens))
        offsets = torch.tensor((0, *self.ranges[:-1])).cumsum(0).unflatten(0, (-1, self.heads))
        moduli = torch.tensor(self.ranges).unflatten(0, (-1, self.heads))
        first, *factors = self.factors
        mixed, alive = tokens * first, torch.ones_like(tokens, dtype=torch.bool)
        ids = []
        for back, factor in enumerate(factors, 1):
            earlier = text[before - back : len(text) - back]
            alive = alive & (earlier != self.eos)
            mixed = mixed ^ (torch.where(alive, earlier, self.eos) * factor)
            ids.append(mixed[:, None] % moduli[back - 1] + offsets[back - 1])
        return torch.cat(ids, dim=1)


@dataclass(frozen=True, slots=True)
class NGramMemory:
    """What a layer adds to all streams for the n-grams that end with each token (Qwen4-Exp).

    A token's rows make one value and a key for each stream; key and stream make the gate of the
    value in that stream.  A convolution over time is added, whose taps lie `longest` apart.

    norm    of keys, of streams, and of what is convolved, each with weights of its own
    width   numbers of a token's rows together
    taps    of the convolution, the token's own included
    """

    hashed: NGramHash
    norm: StreamNorm
    width: int
    taps: int

    @property
    def row_width(self) -> int:
        """Numbers of one row."""
        return self.width // self.hashed.rows_per_token

    @property
    def reach(self) -> int:
        """Tokens before its own that a token's convolution reaches back to."""
        return (self.taps - 1) * self.hashed.longest

    @property
    def state(self) -> LayerState:
        """What one layer keeps of a sequence."""
        streams = self.norm.width
        return (StateTensor("conv", (self.reach, streams), inputs=streams),)

    @property
    def activation_width(self) -> int:
        """Numbers alive per token: rows once more; of all streams what is made, in f32 too."""
        return self.width + 10 * self.norm.width

    @property
    def rows_width(self) -> int:
        """Numbers of a token's rows, and of their ids in int64, which are sorted."""
        return self.width + 6 * self.hashed.rows_per_token

    def params(self, at: str) -> tuple[ParamSpec, ...]:
        """Parameters but for the table, called `at` + key_proj and so on in the checkpoint."""
        width, hidden = self.norm.width, self.norm.norm.width
        conv = (f"{at}conv1d.weight",)
        return (
            *linear_params("ngram_key", width, self.width, f"{at}key_proj"),
            *linear_params("ngram_value", hidden, self.width, f"{at}value_proj"),
            self.norm.param("ngram_key_norm", f"{at}norm_key.weight"),
            self.norm.param("ngram_stream_norm", f"{at}norm_query.weight"),
            self.norm.param("ngram_conv_norm", f"{at}norm_conv.weight"),
            ParamSpec("ngram_conv", (width, 1, self.taps), conv, Role.VECTOR),
        )

    def __call__(
        self, streams: Tensor, rows: Tensor, number: int, step: Step, params: Params, kv: KVCache
    ) -> Tensor:
        """What is added to streams [tokens, streams * hidden_size], same shape.

        rows     [tokens, width] of the table, by `NGramHash.row_ids`
        number   by which `kv` knows the state of the convolution, which advances
        """
        count, hidden = self.norm.streams, self.norm.norm.width
        key = self.norm(project(rows, params, "ngram_key"), params["ngram_key_norm"].data)
        query = self.norm(streams, params["ngram_stream_norm"].data)
        products = (key.float() * query.float()).unflatten(1, (count, hidden)).sum(-1)
        products = products / hidden**0.5  # [tokens, streams]
        gates = ops.sigmoid(products.abs().clamp_min(_SMALLEST_GATE).sqrt() * products.sign())
        value = project(rows, params, "ngram_value")
        gated = (gates.to(value.dtype)[..., None] * value[:, None]).flatten(1)
        state = kv.state(number, step)
        weight, tails = self._spread(params["ngram_conv"].data), state.tensors["conv"]

        def update(inputs: Sequence[Tensor], runs: Sequence[StateRun]) -> Tensor:
            return ops.causal_conv(inputs[0], weight, tails, runs)

        normed = self.norm(gated, params["ngram_conv_norm"].data)
        return gated + state.advance((normed,), update)

    def _spread(self, weight: Tensor) -> Tensor:
        """Weights [channels, 1, taps] with zeros between them: [channels, reach + 1]."""
        spread = weight.new_zeros(weight.shape[0], self.reach + 1)
        spread[:, :: self.hashed.longest] = weight.squeeze(1)
        return spread


def _mixed(value: int) -> int:
    """splitmix64's output for a state (Steele, Lea and Flood, 2014), which grows once before it."""
    value = (value + _GAMMA) & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


def _primes_from(least: int, count: int) -> tuple[int, ...]:
    """The first `count` primes that are at least `least`, ascending."""
    found: list[int] = []
    number = max(least, 2)
    while len(found) < count:
        if _is_prime(number):
            found.append(number)
        number += 1
    return tuple(found)


@lru_cache(1 << 14)  # tables of a model begin at the same number
def _is_prime(number: int) -> bool:
    return all(number % divisor for divisor in range(2, isqrt(number) + 1))
