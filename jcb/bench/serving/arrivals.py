"""When each request is sent: all at once, at a rate with Poisson or gamma gaps, or at a rate that rises."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

RampUp = Literal["linear", "exponential"]


@dataclass(frozen=True)
class Arrivals:
    """A traffic pattern. rate: requests a second, inf is all at once. burstiness: shape of the gaps' gamma
    distribution; 1 is a Poisson process, less comes in bursts, inf is a metronome. ramp: how the rate goes from
    ramp_start to ramp_end over the requests; None keeps `rate`.
    """

    rate: float = math.inf
    burstiness: float = 1.0
    ramp: RampUp | None = None
    ramp_start: float = 0.0
    ramp_end: float = 0.0

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ValueError(f"--request-rate {self.rate} must be above 0 requests a second, or inf")
        if not self.burstiness > 0:
            raise ValueError(f"--burstiness {self.burstiness} must be above 0; 1 is a Poisson process")
        if self.ramp is None and (self.ramp_start or self.ramp_end):
            raise ValueError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
        if self.ramp is not None and not (self.ramp_start > 0 and self.ramp_end > 0 and math.isinf(self.rate)):
            raise ValueError(
                f"--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps above 0 (got {self.ramp_start} "
                f"and {self.ramp_end}) and no --request-rate (got {self.rate})"
            )

    def offsets(self, count: int, seed: int) -> np.ndarray:
        """Seconds after the start at which `count` requests are sent, ascending f64[count].

        At a steady rate they are scaled so that the last is sent at count / rate exactly: the rate asked for is the
        rate sent, whatever the draw.
        """
        rates = np.array([self._rate_of(index, count) for index in range(count)])
        gaps = np.zeros(count) if np.isinf(rates).all() else 1 / rates
        if not math.isinf(self.burstiness):
            rng = np.random.default_rng(seed)
            gaps = gaps * rng.gamma(self.burstiness, 1 / self.burstiness, count)
        offsets = np.cumsum(gaps)
        if self.ramp is None and offsets[-1] > 0:
            offsets *= count / self.rate / offsets[-1]
        return offsets

    def _rate_of(self, index: int, count: int) -> float:
        """Requests a second when request `index` is due."""
        if self.ramp is None:
            return self.rate
        part = index / max(count - 1, 1)
        if self.ramp == "linear":
            return self.ramp_start + (self.ramp_end - self.ramp_start) * part
        return self.ramp_start * (self.ramp_end / self.ramp_start) ** part
