"""What is known of activations of ordinary text, and how far a request's are from it.

Of the hidden states behind the last layer, before the final norm, each channel's mean and deviation
over the calibration text are kept.  A window of a request is compared channel by channel: the
Kullback-Leibler divergence of two normal distributions, with the window's mean and variance and the
calibration's, as the mean over channels, in nats.  Its skewness is that of all its numbers, each in
deviations of its channel from the mean.  Limits are the largest of calibration itself.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from hmt.base.errors import ConfigError

STATISTICS: Final = "activation-statistics.hmt"  # not .safetensors, which are a model's weights
EVERY: Final = 8  # of so many positions the last is looked at
BLOCK_TOKENS: Final = 64
BLOCK_ROWS: Final = BLOCK_TOKENS // EVERY
WINDOW: Final = 4  # blocks that are judged together, at most: 64 to 256 tokens
WINDOW_TOKENS: Final = WINDOW * BLOCK_TOKENS
_LEAST_KL: Final = 0.02
_LEAST_SKEW: Final = 3.0
_LEAST_DEVIATION: Final = 1e-6
_LEAST_VARIANCE: Final = 1e-4  # of a channel that stands still in a window: a divergence of 4.1


Floats = NDArray[np.float32]  # small arrays, for which numpy takes a third of torch's time


class BlockSums(NamedTuple):
    """Sums over the rows of a block, in deviations of calibration.

    first, second   f32 [channels]: of numbers, and of their squares
    cubes           of all channels together
    """

    first: Floats
    second: Floats
    cubes: float


class Distance(NamedTuple):
    """How far a window is from calibration: nats for each channel, and skewness."""

    kl: float
    skew: float


@dataclass(frozen=True, slots=True, eq=False)
class ActivationStatistics:
    """What a calibration has found.

    mean, deviation   f32 [channels]
    limits            of windows of 1, 2, ... WINDOW blocks
    """

    mean: Floats
    deviation: Floats
    limits: tuple[Distance, ...]

    @staticmethod
    def of(sequences: Iterable[Floats]) -> "ActivationStatistics":
        """From the rows that were looked at of each text: f32 [rows, channels].

        Goes through `sequences` twice.  Raises ConfigError where no text has a whole window.
        """
        count, longest = 0, 0
        total = squares = np.zeros((), np.float64)
        for rows in sequences:
            whole = rows[: len(rows) // BLOCK_ROWS * BLOCK_ROWS].astype(np.float64)
            count, longest = count + len(whole), max(longest, len(whole))
            total, squares = total + whole.sum(0), squares + (whole * whole).sum(0)
        if longest < WINDOW * BLOCK_ROWS:
            raise ConfigError(
                f"no text of the calibration has {WINDOW_TOKENS} tokens: give longer ones"
            )
        mean = total / count
        deviation = np.sqrt(np.maximum(squares / count - mean * mean, _LEAST_DEVIATION**2))
        found = ActivationStatistics(mean.astype(np.float32), deviation.astype(np.float32), ())
        seen: list[list[Distance]] = [[] for _ in range(WINDOW)]
        for blocks, one in (window for rows in sequences for window in found.windows(rows)):
            seen[blocks - 1].append(one)
        limits = (
            Distance(
                max(_LEAST_KL, *(one.kl for one in windows)),
                max(_LEAST_SKEW, *(one.skew for one in windows)),
            )
            for windows in seen
        )
        return ActivationStatistics(found.mean, found.deviation, tuple(limits))

    def sums(self, rows: Floats) -> list[BlockSums]:
        """Of blocks one behind the other: rows f32 [blocks * BLOCK_ROWS, channels].

        Each block's have the same bits however many there are.
        """
        scaled = (rows - self.mean) / self.deviation
        scaled = scaled.reshape(-1, BLOCK_ROWS, rows.shape[1])
        squares = scaled * scaled
        cubes = (squares * scaled).sum(1).sum(1).tolist()
        return list(map(BlockSums, scaled.sum(1), squares.sum(1), cubes))

    def windows(self, rows: Floats) -> Iterator[tuple[int, Distance]]:
        """Of each window of a text its blocks, and how far it is away.

        rows   f32 [rows, channels]
        """
        blocks = self.sums(rows[: len(rows) // BLOCK_ROWS * BLOCK_ROWS])
        for end in range(1, len(blocks) + 1):
            window = blocks[max(0, end - WINDOW) : end]
            yield len(window), distance(window)

    def is_beyond(self, found: Distance, blocks: int) -> bool:
        """Whether a window of so many blocks is further away than any of calibration."""
        limit = self.limits[blocks - 1]
        return found.kl > limit.kl or found.skew > limit.skew

    def write(self, file: Path, weights: str) -> None:
        """Keep it as a safetensors file, which is complete or not there.

        weights   what tells those apart that it is of
        """
        limits = [list(limit) for limit in self.limits]
        metadata = {"weights": weights, "limits": json.dumps(limits)}
        tensors = {"mean": self.mean, "deviation": self.deviation}
        new = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            new.write_bytes(save(tensors, metadata))
            new.replace(file)
        finally:
            new.unlink(missing_ok=True)

    @staticmethod
    def read(file: Path) -> tuple["ActivationStatistics", str]:
        """What `write` wrote, and for which weights.  Raises ConfigError where it is damaged."""
        try:
            content = file.read_bytes()
            tensors = load(content)
            length = int.from_bytes(content[:8], "little")
            said: dict[str, Any] = json.loads(content[8 : 8 + length])["__metadata__"]
            mean, deviation = tensors["mean"], tensors["deviation"]
            limits = tuple(Distance(*map(float, limit)) for limit in json.loads(said["limits"]))
            shapes = mean.shape == deviation.shape and mean.ndim == 1 and len(limits) == WINDOW
            if not shapes or {mean.dtype, deviation.dtype} != {np.dtype(np.float32)}:
                raise ValueError("its tensors are of other shapes")
            return ActivationStatistics(mean, deviation, limits), said["weights"]
        except (OSError, SafetensorError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{file} does not hold statistics of activations ({error}): delete it, or make it "
                "anew with `hmt calibrate activations`"
            ) from error


def distance(window: Sequence[BlockSums]) -> Distance:
    """How far whole blocks, one behind the other, are from calibration."""
    (mean, square, cube), *others = window
    for block in others:
        mean, square, cube = mean + block.first, square + block.second, cube + block.cubes
    count = np.float32(len(window) * BLOCK_ROWS)
    mean, square = mean / count, square / count
    cube /= float(count) * len(mean)
    variance = np.maximum(square - mean * mean, _LEAST_VARIANCE)
    middle, all_squares = float(mean.mean()), float(square.mean())
    logarithm = float(np.log(variance).mean())
    kl = (float((variance + mean * mean).mean()) - 1 - logarithm) / 2
    spread = max(all_squares - middle * middle, _LEAST_VARIANCE)
    skew = (cube - 3 * middle * all_squares + 2 * middle**3) / spread**1.5
    return Distance(kl, skew)


def statistics_beside(path: Path) -> Path:
    """Where statistics of the model in a folder or GGUF file are looked for."""
    return path / STATISTICS if path.is_dir() else path.with_name(f"{path.stem}-{STATISTICS}")
