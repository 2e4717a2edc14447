"""Requests to tokens: configuration, scheduler, executors, sampler, summary, `Engine`."""

from hmt.engine.api import LoadedModel
from hmt.engine.config import EngineConfig
from hmt.engine.engine import Engine
from hmt.engine.experts.ab_gate import ABResult
from hmt.engine.loading.prepare import Prepared, prepare
from hmt.engine.prediction import StepPrediction, StepTotals
from hmt.engine.request_limits import check_tokens
from hmt.engine.run_summary import (
    Bottleneck,
    DeviceAccount,
    ExpertAccount,
    Phase,
    RunSummary,
    bottleneck,
)
from hmt.engine.scheduling.sequence import Load
from hmt.engine.snapshot import EngineSnapshot, ExpertMap, ExpertTier, TierUsage
from hmt.engine.streams import RequestHandle

__all__ = [
    "ABResult",
    "Bottleneck",
    "DeviceAccount",
    "Engine",
    "EngineConfig",
    "EngineSnapshot",
    "ExpertAccount",
    "ExpertMap",
    "ExpertTier",
    "Load",
    "LoadedModel",
    "Phase",
    "Prepared",
    "RequestHandle",
    "RunSummary",
    "StepPrediction",
    "StepTotals",
    "TierUsage",
    "bottleneck",
    "check_tokens",
    "prepare",
]
