"""Counters, gauges and histograms as plain objects, and the bundle that an engine keeps.

Written by one thread (the engine's), read by any: a reader may see a number one event old, never a torn one.
Nothing here throws on a number, and no label value comes from a request.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from jcb.types import RowKind, SequenceOutput, StepPlan

TTFT_BUCKETS = (
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0)
    + (2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
)  # fmt: skip
ITL_BUCKETS = (
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75)
    + (1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
)  # fmt: skip
E2E_BUCKETS = (
    (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0)
    + (40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
)  # fmt: skip
TOKEN_BUCKETS = tuple(float(b * 10**e) for e in range(6) for b in (1, 2, 5))
STEP_TOKEN_BUCKETS = tuple(float(2**e) for e in range(15))
N_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)


STEP_BUCKETS = tuple(m * 10.0**e for e in range(-5, 2) for m in (1.0, 2.0, 5.0))


class Counter:
    """A number that only grows; `labels` splits it by a closed set of words."""

    __slots__ = ("by_label", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self.by_label: dict[str, float] = {}

    def inc(self, amount: float = 1.0, label: str | None = None) -> None:
        """Adds `amount`; a negative or non-finite one is dropped, a counter never falls."""
        if not 0 <= amount < math.inf:
            return
        self.value += amount
        if label is not None:
            self.by_label[label] = self.by_label.get(label, 0.0) + amount

    def raise_to(self, total: float) -> None:
        """Follows a total counted elsewhere."""
        self.inc(total - self.value)


class Gauge:
    """A number that is what it is now, never below 0."""

    __slots__ = ("value",)

    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def set(self, value: float) -> None:
        self.value = value if 0 <= value < math.inf else 0.0


class Histogram:
    """Counts of observations by upper bound; `bounds` ascend, the last bucket (infinity) is implied."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Adds `times` observations of `value`; a negative one (a clock step) counts as 0."""
        value = value if 0 <= value < math.inf else 0.0
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, int]]:
        """(upper bound as Prometheus writes it, observations at or below it)."""
        rows, running = [], 0
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            running += count
            rows.append(("+Inf" if bound == math.inf else repr(bound), running))
        return rows


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one turn of the loop. host: what it did while it did not wait for the device.

    device: from when the device could begin the step taken in until its result was there; None: no step was.
    """

    host: float
    device: float | None = None


def _histogram(bounds: tuple[float, ...]) -> Histogram:
    return field(default_factory=lambda: Histogram(bounds))


def _counter() -> Counter:
    return field(default_factory=Counter)


def _gauge() -> Gauge:
    return field(default_factory=Gauge)


@dataclass(slots=True, eq=False)
class EngineMetrics:
    """Everything an engine counts. Times in seconds."""

    num_requests_running: Gauge = _gauge()
    num_requests_waiting: Gauge = _gauge()
    kv_cache_usage_perc: Gauge = _gauge()  # 0 .. 1: pages in use by sequences
    kv_cache_cached_perc: Gauge = _gauge()  # 0 .. 1: pages that only the prefix cache holds
    batch_slot_occupancy: Gauge = _gauge()  # 0 .. 1
    model_load_seconds: Gauge = _gauge()
    weight_bytes: Gauge = _gauge()  # on each device
    page_bytes: Gauge = _gauge()  # on each device

    prompt_tokens: Counter = _counter()
    generation_tokens: Counter = _counter()
    request_success: Counter = _counter()  # label: finish reason
    request_errors: Counter = _counter()  # label: a word for the kind of error
    num_preemptions: Counter = _counter()
    prefix_cache_queries: Counter = _counter()  # tokens looked up
    prefix_cache_hits: Counter = _counter()  # tokens found
    admission_rejections: Counter = _counter()
    steps: Counter = _counter()
    compiles_after_ready: Counter = _counter()
    compile_seconds: Counter = _counter()  # label: stage
    programs: Gauge = _gauge()
    bucket_hits: Counter = _counter()  # label: name of a step program
    bucket_tokens: Counter = _counter()  # label: as above; tokens that were asked for
    bucket_padding: Counter = _counter()  # label: as above; tokens computed beside them

    step_host_seconds: Histogram = _histogram(STEP_BUCKETS)
    step_device_seconds: Histogram = _histogram(STEP_BUCKETS)
    time_to_first_token_seconds: Histogram = _histogram(TTFT_BUCKETS)
    inter_token_latency_seconds: Histogram = _histogram(ITL_BUCKETS)
    request_time_per_output_token_seconds: Histogram = _histogram(ITL_BUCKETS)
    e2e_request_latency_seconds: Histogram = _histogram(E2E_BUCKETS)
    request_queue_time_seconds: Histogram = _histogram(E2E_BUCKETS)
    request_prefill_time_seconds: Histogram = _histogram(E2E_BUCKETS)
    request_decode_time_seconds: Histogram = _histogram(E2E_BUCKETS)
    request_inference_time_seconds: Histogram = _histogram(E2E_BUCKETS)
    iteration_tokens: Histogram = _histogram(STEP_TOKEN_BUCKETS)
    request_prompt_tokens: Histogram = _histogram(TOKEN_BUCKETS)
    request_generation_tokens: Histogram = _histogram(TOKEN_BUCKETS)
    request_params_max_tokens: Histogram = _histogram(TOKEN_BUCKETS)
    request_params_n: Histogram = _histogram(N_BUCKETS)

    info: Mapping[str, str] = field(default_factory=dict)  # block_size, num_gpu_blocks: for `cache_config_info`
    max_num_seqs: int = 0  # for batch_slot_occupancy; 0: unknown
    step_size: int = 0  # tokens that the last step computed, padding included; 0: unknown

    def record_bucket(self, name: str, tokens: int, size: int) -> None:
        """Counts a step of `tokens` tokens that ran in a program for `size`."""
        self.step_size = size
        self.bucket_hits.inc(label=name)
        self.bucket_tokens.inc(tokens, name)
        self.bucket_padding.inc(size - tokens, name)

    def record_step(
        self, plan: StepPlan, outputs: list[SequenceOutput], stats: Mapping[str, int], times: StepTimes
    ) -> None:
        """Counts one turn of the loop; a turn without rows and outputs is not a step."""
        if times.device is not None:
            self.step_host_seconds.observe(times.host)
            self.step_device_seconds.observe(times.device)
        if not plan.rows and not outputs:
            return
        self.steps.inc()
        self.iteration_tokens.observe(plan.num_tokens)
        if self.max_num_seqs:
            self.batch_slot_occupancy.set(len(plan.rows) / self.max_num_seqs)
        for row in plan.rows:
            if row.kind is RowKind.NEW and row.sequence.first_scheduled_time is not None:
                waited = row.sequence.first_scheduled_time - row.sequence.request.arrival_time
                self.request_queue_time_seconds.observe(waited)
        self.record_stats(stats)

    def record_stats(self, stats: Mapping[str, int]) -> None:
        """Takes over the scheduler's numbers as they are now."""
        pages = max(stats["pages_total"], 1)
        self.num_requests_running.set(stats["running"])
        self.num_requests_waiting.set(stats["waiting"])
        self.kv_cache_usage_perc.set(stats["pages_used"] / pages)
        self.kv_cache_cached_perc.set(stats["pages_cached"] / pages)
        self.num_preemptions.raise_to(stats["preemptions"])
        self.prefix_cache_queries.raise_to(stats["prefix_queried_tokens"])
        self.prefix_cache_hits.raise_to(stats["prefix_hit_tokens"])
