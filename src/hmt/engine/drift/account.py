"""What came of watching requests' activations."""

from dataclasses import dataclass


@dataclass(slots=True)
class DriftAccount:
    """Since the last reset.

    requests       that drifted, and go on in higher precision
    tokens         that were computed in higher precision
    windows        that were compared with calibration
    largest_kl     of these, in nats for each channel
    """

    requests: int = 0
    tokens: int = 0
    windows: int = 0
    largest_kl: float = 0.0
