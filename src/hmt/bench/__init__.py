"""Measuring: how fast a run is against its machine, and how much a model still knows."""

from hmt.bench.quality import (
    Extent,
    Quality,
    Quiz,
    Score,
    TeacherForced,
    evaluate,
    grade,
    perplexity,
    retrievals,
    short_tasks,
)
from hmt.bench.tasks import BEGIN, Corpus, Encode, Retrieval, Tokens, short_task

__all__ = [
    "BEGIN",
    "Corpus",
    "Encode",
    "Extent",
    "Quality",
    "Quiz",
    "Retrieval",
    "Score",
    "TeacherForced",
    "Tokens",
    "evaluate",
    "grade",
    "perplexity",
    "retrievals",
    "short_task",
    "short_tasks",
]
