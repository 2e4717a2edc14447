"""Hits that a trace foretells: of a cache that everything fits in, and of one that follows."""

import random
from contextlib import closing
from pathlib import Path

import pytest
import torch

from hmt.bench.traced_curve import RESIDENCIES, traced_curve
from hmt.engine.experts.trace import TraceHeader, TraceWriter

EXPERTS, CHOSEN, LAYERS, STEPS = 32, 4, (1, 2), 120


def trace_of(file: Path, sequences: int, favourites: int, loyal: float = 1.0) -> Path:
    """Each sequence has its own favourites, from which it chooses nearly always."""
    chance = random.Random(sequences)
    header = TraceHeader("a model", EXPERTS, CHOSEN, {layer: (100,) * EXPERTS for layer in LAYERS})
    own = [chance.sample(range(EXPERTS), favourites) for _ in range(sequences)]

    def chosen(sequence: int) -> list[int]:
        from_all = chance.random() > loyal
        return chance.sample(range(EXPERTS) if from_all else own[sequence], CHOSEN)

    with closing(TraceWriter(file, header)) as writer:
        for _ in range(STEPS):
            for layer in LAYERS:
                tokens = torch.tensor([chosen(sequence) for sequence in range(sequences)])
                writer.routed(layer, tokens, torch.ones(tokens.shape))
    return file


@pytest.mark.parametrize("sequences", [1, 3])
def test_caches_that_hold_what_sequences_choose_find_everything(
    tmp_path: Path, sequences: int
) -> None:
    file = trace_of(tmp_path / "trace", sequences, 8)
    curve = traced_curve(file)
    assert curve.hits(8 / EXPERTS) > 0.99, "of each sequence by itself"
    assert len(curve.points) <= len(RESIDENCIES) + 2 and str(file) in curve.origin
