"""Processes that compute a model together: the first one's side, and the workers'."""

from hmt.engine.ranks.workers import RankWorkers, start_workers
