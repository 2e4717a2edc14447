"""How often caches of experts had what was wanted, by model: kept from run to run.

A file of JSON in HMT's cache folder: for each model some points of the curve of hits over residency
that `hmt.planner.observed` makes of what runs saw.  What a run adds, at its end and after each few
thousand steps, counts fully at first, and less with all that comes later.  Nothing here ever fails:
a file that cannot be understood is as none, and the next run replaces it.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from math import isfinite
from typing import Any

from hmt.engine.foreseen import Decoded, Foreseer
from hmt.engine.foresight import expert_count
from hmt.engine.kept_file import replace_file
from hmt.engine.machine import cache_folder
from hmt.planner import Demand
from hmt.planner.observed import SeenPoint, Sighting, seen_curve
from hmt.planner.routing import HitCurve, usual_curve

_FILE = "experts.json"
_VERSION = 1  # of the file, and of what its points mean
_MODELS = 64  # the last ones that ran
_FADES = 0.7  # per run: after a dozen an old one counts for a hundredth
_LEAST = 0.01  # of the weight of all points: what counts for less is forgotten
_BUCKETS = 32  # of shares: points of one count together
_LEAST_EXPERTS = 64  # of a run: fewer are chance
_MOST_WEIGHT = 1e5  # of a run, which would drown all others
# Of a configuration, what says how weights are kept or who wrote it, and not what they do.
_ELSEWHERE = {
    *("quantization_config", "dtype", "torch_dtype", "transformers_version", "_name_or_path"),
    *("use_cache", "compression_config"),
}


def routing_of(config: Mapping[str, Any]) -> str:
    """Names the way in which a model routes: that of its configuration, in any encoding."""
    kept = {name: value for name, value in config.items() if name not in _ELSEWHERE}
    text = json.dumps(kept, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def keep_sighting(config: Mapping[str, Any], sighting: Sighting | None) -> None:
    """Add what a run of the model with this `config` saw, if it tells anything."""
    point = None if sighting is None else sighting.point()
    if sighting is None or point is None or sighting.needed < _LEAST_EXPERTS:
        return
    models, name = _load(), routing_of(config)
    runs, points = _entry(models.pop(name, None), sighting.experts, sighting.chosen)
    models[name] = {
        "experts": sighting.experts,
        "chosen": sighting.chosen,
        "runs": runs + 1,
        "points": [asdict(each) for each in with_point(points, point)],
    }
    last = dict([*models.items()][-_MODELS:])
    content = json.dumps({"version": _VERSION, "models": last}, indent=1)
    replace_file(cache_folder() / _FILE, content)


class HitKeeper:
    """Keeps what one loaded model's cache of experts does, piece by piece; for one thread."""

    def __init__(self, foreseer: Foreseer, config: Mapping[str, Any]) -> None:
        """`config` is the model's."""
        self._foreseer, self._config = foreseer, config
        self._decoded, self._shared = Decoded(), (0, 0)

    def keep(self, decoded: Decoded, shared: tuple[int, int] | None) -> None:
        """Add what has come since the last call; see Foreseer.sighting."""
        since, self._decoded = decoded.since(self._decoded), replace(decoded)
        if shared is not None:
            before, self._shared = self._shared, shared
            shared = shared[0] - before[0], shared[1] - before[1]
        keep_sighting(self._config, self._foreseer.sighting(since, shared))


def with_point(points: Sequence[SeenPoint], new: SeenPoint) -> list[SeenPoint]:
    """`points`, each counting less than before, and `new` among them, by share."""
    sums: dict[int, tuple[float, float, float]] = {}
    fresh = SeenPoint(new.share, new.hits, min(_MOST_WEIGHT, new.weight))
    faded = [SeenPoint(each.share, each.hits, _FADES * each.weight) for each in points]
    for each in (*faded, fresh):
        bucket = int(each.share * _BUCKETS)
        share, hits, weight = sums.get(bucket, (0.0, 0.0, 0.0))
        more = each.weight
        sums[bucket] = share + more * each.share, hits + more * each.hits, weight + more
    least = _LEAST * sum(weight for _, _, weight in sums.values())
    return [
        # Rounding must not move a point into the next bucket.
        SeenPoint(max(share / weight, bucket / _BUCKETS), min(1.0, hits / weight), weight)
        for bucket, (share, hits, weight) in sorted(sums.items())
        if weight >= least
    ]


def seen_hits(config: Mapping[str, Any], experts: int, chosen: int) -> HitCurve | None:
    """The curve that runs of this model have shown; None where there were none."""
    runs, points = _entry(_load().get(routing_of(config)), experts, chosen)
    if not points:
        return None
    told = "1 run of this model" if runs == 1 else f"{runs} runs of this model, or parts of them"
    return seen_curve(usual_curve(experts), points, told)


def with_hits(demand: Demand, config: Mapping[str, Any]) -> Demand:
    """`demand` of the model with this `config`, with the hits that its runs have shown."""
    experts = expert_count(demand.spec)
    if not experts:
        return demand
    return replace(demand, hits=seen_hits(config, experts, demand.spec.experts_per_token))


def _entry(found: object, experts: int, chosen: int) -> tuple[int, list[SeenPoint]]:
    """Runs and points of a model; none of either where they are not of one like this."""
    try:
        assert isinstance(found, dict)
        if (found["experts"], found["chosen"]) != (experts, chosen):
            return 0, []
        points = [
            SeenPoint(float(each["share"]), float(each["hits"]), float(each["weight"]))
            for each in found["points"]
        ]
        runs = max(1, int(found["runs"]))
    except (AssertionError, KeyError, TypeError, ValueError, OverflowError):
        return 0, []
    return runs, [each for each in points if _possible(each)]


def _possible(point: SeenPoint) -> bool:
    known = all(isfinite(value) for value in (point.share, point.hits, point.weight))
    return known and 0 < point.share < 1 and 0 <= point.hits <= 1 and point.weight > 0


def _load() -> dict[str, Any]:
    try:
        content = json.loads((cache_folder() / _FILE).read_text())
        if content["version"] == _VERSION and isinstance(content["models"], dict):
            return dict(content["models"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return {}
