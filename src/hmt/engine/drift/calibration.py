"""Statistics of activations, from text that is like what will come."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from hmt.engine.drift.statistics import BLOCK_TOKENS, ActivationStatistics, Floats

_HELD_OUT = 4  # of so many sequences one


class RowSource(Protocol):
    """What computes hidden states of sequences: a `LoadedModel`."""

    def hidden_rows(self, tokens: Sequence[int], /) -> Floats:
        """Of each EVERY positions the last: f32 [rows, channels]."""
        ...


@dataclass(frozen=True, slots=True)
class CalibratedActivations:
    """Statistics, and how well they tell.

    tokens     that were read
    held_out   sequences that were compared with statistics of all others
    alarms     of these, sequences that they would have found to drift
    """

    statistics: ActivationStatistics
    tokens: int
    held_out: int
    alarms: int


def calibrate_activations(
    model: RowSource,
    sequences: Sequence[Sequence[int]],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> CalibratedActivations:
    """Statistics of all of `sequences`: token ids, of at most the model's context each.

    Every fourth text is also compared with statistics of the others.  Raises ConfigError where
    they are too short, and what `LoadedModel.hidden_rows` raises.
    """
    rows = list[Floats]()
    for number, text in enumerate(sequences):
        progress(number, len(sequences))
        if len(text) >= BLOCK_TOKENS:
            rows.append(model.hidden_rows(text))
    statistics = ActivationStatistics.of(rows)
    held_out = rows[_HELD_OUT - 1 :: _HELD_OUT]
    alarms = 0
    if held_out:
        others = [one for n, one in enumerate(rows) if n % _HELD_OUT != _HELD_OUT - 1]
        known = ActivationStatistics.of(others)
        alarms = sum(drifts(known, text) for text in held_out)
    return CalibratedActivations(statistics, sum(map(len, sequences)), len(held_out), alarms)


def drifts(statistics: ActivationStatistics, rows: Floats) -> bool:
    """Whether any window of a text is beyond the limits; rows as `hidden_rows` gives them."""
    windows = statistics.windows(rows)
    return any(statistics.is_beyond(found, blocks) for blocks, found in windows)
