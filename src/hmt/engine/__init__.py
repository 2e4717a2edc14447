"""Requests to tokens: configuration, scheduler, executors, sampler, summary, `Engine`."""

from hmt.engine.config import EngineConfig
from hmt.engine.core import check_tokens
from hmt.engine.engine import Engine, LoadedModel
from hmt.engine.loading import Prepared, prepare
from hmt.engine.scheduler import Load
from hmt.engine.streams import Ticket
from hmt.engine.summary import Bottleneck, DeviceAccount, ExpertAccount, Phase, RunSummary
from hmt.engine.trial import Verdict

__all__ = [
    "Bottleneck",
    "DeviceAccount",
    "Engine",
    "EngineConfig",
    "ExpertAccount",
    "Load",
    "LoadedModel",
    "Phase",
    "Prepared",
    "RunSummary",
    "Ticket",
    "Verdict",
    "check_tokens",
    "prepare",
]
