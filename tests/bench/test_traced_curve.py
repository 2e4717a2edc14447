"""Hits that a trace foretells: of a cache that everything fits in, and of one that follows."""

import random
from contextlib import closing
from pathlib import Path

import pytest
import torch

from hmt.bench import traced_curve as traced_curves
from hmt.bench.cache import load_traces
from hmt.bench.traced_curve import RESIDENCIES, DeviceCache, traced_curve
from hmt.engine.experts.trace import TraceHeader, TraceWriter
from hmt.planner.cost.expert_hit_rate import HitCurve, needed_experts

EXPERTS, CHOSEN, LAYERS, STEPS = 32, 4, (1, 2), 120


def trace_of(file: Path, texts: int, favourites: int, loyal: float = 1.0) -> Path:
    """Each text has favourites of its own, from which it chooses nearly always."""
    chance = random.Random(texts)
    header = TraceHeader("a model", EXPERTS, CHOSEN, {layer: (100,) * EXPERTS for layer in LAYERS})
    own = [chance.sample(range(EXPERTS), favourites) for _ in range(texts)]

    def chosen(text: int) -> list[int]:
        from_all = chance.random() > loyal
        return chance.sample(range(EXPERTS) if from_all else own[text], CHOSEN)

    with closing(TraceWriter(file, header)) as writer:
        for _ in range(STEPS):
            for layer in LAYERS:
                tokens = torch.tensor([chosen(text) for text in range(texts)])
                writer.routed(layer, tokens, torch.ones(tokens.shape))
    return file


@pytest.mark.parametrize("texts", [1, 3])
@pytest.mark.parametrize("on_device", [False, True])
def test_caches_that_hold_what_texts_choose_find_everything(
    tmp_path: Path, texts: int, on_device: bool
) -> None:
    file = trace_of(tmp_path / "trace", texts, 8)
    curve = traced_curve(file, DeviceCache(8, 0.5) if on_device else None)
    assert curve.hits(8 / EXPERTS) > 0.99, "of each text by itself"
    assert 0 <= curve.independence <= 1 and str(file) in curve.origin


def test_a_devices_cache_is_replayed_by_its_own_rules(tmp_path: Path) -> None:
    file = trace_of(tmp_path / "trace", 1, 8, 0.6)

    def hits(share: float, slots: int = 12) -> float:
        return traced_curve(file, DeviceCache(slots, share)).hits(slots / EXPERTS)

    host: HitCurve = traced_curve(file)
    # A link that brings nothing leaves a cache empty; one that brings all fills it at once.
    assert hits(0.0) == 0.0 < 0.5 < hits(0.25) <= 1.0
    assert hits(1.0, EXPERTS // 2) > hits(1.0, EXPERTS // 4)
    assert hits(1.0) == pytest.approx(host.hits(12 / EXPERTS), abs=0.15)
    known = [share for share, _ in traced_curve(file, DeviceCache(12, 1.0)).points]
    assert known == [0.0, *(size / EXPERTS for size in (6, 9, 12)), 1.0]
    assert len(host.points) == len(RESIDENCIES) + 2


def test_texts_that_share_a_devices_cache_miss_what_they_were_seen_to_miss(tmp_path: Path) -> None:
    file, texts, slots = trace_of(tmp_path / "trace", 4, 8, 0.6), 4, 16
    curve = traced_curve(file, DeviceCache(slots, 1.0))
    trace = load_traces([file])[0]
    together = [one for one in trace.records if len(one.experts) == texts]
    cache = [DeviceCache(slots, 1.0)]
    (found,) = traced_curves._device_rates(cache, trace, together, len(together) // 2)
    needed = needed_experts(EXPERTS, trace.header.top_k, texts, slots, curve, texts)
    predicted = needed.absent / (needed.absent + needed.cached)
    assert predicted == pytest.approx(1 - found, rel=0.25)
