"""Requests to tokens: configuration, scheduler, executors, sampler, summary, `Engine`."""

from hmt.engine.config import EngineConfig
from hmt.engine.core import check_tokens
from hmt.engine.engine import Engine, LoadedModel
from hmt.engine.loading import Prepared, prepare
from hmt.engine.look import ExpertMap, Fill, Look, Place
from hmt.engine.prediction import StepPrediction, StepTotals
from hmt.engine.scheduled import Load
from hmt.engine.streams import Ticket
from hmt.engine.summary import (
    Bottleneck,
    DeviceAccount,
    ExpertAccount,
    Phase,
    RunSummary,
    bottleneck,
)
from hmt.engine.trial import Verdict

__all__ = [
    "Bottleneck",
    "DeviceAccount",
    "Engine",
    "EngineConfig",
    "ExpertAccount",
    "ExpertMap",
    "Fill",
    "Load",
    "LoadedModel",
    "Look",
    "Phase",
    "Place",
    "Prepared",
    "RunSummary",
    "StepPrediction",
    "StepTotals",
    "Ticket",
    "Verdict",
    "bottleneck",
    "check_tokens",
    "prepare",
]
