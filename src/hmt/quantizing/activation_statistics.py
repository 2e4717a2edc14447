"""Statistics of the calibration's activations, by which runs see that a request drifts."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from hmt.base.folders import writing
from hmt.engine.drift import EVERY, STATISTICS, WINDOW_TOKENS, ActivationStatistics
from hmt.engine.drift.statistics import Floats
from hmt.engine.loading.kv_scales import identity
from hmt.engine.loading.source import open_source
from hmt.quantizing.hidden_states import HiddenStates


class _Rows:
    """Of each sequence the rows that are looked at, behind the last layer."""

    def __init__(self, hidden: HiddenStates, layers: int, sequences: Sequence[Sequence[int]]):
        self._hidden, self._layers, self._sequences = hidden, layers, sequences

    def __iter__(self) -> Iterator[Floats]:
        first = 0
        for sequence in self._sequences:
            rows = self._hidden.of_sequence(self._layers, first, len(sequence))
            yield rows[EVERY - 1 :: EVERY].numpy()
            first += len(sequence)


def write_statistics(
    model: Path, hidden: HiddenStates, sequences: Sequence[Sequence[int]], layers: int
) -> None:
    """Write them into the complete folder `model`, unless they are there.

    No text may be long enough for them.  Raises DiskReadError and DiskWriteError.
    """
    file = model / STATISTICS
    if file.exists() or max(map(len, sequences)) < WINDOW_TOKENS:
        return
    found = ActivationStatistics.of(_Rows(hidden, layers, sequences))
    with writing(f"writing {file}"):
        found.write(file, identity(open_source(model)))
