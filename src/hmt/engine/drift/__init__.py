"""Requests that leave the text that a model was calibrated with: how that is seen, and watched."""

from hmt.engine.drift.calibration import CalibratedActivations, calibrate_activations
from hmt.engine.drift.statistics import (
    EVERY,
    STATISTICS,
    WINDOW_TOKENS,
    ActivationStatistics,
    statistics_beside,
)
