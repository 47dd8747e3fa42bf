"""What the machine can do at this moment: measured for about a second beside every cell."""

from __future__ import annotations

from dataclasses import dataclass

from jcb.bench.roofline import Probe


@dataclass(frozen=True)
class Moment:
    """copy: bytes read and written a second. matmul: float32 operations a second."""

    copy: float
    matmul: float


class Calibration:
    """Copies 64 MB and multiplies 1024 × 1024 matrices, the best of a few each."""

    def __init__(self) -> None:
        self._probe = Probe("float32")

    def __call__(self) -> Moment:
        found = self._probe.measure(repeat=4)
        return Moment(copy=found.bandwidth, matmul=found.flops)
