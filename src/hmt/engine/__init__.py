"""Requests to tokens: configuration, scheduler, executors, sampler, summary, `Engine`."""

from hmt.engine.api import LoadedModel
from hmt.engine.config import EngineConfig
from hmt.engine.drift.account import DriftAccount
from hmt.engine.engine import Engine
from hmt.engine.experts.ab_gate import ABResult
from hmt.engine.loading.prepare import prepare
from hmt.engine.loading.prepared import Prepared
from hmt.engine.prediction_report import StepPrediction
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
from hmt.engine.snapshot import EngineSnapshot, ExpertMap
from hmt.engine.speculation.account import SpeculationAccount
from hmt.engine.streams import RequestHandle
