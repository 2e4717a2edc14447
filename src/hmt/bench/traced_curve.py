"""What a trace of experts says of caches, for predictions: hits of a text that goes on decoding."""

from collections import Counter
from pathlib import Path

from hmt.bench.cache import DEFAULT, load_traces
from hmt.bench.replay import replay
from hmt.planner.routing import HitCurve, measured_curve
from hmt.weights.policies import POLICIES, Surroundings

# Between two points the curve is straight; small caches, which several texts share, matter most.
RESIDENCIES = (1 / 64, 1 / 32, 3 / 64, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4)
_LEAST_STEPS = 8  # of one token: with fewer the whole trace counts


def traced_curve(file: Path) -> HitCurve:
    """Hits of the engine's own policy, once its cache is full.

    Steps of one token count, as a text decodes, and the first half of them fills the cache: reads
    of what no cache could have had yet would make large caches look as bad as small ones.  A trace
    without such steps counts as it is.  Raises ConfigError for a file that is no trace.
    """
    trace = load_traces([file])[0]
    first = trace.header.layers[0]
    records = [record for record in trace.records if len(record.experts) == 1]
    steps = Counter(record.layer for record in records)[first]
    skip = len(records) // 2
    if steps < _LEAST_STEPS:
        records, skip = list(trace.records), 0
    sizes = trace.header.block_sizes()
    rates = []
    for share in RESIDENCIES:
        hits = replay(
            records,
            sizes,
            int(share * trace.header.total_bytes),
            lambda pressure: POLICIES[DEFAULT](Surroundings(block_bytes=sizes, pressure=pressure)),
            skip=skip,
        )
        rates.append(hits.rate)
    return measured_curve(RESIDENCIES, rates, f"the trace {file}")
