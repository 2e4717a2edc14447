"""What a trace of experts says of caches: hits of a sequence that goes on decoding."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from hmt.base.errors import ConfigError
from hmt.bench.replay import Cache, replay
from hmt.engine.experts.trace import Routed, TraceFile, TraceHeader
from hmt.planner.cost.expert_hit_rate import HitCurve, measured_curve
from hmt.weights.eviction import Heat

# Between two points the curve is straight; small caches, which several sequences share, matter
# most.
RESIDENCIES = tuple(
    n / 64 for n in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48)
)
_LEAST_STEPS = 8  # of one token: with fewer the whole trace counts
_MOST_SEQUENCES = 8


def traced_curve(file: Path) -> HitCurve:
    """Hits of the engine's default policy at RESIDENCIES, once its cache is full.

    Steps of one token count, as a sequence decodes, and the first half of them fills the cache:
    reads of what no cache could have had yet would make large caches look as bad as small ones.
    Where more steps have a token of each of several sequences, these count, each sequence by
    itself.  A trace without such steps counts as it is.  Raises ConfigError for a file that is no
    trace.
    """
    trace = TraceFile(file)
    records, origin = list(trace), f"the trace {file}"
    if not records:
        raise ConfigError(f"the trace {file} has no steps: record some with --expert-trace")
    counts = Counter(len(one.experts) for one in records if one.layer == trace.header.layers[0])
    sequences = max(range(1, _MOST_SEQUENCES + 1), key=lambda count: counts[count])
    if counts[sequences] < _LEAST_STEPS:
        return measured_curve(RESIDENCIES, _rates(trace.header, records, 0), origin)
    decoding = [one for one in records if len(one.experts) == sequences]
    each = [
        _rates(trace.header, [_of_sequence(one, n) for one in decoding], len(decoding) // 2)
        for n in range(sequences)
    ]
    return measured_curve(RESIDENCIES, list(map(fmean, zip(*each, strict=True))), origin)


def _rates(header: TraceHeader, records: Sequence[Routed], skip: int) -> list[float]:
    """Hits at each residency, without those of the first `skip` records."""
    sizes = header.block_sizes()
    caches = [Cache(Heat(), sizes, int(share * header.total_bytes)) for share in RESIDENCIES]
    return [replay(records, cache, skip=skip).rate for cache in caches]


def _of_sequence(record: Routed, n: int) -> Routed:
    return record._replace(
        experts=record.experts[n : n + 1], scales=record.scales[n : n + 1], guess=None
    )
