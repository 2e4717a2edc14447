"""Measuring: how fast a run is against its machine, and how much a model still knows."""

from hmt.bench.quality import (
    Extent,
    Quality,
    Quiz,
    Score,
    evaluate,
    grade,
    perplexity,
    retrievals,
    short_tasks,
)
from hmt.bench.tasks import BEGIN, Corpus, Encode, Tokens, short_task
