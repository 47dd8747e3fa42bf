"""Figures of a run in bounded memory: means, extremes and quantiles without keeping what they are made of."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

_RATIO = math.log(1.01)
_SMALLEST = 1e-9


class Summary:
    """Count, mean, extremes and quantiles of numbers ≥ 0; quantiles are off by at most half a percent."""

    __slots__ = ("_counts", "count", "maximum", "minimum", "total")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.count = 0
        self.total = 0.0
        self.minimum = math.inf
        self.maximum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Take in `value`, as often as `times` says."""
        if times <= 0:
            return
        bucket = round(math.log(value) / _RATIO) if value > _SMALLEST else -4096
        self._counts[bucket] = self._counts.get(bucket, 0) + times
        self.count += times
        self.total += value * times
        if value < self.minimum:
            self.minimum = value
        if value > self.maximum:
            self.maximum = value

    @property
    def mean(self) -> float:
        """0 when nothing was added."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """The value below which `share` of all lie; 0 when nothing was added."""
        if not self.count:
            return 0.0
        wanted = max(share * self.count, 1)
        seen = 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen >= wanted:
                middle = math.exp(bucket * _RATIO) if bucket > -4096 else 0.0
                return min(max(middle, self.minimum), self.maximum)
        return self.maximum

    def to_json(self) -> dict[str, float]:
        """mean, min, p50, p90, p99, max, count."""
        return {
            "mean": self.mean,
            "min": self.minimum if self.count else 0.0,
            "p50": self.quantile(0.5),
            "p90": self.quantile(0.9),
            "p99": self.quantile(0.99),
            "max": self.maximum,
            "count": self.count,
        }


def _summary() -> Summary:
    return field(default_factory=Summary)


@dataclass(slots=True)
class RunStats:
    """Everything that a run is summed up in. Times in seconds.

    gaps: between two tokens of a request (inter-token latency). tpot: mean gap of each request.
    busy: device seconds; elapsed: from the first arrival to the last end; replicas: devices (or groups of them).
    """

    replicas: int = 1
    ttft: Summary = _summary()
    tpot: Summary = _summary()
    gaps: Summary = _summary()
    latency: Summary = _summary()
    queue: Summary = _summary()
    step: Summary = _summary()  # device seconds of a step
    occupancy: Summary = _summary()  # rows of a step
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    tokens: int = 0  # asked for in steps
    padded_tokens: int = 0  # computed in steps
    busy: float = 0.0
    begin: float = math.inf
    end: float = 0.0
    peak_pages: int = 0
    total_pages: int = 0

    @property
    def elapsed(self) -> float:
        return max(self.end - self.begin, 0.0) if self.finished or self.aborted or self.failed else 0.0

    def per_second(self, count: float) -> float:
        """`count` over the run's time."""
        return count / self.elapsed if self.elapsed else 0.0

    @property
    def padding(self) -> float:
        """Share of computed tokens that nobody asked for."""
        return 1 - self.tokens / self.padded_tokens if self.padded_tokens else 0.0

    @property
    def utilisation(self) -> float:
        """Share of the time that devices were busy."""
        return self.busy / (self.elapsed * self.replicas) if self.elapsed else 0.0

    def to_json(self) -> dict[str, object]:
        """Flat numbers, and a summary for each latency."""
        return {
            "requests": {
                "finished": self.finished,
                "aborted": self.aborted,
                "failed": self.failed,
                "refused": self.refused,
            },
            "seconds": self.elapsed,
            "requests_per_second": self.per_second(self.finished),
            "output_tokens_per_second": self.per_second(self.output_tokens),
            "total_tokens_per_second": self.per_second(self.output_tokens + self.prompt_tokens),
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "cached_prompt_tokens": self.cached_tokens,
            "ttft": self.ttft.to_json(),
            "tpot": self.tpot.to_json(),
            "itl": self.gaps.to_json(),
            "e2e": self.latency.to_json(),
            "queue": self.queue.to_json(),
            "step": self.step.to_json(),
            "rows_per_step": self.occupancy.mean,
            "steps": self.steps,
            "utilisation": self.utilisation,
            "padding": self.padding,
            "preemptions": self.preemptions,
            "peak_page_use": self.peak_pages / self.total_pages if self.total_pages else 0.0,
            "replicas": self.replicas,
        }
